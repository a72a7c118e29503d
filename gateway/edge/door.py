"""The data listener's door: accepts on one bound socket, in plain or with the TLS context in force.

Another context is another server on the same socket: what waits in its queue is kept, open
connections and handshakes under way go on as they began. Must never unbind the socket before `close`.
"""

import asyncio
import logging
import socket
import ssl

from gateway.edge.descriptors import can_open
from gateway.edge.server import Listener
from gateway.edge.sockets import url_of

_log = logging.getLogger("radixgate.edge")
_BACKLOG = 4096
_LOOK_S = 0.1
_ENOUGH = 4  # to accept again: the listener's own, a client's, its backend's, one to look with
_GOODBYE_S = 3600.0  # the connections watch their ends themselves (`edge.tls`)


class Door:
    """Takes over a bound socket."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self._listener = listener
        self._socket = sock
        self._server: asyncio.Server | None = None
        self._context: ssl.SSLContext | None = None
        self._closed = self._paused = False

    @property
    def url(self) -> str:
        """Return the URL that clients use."""
        return url_of(self._socket, tls=self._context is not None)

    async def open(self, context: ssl.SSLContext | None) -> None:
        """Accept from now on, with `context` or (None) in plain."""
        old = self._server
        if self._paused:
            self._context = context
            return
        if old is not None and context is self._context:
            return
        fresh = await self._listen(context)
        if self._closed:  # meanwhile
            fresh.close()
            return
        self._server, self._context = fresh, context
        if old is not None:
            old.close()

    async def _listen(self, context: ssl.SSLContext | None) -> asyncio.Server:
        loop, listener = asyncio.get_running_loop(), self._listener
        if context is None:
            return await loop.create_server(
                listener.protocol, sock=self._socket.dup(), backlog=_BACKLOG
            )
        return await loop.create_server(
            listener.tls_protocol,
            sock=self._socket.dup(),
            backlog=_BACKLOG,
            ssl=context,
            ssl_handshake_timeout=listener.timeouts.header_s,
            ssl_shutdown_timeout=_GOODBYE_S,
        )

    async def mind(self) -> None:
        """Accept nothing while no descriptor is to be had; what comes waits in the system's queue.

        A loop that is told of clients it cannot accept is told again at once, and spins.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._closed:
                return
            if self._paused:
                if can_open(_ENOUGH, self._socket):
                    await self._reopen()
            elif self._server is not None and not can_open(1, self._socket):
                self._paused = True
                self._server.close()
                _log.error("no descriptor is left: accepting no clients until there is")

    async def _reopen(self) -> None:
        try:
            fresh = await self._listen(self._context)
        except OSError:  # they are gone again
            return
        self._server, self._paused = fresh, False
        _log.warning("there are descriptors again: accepting clients")
        if self._closed:  # meanwhile
            fresh.close()

    def close(self) -> None:
        """Accept nothing more."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._socket.close()
