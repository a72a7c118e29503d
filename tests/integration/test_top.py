"""`radixgate top` against admin listeners: piped, in a terminal, over restarts, and refused."""

import argparse
import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from gateway.cli import top
from gateway.cli.top import Lost, Source, TopError, frames
from tests.integration.rig import chat, ok_chat, post, running
from tests.unit.cli.test_top_view import frame

ROOT = Path(__file__).resolve().parents[2]
_WAIT_S = 60.0
TOP = [sys.executable, "-m", "gateway.cli.main", "top", "--gateway"]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Hold a port where nobody listens, so that nobody else can meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Gateway:
    """A listener that tells the same frame over and over."""

    def __init__(self, *, key: str | None = None, full: bool = False) -> None:
        self.key = key
        self.full = full
        self.port = 0
        self.views = 0
        self.release = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/events", self._events)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.release.set()
        await self._runner.cleanup()
        self.release = asyncio.Event()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if self.full:
            return web.Response(status=503)
        self.views += 1
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        tick = orjson.dumps(frame(version=f"view-{self.views}"))
        await answer.write(b'event: history\ndata: {"chat":[]}\n\n')
        while not self.release.is_set():
            await answer.write(b"event: tick\ndata: %b\n\n" % tick)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.release.wait(), 0.02)
        return answer


