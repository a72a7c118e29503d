"""`radixgate top`: the live page's figures in a terminal, or once as plain text when piped.

Reads `/events` of the admin listener as the page does. Must never print what it was not shown by
`top_view`, and leaves the terminal as it found it.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import aiohttp
import orjson

from gateway.cli import gateway_url, numbers
from gateway.cli.admin_key import NoAdminKey, add_argument, admin_headers
from gateway.cli.top_view import BAD, Cell, Line, plain, screen
from gateway.config.overlay import ADMIN_KEY
from gateway.extras import MissingExtra, load_rich

HELP = "live view of backends, classes, hits and waits in the terminal; plain text when piped"
EPILOG = """\
keys: q or Ctrl-C quits
piped or with --once it prints one table and exits; with --interval it goes on
exit codes: 0 ok, 1 failed, 2 bad usage"""

_FIRST_DELAY_S, _LAST_DELAY_S = 1.0, 10.0
_CONNECT_S = 10.0
_SILENCE_S = 15.0  # a gateway tells something every second
_EVENT_MAX = 8 * 1024 * 1024

_interval = numbers.number(float, lambda value: 1 <= value <= 3600, "1 to 3600")


class TopError(Exception):
    """Why there is nothing to show, said to the user."""


class Lost(TopError):
    """The gateway is away or has no place: it may be back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    gateway_url.add_argument(parser)
    add_argument(parser)
    parser.add_argument("--once", action="store_true", help="print the figures once, as plain text")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        help="piped: print again every so often; on a terminal: redraw no more often (default 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Show until told to stop; 1 when there is no gateway to show."""
    live = sys.stdout.isatty() and not args.once
    try:
        source = Source(args.gateway, admin_headers(args))
    except NoAdminKey as error:
        print(f"radixgate top: {error}", file=sys.stderr)
        return 2
    try:
        if live:
            return asyncio.run(_live(source, args.interval or 0.0, load_rich("the live view")))
        asyncio.run(_print(source, None if args.once else args.interval))
    except MissingExtra as error:
        print(f"radixgate top: {error}; --once and pipes need nothing", file=sys.stderr)
        return 1
    except TopError as error:
        print(f"radixgate top: {error}", file=sys.stderr)
        return 1
    return 0


async def _print(source: "Source", interval_s: float | None) -> None:
    """Print one frame, or one every interval for ever."""
    due = 0.0
    async for frame in frames(source, _tell):
        now = asyncio.get_running_loop().time()
        if now < due:
            continue
        print(plain(frame), flush=True)
        if interval_s is None:
            return
        print(flush=True)
        due = now + interval_s - 0.5  # ticks come about every second


def _tell(problem: str) -> None:
    print(f"radixgate top: {problem}; trying again", file=sys.stderr, flush=True)


# --- on a terminal


async def _live(source: "Source", interval_s: float, rich: ModuleType) -> int:
    """Redraw with every frame until a key or a signal ends it."""
    task = asyncio.current_task()
    assert task is not None
    show = _Screen(interval_s, rich, task.cancel)
    try:
        with show.live, _keys(show.key, show.draw):
            async for frame in frames(source, show.lost):
                show.frame(frame)
    except asyncio.CancelledError:  # a key, or a signal
        return 0
    return 1  # frames never end by themselves


class _Screen:
    """The terminal while `live` is entered."""

    def __init__(self, interval_s: float, rich: ModuleType, end: Callable[[], object]) -> None:
        self._text = rich.text.Text
        self._end = end
        self._interval_s = interval_s
        self._frame: dict[str, Any] | None = None
        self._note: Cell | None = None
        self._due = 0.0
        self.live = rich.live.Live(screen=True, auto_refresh=False, vertical_overflow="crop")

    def frame(self, frame: dict[str, Any]) -> None:
        """Take new figures, and draw them unless it is too soon."""
        now = asyncio.get_running_loop().time()
        self._frame, self._note = frame, None
        if now >= self._due:
            self._due = now + self._interval_s - 0.5
            self.draw()

    def lost(self, problem: str) -> None:
        """Keep the last figures, and say that they are old."""
        self._note = Cell(f"{problem}; trying again", BAD)
        self.draw()

    def key(self, key: str) -> None:
        """Quit on a q, and when the terminal is gone."""
        if key in ("q", "Q", ""):
            self._end()

    def draw(self) -> None:
        """Draw what there is, in the room there is."""
        if self._frame is None:
            return
        width, height = shutil.get_terminal_size()
        lines = screen(self._frame, width, height, self._note)
        text = self._text("\n", no_wrap=True, overflow="crop").join(map(self._styled, lines))
        self.live.update(text, refresh=True)

    def _styled(self, line: Line) -> Any:
        return self._text.assemble(*line, end="")


