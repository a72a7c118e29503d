"""Keep-alive connections to one backend.

Idle ones are closed after `IDLE_S`, before the engine would do it (vLLM closes at 5 s), and are
checked for EOF before use. There is no limit on how many are open: admission limits streams.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.relay.connection import UpstreamConnection
from gateway.relay.tls import TlsConnection

IDLE_S = 3.0
_GOODBYE_S = 2.0  # a backend may take to answer TLS's, when nothing is in flight any more


@dataclass(slots=True, frozen=True)
class Origin:
    """Where a backend listens. `prefix` is a base path before the API's (usually empty)."""

    host: str
    port: int
    tls: bool
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """Return the origin of an http(s) URL.

        Raises:
            ValueError: not an http(s) URL with a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> bytes:
        """Return the Host value."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host.encode() if self.port == default else f"{host}:{self.port}".encode()


class Pool:
    """The connections of one backend."""

    def __init__(
        self, origin: Origin, tls: ssl.SSLContext | None = None, server_name: str | None = None
    ) -> None:
        """`tls` belongs to an https origin; `server_name` = its host if None."""
        self.origin = origin
        self._idle: dict[UpstreamConnection, None] = {}  # oldest first
        self._open: set[UpstreamConnection] = set()
        self._closed = False
        self._clock: Callable[[], float] | None = None
        self._ssl = tls or ssl.create_default_context() if origin.tls else None
        self._kind = TlsConnection if origin.tls else UpstreamConnection
        self._server_name = (server_name or origin.host) if origin.tls else None
        self._goodbye_s = _GOODBYE_S if origin.tls else None

    @property
    def open_connections(self) -> int:
        """Return how many sockets are open, idle ones included."""
        return len(self._open)

    def take(self, now: float) -> UpstreamConnection | None:
        """Return a usable idle connection, newest first, or None."""
        idle = self._idle
        while idle:
            connection = idle.popitem()[0]
            if now - connection.idle_since < IDLE_S and connection.alive():
                return connection
            connection.abort()
        return None

    async def connect(self, timeout_s: float) -> UpstreamConnection:
        """Open a connection.

        Raises:
            OSError: refused, unreachable, bad TLS.
            TimeoutError: not open within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: self._kind(self._release, self.origin.host),
                self.origin.host,
                self.origin.port,
                ssl=self._ssl,
                server_hostname=self._server_name,
                ssl_shutdown_timeout=self._goodbye_s,
            )
        self._open.add(connection)
        return connection

    def expire(self, now: float) -> None:
        """Close what has been idle for `IDLE_S`; called about every second."""
        while self._idle:
            oldest = next(iter(self._idle))
            if now - oldest.idle_since < IDLE_S:
                return
            del self._idle[oldest]
            oldest.abort()

    def close(self) -> None:
        """Close idle connections now and busy ones when their answer ends."""
        self._closed = True
        while self._idle:
            self._idle.popitem()[0].abort()

    def abort(self) -> None:
        """Cut every connection."""
        self.close()
        for connection in list(self._open):
            connection.abort()

    def _release(self, connection: UpstreamConnection, reusable: bool) -> None:
        if reusable and not self._closed:
            clock = self._clock or self._find_clock()
            connection.idle_since = clock()
            self._idle[connection] = None
            return
        if reusable:
            connection.abort()
            return
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _find_clock(self) -> Callable[[], float]:
        self._clock = clock = asyncio.get_running_loop().time
        return clock
