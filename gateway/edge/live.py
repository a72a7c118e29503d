"""Server-sent events for the live page: one rendering per tick, shared by everyone who looks.

Nobody looks: no task, no rendering, no request watched. A viewer that reads too slowly skips ticks,
and one that does not read at all is dropped, so that memory is bounded by the cap on viewers. Must
never wait for one viewer before another gets its tick.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from gateway import tasks
from gateway.edge.same_site import refuse_foreign_view
from gateway.errors import Overloaded

_log = logging.getLogger("radixgate.admin")

TICK_S = 1.0
MAX_VIEWERS = 32
STALL_S = 10.0  # how long a viewer may not read
_RETRY_S = 5.0
# What the kernel keeps for a viewer; its own choice may be megabytes, minutes of stale ticks.
_SEND_BUFFER = 128 * 1024
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
}


class Shown(Protocol):
    """What is shown (`live_frame.Scene`)."""

    def open(self) -> None:
        """Begin to watch: somebody looks."""

    def close(self) -> None:
        """Watch no more."""

    def render(self) -> bytes:
        """Return this tick as one line of JSON."""

    def history(self) -> bytes:
        """Return what a viewer that missed ticks needs besides, as one line of JSON."""


@dataclass(slots=True)
class _Tick:
    """One rendering. `history` is made when the first viewer asks for it."""

    number: int
    event: bytes
    history: bytes | None = None


class Hub:
    """Those who look at the page. `viewers` and `rendered` are for reading."""

    def __init__(
        self,
        shown: Shown,
        *,
        tick_s: float = TICK_S,
        most: int = MAX_VIEWERS,
        stall_s: float = STALL_S,
    ) -> None:
        self._shown = shown
        self._tick_s = tick_s
        self._most = most
        self._stall_s = stall_s
        self._tick: _Tick | None = None
        self._news = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False
        self.viewers = 0
        self.rendered = 0

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /events`: a `history` event and a `tick`, then a `tick` every second."""
        refuse_foreign_view(request)
        if self.viewers >= self._most or self._closed:
            raise Overloaded(
                f"{self._most} viewers look at the live page already", retry_after_s=_RETRY_S
            )
        response = web.StreamResponse(headers=_HEADERS)
        self._enter()
        try:
            await response.prepare(request)
            _bound_send_buffer(request)
            await self._follow(request, response)
        finally:
            self._leave()
        return response

    def tick(self) -> None:
        """Render for everyone who looks, and wake them."""
        number = self.rendered = self.rendered + 1
        self._tick = _Tick(number, b"event: tick\ndata: %b\n\n" % self._shown.render())
        self._wake()

    async def close(self, _app: object = None) -> None:
        """End every view; the gateway stops."""
        self._closed = True
        self._stop()
        self._wake()

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        seen = -1  # a viewer that has just come has missed all
        while not self._closed and (tick := self._tick) is not None:
            if tick.number != seen:
                missed = tick.number != seen + 1
                seen = tick.number
                if not await self._send(request, response, self._bytes(tick, missed=missed)):
                    return
                continue  # another tick may have come meanwhile
            await self._news.wait()

    async def _send(self, request: web.Request, response: web.StreamResponse, data: bytes) -> bool:
        """Write to one viewer; False = it has gone, or does not read and is dropped."""
        try:
            async with asyncio.timeout(self._stall_s):
                await response.write(data)
        except ConnectionError:
            return False
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return False
        return True

    def _bytes(self, tick: _Tick, *, missed: bool) -> bytes:
        if not missed:
            return tick.event
        if tick.history is None:
            tick.history = b"event: history\ndata: %b\n\n" % self._shown.history()
        return tick.history + tick.event

    def _enter(self) -> None:
        self.viewers += 1
        if self._ticker is None:
            self._shown.open()
            try:
                self.tick()
            except BaseException:
                self._leave()
                raise
            self._ticker = tasks.spawn(self._run(), name="live page")

    def _leave(self) -> None:
        self.viewers -= 1
        if not self.viewers:
            self._stop()

    def _stop(self) -> None:
        """Cease to render."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._shown.close()
        self._tick = None

    async def _run(self) -> None:
        """Tick until nobody looks; a fault ends all views, and who reconnects tries again."""
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                self.tick()
        except Exception:  # noqa: BLE001 - whatever it is, it costs the page and nothing else
            _log.exception("the live page cannot be rendered")
            self._ticker = None
            self._stop()
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _bound_send_buffer(request: web.Request) -> None:
    sock = request.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