@contextlib.contextmanager
def _keys(press: Callable[[str], None], draw: Callable[[], None]) -> Iterator[None]:
    """Tell keys as they are pressed, another size, and the end; the terminal is put back after."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, press, "q")
    loop.add_signal_handler(signal.SIGWINCH, draw)
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if descriptor is None else _key_by_key(descriptor)
    if descriptor is not None:
        loop.add_reader(descriptor, lambda: press(_read_key(descriptor)))
    try:
        yield
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
            _put_back(descriptor, before)


def _read_key(descriptor: int) -> str:
    """Return the key that was pressed; nothing = the terminal is gone."""
    try:
        return os.read(descriptor, 64).decode("ascii", "replace")[:1]
    except OSError:
        return ""


def _key_by_key(descriptor: int) -> list[Any]:
    import termios  # noqa: PLC0415 - no terminal, no need
    import tty  # noqa: PLC0415

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    return before


def _put_back(descriptor: int, before: list[Any] | None) -> None:
    import termios  # noqa: PLC0415

    if before is not None:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- from the gateway


@dataclass(slots=True, frozen=True)
class Source:
    """A gateway's admin listener; `headers` bring its key, if it has one."""

    gateway: str
    headers: Mapping[str, str] = field(default_factory=dict)


async def frames(
    source: Source, lost: Callable[[str], None]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the gateway's frames for ever; `lost` hears why there is none for a while.

    Raises:
        TopError: there was no gateway to begin with, or it refuses for good.
    """
    url = _events_url(source.gateway)
    seen = False
    delay_s = _FIRST_DELAY_S
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    async with aiohttp.ClientSession(
        timeout=timeout, read_bufsize=_EVENT_MAX, headers=source.headers
    ) as session:
        while True:
            try:
                async with contextlib.aclosing(_connected(session, url)) as stream:
                    async for frame in stream:
                        seen, delay_s = True, _FIRST_DELAY_S
                        yield frame
                problem = "the gateway has ended the view"
            except Lost as error:
                if not seen:
                    raise
                problem = str(error)
            lost(problem)
            await asyncio.sleep(delay_s)
            delay_s = min(_LAST_DELAY_S, 2 * delay_s)


async def _connected(
    session: aiohttp.ClientSession, url: str
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the frames of one connection until it ends."""
    try:
        async with session.get(url, allow_redirects=False) as answer:
            _check(answer, url)
            async for data in _ticks(answer):
                yield data
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no event is so long
        raise Lost(
            f"no gateway answers at {url.removesuffix('/events')} ({_said(error)})"
        ) from error


async def _ticks(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    kind = b""
    async for line in answer.content:
        name, _, value = line.rstrip(b"\n").partition(b": ")
        if name == b"event":
            kind = value
        elif name == b"data" and kind == b"tick":
            yield orjson.loads(value)


def _check(answer: aiohttp.ClientResponse, url: str) -> None:
    if answer.status == 200 and answer.content_type == "text/event-stream":
        return
    if answer.status in (401, 403):
        raise TopError(f"the admin listener wants its key: set {ADMIN_KEY} to it")
    if answer.status == 503:
        raise Lost("the gateway has no place for another viewer")
    raise TopError(f"{url} is no radixgate admin listener's (status {answer.status})")


def _said(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # a name that cannot be found has one below 0
        return os.strerror(number) if number > 0 else error.os_error.strerror or str(error)
    return str(error) or type(error).__name__


def _events_url(gateway: str) -> str:
    try:
        return gateway_url.parse(gateway).text + "/events"
    except gateway_url.NoGatewayUrl as error:
        raise TopError(str(error)) from error
