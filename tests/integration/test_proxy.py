"""The proxies' configurations that docs/behind-a-proxy.md shows, through the real programs.

Skipped where a program is not installed. Each runs as the documents have it, but for addresses, file
names, and what needs a network beyond this machine.
"""

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.sim.ports import free_port
from gateway.telemetry.record import RequestRecord
from tests.integration.rig import (
    DONE,
    Conn,
    Received,
    Rig,
    Script,
    chat,
    chat_event,
    closed,
    eventually,
    ok_chat,
    post,
    running,
)
from tests.integration.tls_rig import HOST, Authority, TlsRig, client_context

DOC = Path(__file__).resolve().parents[2] / "docs" / "behind-a-proxy.md"
CHAT = "/v1/chat/completions"
PROXIES = [
    pytest.param(
        name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name} here")
    )
    for name in ("nginx", "caddy")
]


def documented(language: str) -> str:
    """Return the only block of that language in the document."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)
    return str(block)


def swapped(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


@dataclass
class Site:
    """Where the proxy listens, and its files."""

    directory: Path
    port: int
    cert: Path
    upstream: int


def nginx_command(site: Site) -> list[str]:
    server = swapped(
        documented("nginx"),
        ("127.0.0.1:8080", f"127.0.0.1:{site.upstream}"),
        ("listen 443 ", f"listen 127.0.0.1:{site.port} "),
        ("/etc/nginx/llm.crt", str(site.cert)),
        ("/etc/nginx/llm.key", str(site.cert)),
    )
    owner = "user root;\n" if os.geteuid() == 0 else ""
    places = "".join(
        f"{kind}_temp_path {site.directory}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = (
        f"{owner}worker_processes 1;\ndaemon off;\npid {site.directory}/pid;\n"
        "error_log stderr warn;\nevents {}\n"
        f"http {{\naccess_log off;\n{places}{server}}}\n"
    )
    path = site.directory / "nginx.conf"
    path.write_text(config)
    return ["nginx", "-p", str(site.directory), "-e", "stderr", "-c", str(path)]


def caddy_command(site: Site) -> list[str]:
    block = swapped(
        documented("caddyfile"),
        ("127.0.0.1:8080", f"127.0.0.1:{site.upstream}"),
        (
            "llm.example.com {\n",
            f":{site.port} {{\n\tbind 127.0.0.1\n\ttls {site.cert} {site.cert}\n",
        ),
    )
    path = site.directory / "Caddyfile"
    path.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + block)
    return ["caddy", "run", "--config", str(path), "--adapter", "caddyfile"]


COMMANDS = {"nginx": nginx_command, "caddy": caddy_command}


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    await closed(writer)
    return True


async def started(command: list[str], site: Site) -> asyncio.subprocess.Process | None:
    """Run a proxy; None = it has ended, as when somebody took its port meanwhile."""
    home = {**os.environ, "HOME": str(site.directory), "XDG_DATA_HOME": str(site.directory)}
    with (site.directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=home, stdout=log, stderr=log)
    while not await accepts(site.port):
        if process.returncode is not None:
            return None
        await asyncio.sleep(0.02)
    return process


@contextlib.asynccontextmanager
async def program(name: str, tmp_path: Path, cert: Path, upstream: int) -> AsyncIterator[int]:
    """Run a proxy before the port `upstream` until the block ends; its own port is the value."""
    for _ in range(3):
        site = Site(tmp_path, free_port(), cert, upstream)
        process = await started(COMMANDS[name](site), site)
        if process is not None:
            break
    else:
        pytest.fail((tmp_path / "log").read_text())
    try:
        yield site.port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def proxied(name: str, tmp_path: Path, *scripts: Script) -> AsyncIterator[tuple[TlsRig, Rig]]:
    """Run a gateway behind a proxy; the first rig's connections go to the proxy."""
    authority = Authority(tmp_path)
    cert = authority.issue("site")
    trusted = ("trusted_proxies=[127.0.0.1]",)
    async with (
        running(*scripts or (ok_chat,), settings=trusted) as rig,
        program(name, tmp_path, cert, rig.port) as port,
    ):
        front = _Front(rig.app, rig.backends, rig.clients, client_context(authority))
        front.at = port
        yield front, rig


class _Front(TlsRig):
    at = 0

    @property
    def port(self) -> int:
        return self.at


@pytest.mark.parametrize("name", PROXIES)
async def test_every_event_arrives_before_the_next_is_sent(name: str, tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def one_by_one(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await seen.wait()
        await conn.chunk(chat_event("b"))
        await conn.chunk(DONE)
        await conn.end()

    async with proxied(name, tmp_path, one_by_one) as (front, rig):
        client = await front.connect()
        await client.send(post(CHAT, chat(stream=True)))
        head = await client.head()
        assert head.status == 200
        assert b'"a"' in await client.chunk()
        seen.set()
        assert (await client.body(head)).body.endswith(DONE)
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}


@pytest.mark.parametrize("name", PROXIES)
async def test_a_client_that_leaves_stops_the_backend(name: str, tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def endless(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.gone()
        gone.set()

    async with proxied(name, tmp_path, endless) as (front, rig):
        client = await front.connect()
        await client.send(post(CHAT, chat(stream=True)))
        await client.head()
        assert b'"a"' in await client.chunk()
        client.close()
        await gone.wait()
        await rig.settled()
        assert rig.outcomes() == {"client_closed": 1}


@pytest.mark.parametrize("name", PROXIES)
async def test_large_bodies_pass_and_the_clients_address_is_told(name: str, tmp_path: Path) -> None:
    async with proxied(name, tmp_path) as (front, rig):
        noted: list[RequestRecord] = []
        rig.app.telemetry.log = noted.append
        body = chat("x" * 3_000_000)
        answer = await front.ask(post(CHAT, body, "X-Forwarded-For: 6.6.6.6"))
        assert answer.status == 200, answer.body[:300]
        (received,) = rig.backends[0].received
        assert [record.client for record in noted] == ["127.0.0.1"]
        assert len(received.body) > 3_000_000
        assert received.header("x-forwarded-for") == "127.0.0.1, 127.0.0.1"


@pytest.mark.parametrize("name", PROXIES)
async def test_refusals_come_through_as_they_are(name: str, tmp_path: Path) -> None:
    async with proxied(name, tmp_path) as (front, rig):
        answer = await front.ask(post(CHAT, {**chat(), "model": "none"}))
        assert (answer.status, answer.code) == (404, "model_not_found")
        assert answer.header("x-request-id")
        rig.handler.drain()
        answer = await front.ask(post(CHAT, chat()))
        assert (answer.status, answer.code) == (503, "draining")
        assert answer.header("retry-after")
        await eventually(lambda: not rig.handler.live, 20)
