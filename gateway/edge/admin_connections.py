"""The admin listener's sockets: so many at most, and who is idle longest makes room for who comes.

The server beneath waits for ever for a first request, and descriptors are shared with the clients of
the data listener: whoever only connects here must never shut them out. Nor may it end a request.
"""

import asyncio
import socket
from typing import Self, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.edge.descriptors import ADMIN_MOST

_BACKLOG = 128


class _Connection(web.RequestHandler):
    """One connection, whose end is told."""

    __slots__ = ("_connections",)

    def __init__(self, server: web.Server, connections: "AdminConnections") -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]
        self._connections = connections

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.left(self)
        super().connection_lost(exc)


class _Full(asyncio.Protocol):
    """A connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


class AdminConnections:
    """All connections of one admin listener, at most `most`."""

    def __init__(self, most: int = ADMIN_MOST) -> None:
        self.most = most
        self._open: set[asyncio.BaseProtocol] = set()
        self._idle: dict[asyncio.BaseProtocol, _Connection] = {}  # idle longest first

    async def serve(self, runner: web.AppRunner, sock: socket.socket) -> Self:
        """Accept connections for the application that `runner` has set up, until `close`."""
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._accepted(server), sock=sock, backlog=_BACKLOG
        )
        return self

    def close(self) -> None:
        """Accept no more; what is open is the runner's to end."""
        self._server.close()

    def counted(self) -> Middleware:
        """Return what notes which connections are in the middle of a request."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            protocol = request.protocol
            mine = self._idle.pop(protocol, None)
            try:
                return await handler(request)
            finally:
                if mine is not None and protocol in self._open:
                    self._idle[protocol] = mine

        return note

    def left(self, connection: asyncio.BaseProtocol) -> None:
        """Take out a connection that is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _accepted(self, server: web.Server) -> asyncio.Protocol:
        if len(self._open) >= self.most:
            if not self._idle:
                return _Full()
            oldest = next(iter(self._idle.values()))
            self.left(oldest)
            oldest.force_close()
        made = _Connection(server, self)
        self._open.add(made)
        self._idle[made] = made
        return made
