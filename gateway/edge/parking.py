"""Requests that wait at the gateway for a backend: parked here, woken by the dispatcher.

The dispatcher decides who starts and whose time is over; this acts on it: in the next turn of the
loop, so that no exchange is started in the middle of another one's end. A parked request costs its
entry and its body, no task; one timer serves all time limits. Must never decide anything.
"""

import asyncio
from math import inf
from typing import TYPE_CHECKING

from gateway.core.queued import QueuedDispatcher
from gateway.core.types import Refusal, RefusalKind, Ticket
from gateway.errors import GatewayError, NoBackend, QueueFull, QueueTimeout

if TYPE_CHECKING:
    from gateway.edge.exchange import Exchange


class Parking:
    """The parked exchanges by ticket."""

    def __init__(self, dispatcher: QueuedDispatcher) -> None:
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._parked: dict[int, Exchange] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._woken = False
        dispatcher.wake = self._wake

    def park(self, ticket: Ticket, exchange: "Exchange") -> None:
        """Keep `exchange` until its ticket may start, its time is over or its client leaves."""
        self._parked[ticket.id] = exchange
        self._watch_clock()

    def leave(self, ticket: Ticket) -> None:
        """Forget an exchange that ends; also right for one that is not parked."""
        self._parked.pop(ticket.id, None)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._woken = False
        now = self._loop.time()
        for ticket in self._dispatcher.take_started():
            exchange = self._parked.pop(ticket.id, None)
            if exchange is not None and not exchange.ended:
                exchange.released(ticket, now)

    def _watch_clock(self) -> None:
        due = self._dispatcher.next_due
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, inf
        now = self._loop.time()
        for ticket in self._dispatcher.due(now):
            exchange = self._parked.pop(ticket.id, None)
            if exchange is not None and not exchange.ended:
                exchange.expired(self._dispatcher.refusal_of(ticket, now))
        self._watch_clock()


def error_of(refusal: Refusal, waited_s: float) -> GatewayError:
    """Return what a client is told whose request found no place, or waited in vain."""
    retry = refusal.retry_after_s
    if refusal.kind is RefusalKind.FULL:
        message = f"The queue of class `{refusal.detail}` is full; see retry-after."
        return QueueFull(message, retry_after_s=retry)
    if refusal.kind is RefusalKind.EXPIRED:
        limit = f"classes.{refusal.detail}.max_wait_s, or what the client says it waits"
        message = f"No backend could start this within {waited_s:.1f} s ({limit})."
        return QueueTimeout(message, retry_after_s=retry)
    message = f"No backend of `{refusal.detail[:100]}` became available within {waited_s:.1f} s."
    return NoBackend(message, retry_after_s=retry)
