"""The data listener: what all client connections share, and the tick that watches their deadlines.

Also what a connection expects of its handler and of a request in progress. Must never look into a
request.
"""

import asyncio
import heapq
import logging
import sys
from collections.abc import Callable
from typing import Protocol

from gateway.config.schema import LimitsConfig, TimeoutsConfig
from gateway.edge.client import ClientConnection
from gateway.edge.http import HttpRequest
from gateway.edge.tls import TlsClientConnection
from gateway.errors import GatewayError, Overloaded

_log = logging.getLogger("radixgate.edge")
TICK_S = 0.1
# Connections beyond the most that are answered before they are closed; each for a second at most.
_TOLD_MAX = 8
_IDLE_S = 1.0  # what has been idle for less may be about to be used


class Exchange(Protocol):
    """A request in progress, as its connection sees it."""

    def client_lost(self) -> None:
        """The client is gone: stop everything."""

    def pause(self) -> None:
        """The client does not read: stop sending."""

    def resume(self) -> None:
        """The client reads again."""

    def check(self, now: float) -> float:
        """Act on deadlines that passed; return when to look again."""


class Handler(Protocol):
    """What the listener serves."""

    def precheck(self, request: HttpRequest) -> None:
        """Route and authenticate on the head alone; raises GatewayError."""

    def start(self, connection: ClientConnection, request: HttpRequest) -> Exchange | None:
        """Begin a complete request; None = it has been answered already."""

    def error_answer(
        self,
        request: HttpRequest | None,
        error: GatewayError,
        target: bytes = b"",
        *,
        peer: str = "",
    ) -> tuple[bytes, bytes]:
        """Return (header lines, body) for an error to `peer`, and count it.

        `target` is as much of the request's as was read when no request came of it.
        """


class Listener:
    """Shared by all client connections of one data listener."""

    def __init__(
        self,
        handler: Handler,
        limits: LimitsConfig,
        timeouts: TimeoutsConfig,
        clock: Callable[[], float],
    ) -> None:
        self.handler = handler
        self.clock = clock
        self.connections: set[ClientConnection] = set()
        self.closing = self.crowded = False
        self.parting = False  # either: answers end their connections
        self.most = self.roomy = sys.maxsize
        self._timer: asyncio.TimerHandle | None = None
        self.configure(limits, timeouts)

    def configure(self, limits: LimitsConfig, timeouts: TimeoutsConfig) -> None:
        """Take new limits; they hold for requests that begin from now on."""
        self.timeouts = timeouts
        self.header_bytes = limits.header_kib * 1024
        self.header_count = limits.header_count
        self.body_bytes = limits.body_mib * 1024 * 1024

    def limit(self, most: int) -> None:
        """Let in so many connections at once; from three quarters on none is kept without need."""
        self.most, self.roomy = most, most * 3 // 4
        if not self.crowded:
            self._count()

    def _count(self) -> None:
        """Take in how many connections there are."""
        self.crowded = len(self.connections) > self.roomy
        self.parting = self.closing or self.crowded

    def arrived(self, connection: ClientConnection) -> None:
        """Take in a connection, or tell it that there is no room, or (a flood) not even that."""
        self.connections.add(connection)
        count = len(self.connections)
        if count <= self.roomy:
            return
        self._count()
        if count > self.most + _TOLD_MAX:
            connection.transport.abort()
        elif count > self.most:
            message = f"The gateway has descriptors for {self.most} connections at once."
            connection.turn_away(Overloaded(message))

    def left(self, connection: ClientConnection) -> None:
        """Take out a connection that is closed."""
        self.connections.discard(connection)
        if self.crowded:
            self._count()

    def protocol(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        return ClientConnection(self)

    def tls_protocol(self) -> ClientConnection:
        """Return the protocol of a new connection under TLS."""
        return TlsClientConnection(self)

    def start_ticking(self) -> None:
        """Begin to watch deadlines."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop_ticking(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def close_after_answers(self) -> None:
        """Stop keep-alive: connections close after their next answer, which says so."""
        self.closing = self.parting = True
        for connection in self.connections:
            connection.keep_alive = False  # of an answer that has not begun

    def close_idle(self) -> None:
        """Close what is idle; the rest closes after its answer."""
        self.close_after_answers()
        for connection in list(self.connections):
            connection.close_if_idle()

    def receiving(self) -> list[ClientConnection]:
        """Return the connections on which a request has begun to come and is not here yet."""
        return [connection for connection in self.connections if connection.receiving]

    def unsent(self) -> int:
        """Return how many bytes of answers still wait for their clients' sockets."""
        return sum(connection.unsent() for connection in self.connections)

    def abort_all(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections):
            connection.transport.abort()

    def _tick(self) -> None:
        self.start_ticking()
        now = self.clock()
        for connection in list(self.connections):
            if connection.deadline <= now:
                try:
                    connection.expired(now)
                except Exception:  # noqa: BLE001 - one connection's fault stops no other's clock
                    _log.exception("a fault of ours at a deadline; the connection is cut")
                    connection.transport.abort()
        if self.crowded:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Close what has been idle longest."""
        idle = [c for c in self.connections if c.idle_since() <= now - _IDLE_S]
        excess = len(self.connections) - self.roomy
        for connection in heapq.nsmallest(excess, idle, key=ClientConnection.idle_since):
            connection.close_if_idle()
