"""The backends as the edge reaches them: pool, Host, credentials, and the request head to send."""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.relay.pool import Origin, Pool


@dataclass(slots=True, frozen=True)
class UpstreamSpec:
    """One backend's address and the key sent to it (from environment or file, never logged).

    `tls` and `server_name` are an https one's, as `Pool` takes them.
    """

    name: str
    url: str
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class Upstream:
    """One backend."""

    def __init__(self, spec: UpstreamSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.pool = Pool(Origin.parse(spec.url), spec.tls, spec.server_name)
        self._prefix = self.pool.origin.prefix.encode()
        fixed = b"host: %b\r\n" % self.pool.origin.host_header
        if spec.api_key is not None:
            fixed += f"authorization: Bearer {spec.api_key}\r\n".encode("latin-1")
        self._fixed = fixed
        self.openings: dict[str, bytes] = {}  # by the path of a route in the table

    def opening(self, path: str) -> bytes:
        """Return how every POST to `path` without a query begins; for paths of our own only."""
        line = f"POST {self.pool.origin.prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        opening = self.openings[path] = line + self._fixed
        return opening

    def head(self, method: str, path: str, query: bytes, lines: bytes, length: int | None) -> bytes:
        """Return the request head; `lines` are the client's forwarded header lines and ours."""
        size = b"" if length is None else b"content-length: %d\r\n" % length
        return b"%b %b%b%b HTTP/1.1\r\n%b%b%b\r\n" % (
            method.encode(),
            self._prefix,
            path.encode("latin-1"),
            query,
            self._fixed,
            lines,
            size,
        )


class Upstreams:
    """All backends by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Upstream] = {}

    def get(self, name: str) -> Upstream | None:
        """Return a backend, None if it is (no longer) configured."""
        return self._by_name.get(name)

    def all(self) -> list[Upstream]:
        """Return every backend."""
        return list(self._by_name.values())

    def keys(self) -> dict[str, str | None]:
        """Return each backend's key; whoever asks shows none of them."""
        return {name: upstream.spec.api_key for name, upstream in self._by_name.items()}

    def plan(self, specs: Iterable[UpstreamSpec]) -> dict[str, Upstream]:
        """Return the backends of a new list, unchanged ones as they are; nothing is taken yet.

        Raises:
            ValueError: an address or a key cannot be used.
        """
        planned = {}
        for spec in specs:
            known = self._by_name.get(spec.name)
            same = known is not None and known.spec == spec
            planned[spec.name] = known if known is not None and same else Upstream(spec)
        return planned

    def replace(self, planned: dict[str, Upstream]) -> None:
        """Take a plan: unchanged backends keep their sockets, gone ones close when idle."""
        old, self._by_name = self._by_name, planned
        for name, gone in old.items():
            if planned.get(name) is not gone:
                gone.pool.close()

    def expire(self, now: float) -> None:
        """Close idle sockets that the engines are about to close."""
        for upstream in self._by_name.values():
            upstream.pool.expire(now)

    def abort(self) -> None:
        """Cut every connection."""
        for upstream in self._by_name.values():
            upstream.pool.abort()