@contextlib.asynccontextmanager
async def listening(**more: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(**more)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def piped(url: str, *more: str, **env: str) -> tuple[int, str, str]:
    """Run it without a terminal; return code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *TOP, url, *more, cwd=ROOT, env=os.environ | env,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(_WAIT_S * 2):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_piped_it_prints_a_real_gateway_once_and_exits() -> None:
    async with running(ok_chat, ok_chat) as rig:
        await rig.ask(post("/v1/chat/completions", chat(), "x-request-id: asked-1"))
        code, out, err = await piped(rig.app.admin_url)
    assert (code, err) == (0, "")
    assert out.startswith("Radixgate")
    assert "2 up" in out
    for part in ("TTFT p50 / p95", "hits predicted / reported", "asked-1"):
        assert part in out
    assert "\x1b" not in out


async def test_an_interval_prints_again_until_the_reader_has_enough() -> None:
    async with listening() as gateway:
        process = await asyncio.create_subprocess_exec(
            *TOP, gateway.url, "--interval", "1", cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        printed = 0
        async with asyncio.timeout(_WAIT_S * 2):
            while printed < 2:
                printed += (await process.stdout.readline()).startswith(b"Radixgate  view-1")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(_WAIT_S):
            await process.communicate()
            assert process.returncode == 1  # interrupted, as every command that is


async def test_no_gateway_is_one_line_and_exit_code_1(closed_port: int) -> None:
    code, out, err = await piped(f"http://127.0.0.1:{closed_port}")
    assert (code, out) == (1, "")
    assert err.startswith(
        f"radixgate top: no gateway answers at http://127.0.0.1:{closed_port} (Connection refused)"
    )
    assert err.count("\n") == 1


async def first(source: Source) -> dict[str, Any]:
    """Return the first frame."""
    async with asyncio.timeout(_WAIT_S), contextlib.aclosing(frames(source, print)) as stream:
        return await anext(stream)


async def test_the_admin_key_comes_from_the_environment() -> None:
    async with listening(key="open sesame") as gateway:
        code, out, err = await piped(gateway.url)
        assert (code, out) == (1, "")
        assert "wants its key: set RADIXGATE_ADMIN_KEY" in err
        assert (await piped(gateway.url, RADIXGATE_ADMIN_KEY="open sesame"))[0] == 0
        named = ("--admin-key-env", "KEY_OF_PROD")
        assert (await piped(gateway.url, *named, KEY_OF_PROD="open sesame"))[0] == 0
        code, out, err = await piped(gateway.url, *named)
        assert (code, out, err) == (2, "", "radixgate top: KEY_OF_PROD is not set\n")


async def test_what_is_no_admin_listener_is_told() -> None:
    async with running(ok_chat) as rig:
        with pytest.raises(TopError, match=r"is no radixgate admin listener's \(status 404\)"):
            await first(Source(rig.app.url))


async def test_a_gateway_without_a_place_is_told() -> None:
    async with listening(full=True) as gateway:
        with pytest.raises(Lost, match="no place for another viewer"):
            await first(Source(gateway.url))


@pytest.mark.parametrize(
    "url", ["localhost:9090", "ftp://x", "http://", "http://[::1", "http://x:y"]
)
async def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(TopError, match="is no URL"):
        await first(Source(url))


async def test_it_goes_on_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(top, "_LAST_DELAY_S", 0.02)
    problems: list[str] = []
    heard = asyncio.Event()

    def lost(problem: str) -> None:
        problems.append(problem)
        heard.set()

    async with listening() as gateway, asyncio.timeout(_WAIT_S):
        stream = frames(Source(gateway.url), lost)
        assert (await anext(stream))["version"] == "view-1"

        async def restart() -> None:
            await gateway.stop()
            await heard.wait()
            await gateway.start()

        restarting = asyncio.ensure_future(restart())
        async for told in stream:
            if told["version"] == "view-2":
                break
        await restarting
        await stream.aclose()
    assert problems[0] == "the gateway has ended the view"


def test_a_terminal_without_rich_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    args = argparse.Namespace(
        gateway="http://127.0.0.1:1", once=False, interval=None, admin_key_env=None
    )
    assert top.run(args) == 1
    assert "the live view needs the extra `top`: pip install" in capsys.readouterr().err


# --- in a terminal


class Terminal:
    """A terminal of a size with the command in it. `screen` is all that was written to it."""

    def __init__(self, url: str, columns: int, lines: int) -> None:
        self.ours, self._theirs = pty.openpty()
        self.size(columns, lines)
        self.before = termios.tcgetattr(self._theirs)
        self.screen = self.errors = b""
        env = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [*TOP, url], cwd=ROOT, env=env | {"TERM": "xterm-256color"},
            stdin=self._theirs, stdout=self._theirs, stderr=subprocess.PIPE,
        )  # fmt: skip

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, wanted: bytes, start: int = 0) -> int:
        """Read until something was written after `start`; return where it ends."""
        end = time.monotonic() + 2 * _WAIT_S
        while (found := self.screen.find(wanted, start)) < 0:
            assert time.monotonic() < end, self.screen[start:]
            if select.select([self.ours], [], [], 0.2)[0]:
                self.screen += os.read(self.ours, 65536)
        return found + len(wanted)

    def ended(self) -> int:
        """Wait for the end, reading what is still written; return the exit code."""
        end = time.monotonic() + _WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            if select.select([self.ours], [], [], 0.1)[0]:
                self.screen += os.read(self.ours, 65536)
        while select.select([self.ours], [], [], 0)[0]:
            self.screen += os.read(self.ours, 65536)
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()
        return self.process.returncode

    def restored(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.before and b"\x1b[?1049l" in self.screen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    """Run a listener in a thread: these tests read a terminal."""
    loop = asyncio.new_event_loop()
    made: list[Gateway] = []
    ready = threading.Event()

    async def start() -> None:
        made.append(Gateway())
        await made[0].start()
        ready.set()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop)
    assert ready.wait(_WAIT_S)
    yield made[0]
    asyncio.run_coroutine_threadsafe(made[0].stop(), loop).result(_WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_in_a_terminal_it_draws_follows_the_size_and_quits_on_q(gateway: Gateway) -> None:
    terminal = Terminal(gateway.url, 120, 30)
    try:
        drawn = terminal.read_until(b"predicted / reported")
        assert b"\x1b[?1049h" in terminal.screen  # a screen of its own
        terminal.size(40, 12)
        terminal.process.send_signal(signal.SIGWINCH)
        again = terminal.read_until(b"gpu-a", drawn)
        terminal.read_until(b"KV", drawn)
        assert b"predicted" not in terminal.screen[drawn:again]
        os.write(terminal.ours, b"q")
        assert terminal.ended() == 0
        assert terminal.restored()
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal_a_signal_ends_it_gently(gateway: Gateway, number: signal.Signals) -> None:
    terminal = Terminal(gateway.url, 80, 24)
    try:
        terminal.read_until(b"gpu-a")
        terminal.process.send_signal(number)
        assert terminal.ended() == 0
        assert terminal.restored()
        assert terminal.errors == b""
    finally:
        terminal.close()


def test_in_a_terminal_without_a_gateway_it_says_so(closed_port: int) -> None:
    terminal = Terminal(f"http://127.0.0.1:{closed_port}", 80, 24)
    try:
        assert terminal.ended() == 1
        assert terminal.restored()
        assert b"no gateway answers" in terminal.errors
    finally:
        terminal.close()
