"""How a gateway stops: announced, then drained; what is left is told so and ended.

While it is announced everything is served, so that load balancers can look elsewhere first, and
every answer closes its connection. Then nothing new is accepted; open requests, those that wait for a
backend included, have the drain time. Must never end a request early but on a second signal.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gateway import tasks
from gateway.edge.handler import Handler
from gateway.edge.server import Listener
from gateway.errors import Draining

_log = logging.getLogger("radixgate.stopping")

_FLUSH_POLL_S = 0.02
_LAST_FLUSH_S = 1.0  # for the errors that the last requests are ended with


class Stopping:
    """The end of one gateway. `close_door` closes the data listener."""

    def __init__(
        self, handler: Handler, listener: Listener, close_door: Callable[[], None]
    ) -> None:
        self._handler = handler
        self._listener = listener
        self._close_door = close_door
        self._hurried = asyncio.Event()

    async def run(self, delay_s: float, drain_s: float) -> None:
        """Return when every request has ended and what was answered has been sent."""
        _log.info("stopping: serving for %g s more, then what is open has %g s", delay_s, drain_s)
        self._handler.leave()
        self._listener.close_after_answers()
        if delay_s:
            await _within(delay_s, self._hurried.wait())
        self._handler.drain()
        self._close_door()
        self._listener.close_idle()
        if self.hurried:
            self._end_all()  # those that began since
        elif self._handler.live:
            _log.info("draining, requests open: %d", len(self._handler.live))
        await _within(drain_s, self._quiet())
        if self._handler.live and not self.hurried:
            _log.warning(
                "requests that timeouts.drain_s was too short for: %d", len(self._handler.live)
            )
        self._end_all()
        await _within(_LAST_FLUSH_S, self._flushed())

    def hurry(self) -> None:
        """End every open request now, and wait no more (a second signal)."""
        self._hurried.set()
        self._end_all()

    async def unless_hurried(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work`, but no longer than until nothing is wanted but the end."""
        both = [
            tasks.spawn(work, name="last work"),
            tasks.spawn(self._hurried.wait(), name="hurried"),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()

    @property
    def hurried(self) -> bool:
        """Whether nothing is wanted any more but the end."""
        return self._hurried.is_set()

    def _end_all(self) -> None:
        for exchange in list(self._handler.live):
            exchange.shut_down()
        for connection in self._listener.receiving():
            connection.give_up(Draining("The gateway is shutting down."))

    async def _quiet(self) -> None:
        """Wait until all is answered: also what is being uploaded, which is refused when it is here."""
        await self._handler.quiet.wait()
        listener = self._listener
        while (listener.unsent() or listener.receiving()) and not self.hurried:  # noqa: ASYNC110 - transports signal no empty buffer
            await asyncio.sleep(_FLUSH_POLL_S)

    async def _flushed(self) -> None:
        """Wait until clients have what was written to them: cutting those who still send loses it."""
        while self._listener.connections:  # noqa: ASYNC110 - as above
            await asyncio.sleep(_FLUSH_POLL_S)


async def _within(seconds: float, awaited: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(awaited, seconds)
