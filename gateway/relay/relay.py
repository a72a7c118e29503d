"""Moves one answer from a backend connection to the client's transport, byte for byte.

Payload is never decompressed, re-serialised or line-iterated; the framing (chunked, length, close)
is written anew, so that an error event, a keep-alive comment or a removed usage chunk always falls
between chunks. The scanner notes TTFT, ITL and usage on the side.

The relay knows nothing of routing: its owner hears `relay_started`, `relay_first_content`,
`relay_done`, `relay_lost` and decides.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.core.scan import OPENING_MAX, Scanner
from gateway.core.types import Api
from gateway.relay.connection import Headers, UpstreamConnection
from gateway.relay.late import LateAnswer
from gateway.relay.usage_filter import UsageFilter

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = HOP_BY_HOP | frozenset(  # an engine's CORS headers would open what stays closed
    {
        b"x-request-id",
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"access-control-max-age",
        b"x-gateway-attempts",
        b"x-gateway-backend",
        b"x-gateway-class",
        b"x-gateway-policy",
        b"x-gateway-prefix",
        b"x-gateway-queue-ms",
    }
)
# As uvicorn and most servers write them: no need to fold their case.
_LOWER = frozenset({b"content-length", b"content-type", b"date", b"server", b"vary"})
_STREAM_OURS = frozenset({b"x-accel-buffering", b"cache-control"})
_STREAM_HEADERS = b"x-accel-buffering: no\r\ncache-control: no-cache\r\n"
_FIELDS = (b"data:", b"event:")
_GAPS_MAX = 64  # noted gaps that are handed on together: a quarter of the cost of one by one
_LAST_CHUNK = b"0\r\n\r\n"


class Owner(Protocol):
    """Who started the relay."""

    def relay_started(self, status: int, *, stream: bool) -> bytes:
        """Return the header lines (CRLF-terminated) to add to the answer's head."""

    def relay_first_content(self, now: float) -> None:
        """Hear that the first content of a stream went out."""

    def relay_done(self) -> None:
        """Hear that the answer ended by its own framing."""

    def relay_lost(self, *, unread: bool, reason: str) -> None:
        """Hear that the backend broke before the answer's end."""


class Client(Protocol):
    """What the relay needs of the client's connection."""

    transport: asyncio.Transport
    version_11: bool
    keep_alive: bool


class Relay:
    """One answer on its way. `status` is 0 until the head came."""

    __slots__ = (
        "_bodyless",
        "_chunked",
        "_client",
        "_clock",
        "_filter",
        "_gaps",
        "_itl",
        "_owner",
        "_write",
        "api",
        "chunks",
        "connection",
        "encoded",
        "first_at",
        "last_at",
        "late",
        "opened",
        "paused_at",
        "scanner",
        "status",
        "stream",
        "written_at",
    )

    def __init__(
        self,
        owner: Owner,
        client: Client,
        api: Api,
        clock: Callable[[], float],
        itl: Callable[[list[float]], None],
        *,
        remove_usage: bool,
    ) -> None:
        self._owner = owner
        self._client = client
        self._clock = clock
        self._itl = itl
        self._write = client.transport.write
        self._filter = UsageFilter() if remove_usage else None
        self._bodyless = self._chunked = False
        self.api = api
        self.scanner = Scanner()
        self.connection: UpstreamConnection | None = None
        self.status = 0
        self.stream = False
        self.opened = False  # a head of ours went out before the backend's
        self.late: bytes | None = None  # what the backend then answered, if it was no stream
        self.encoded = False  # a content coding hides the events: nothing can be read or added
        self.chunks = 0  # up to date after `settle`
        self._gaps: list[float] = []
        self.first_at = self.last_at = 0.0
        self.paused_at = 0.0
        self.written_at = 0.0  # when a keep-alive comment of ours last went out

    @property
    def started(self) -> bool:
        """Return whether anything of the answer has gone to the client."""
        return self.status != 0

    def start(
        self, connection: UpstreamConnection, pieces: list[bytes], *, bodyless: bool = False
    ) -> None:
        """Send the request on `connection`; `bodyless` = it is a HEAD."""
        self.connection = connection
        self._bodyless = bodyless
        connection.send(self, pieces, bodyless=bodyless)

    # --- Sink

    def head(self, status: int, reason: bytes, headers: Headers) -> None:
        """Write the client's head."""
        if self.opened:
            self._head_after_opening(status, headers)
            return
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        length = self._forward(headers, lines)
        if self.stream:
            lines = _without(lines, _STREAM_OURS)
        else:
            self._filter = None
        if self._filter is not None:
            length = None
        self.status = status
        if length is not None:
            lines.append(b"content-length: %b\r\n" % length)
        lines.append(self._framing(status, length))
        if self.stream:
            lines.append(_STREAM_HEADERS)
        lines.append(self._owner.relay_started(status, stream=self.stream))
        lines.append(b"\r\n")
        self._write(b"".join(lines))

    def open_early(self) -> None:
        """Write a stream's head before the backend's has come, so that comments can follow."""
        self.opened = self.stream = True
        lines = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"]
        lines += (self._framing(200, None), _STREAM_HEADERS)
        lines += (self._owner.relay_started(200, stream=True), b"\r\n")
        self._write(b"".join(lines))

    def adopt(self, earlier: "Relay") -> None:
        """Go on with the stream that an earlier attempt opened."""
        self.opened, self.stream = earlier.opened, earlier.stream
        self._chunked, self.written_at = earlier._chunked, earlier.written_at  # noqa: SLF001

    def _head_after_opening(self, status: int, headers: Headers) -> None:
        self.stream = False
        self._forward(headers, [b""])
        if self.connection is not None and not (status == 200 and self.stream and not self.encoded):
            self.connection.sink = LateAnswer(self)
        self.status = status
        self.stream, self.encoded = True, False  # as the client sees it

    def _forward(self, headers: Headers, lines: list[bytes]) -> bytes | None:
        """Append the lines to forward, note what they say; return the Content-Length."""
        length = nominated = None
        for name, value in headers:
            low = name if name in _LOWER else name.lower()
            if low == b"content-length":
                length = value
            elif low not in _NOT_FORWARDED:
                lines.append(b"%b: %b\r\n" % (name, value))
                if low == b"content-type":
                    self.stream = value[:17].lower() == b"text/event-stream"
                elif low == b"content-encoding":
                    self.encoded = True
                    self._filter = None
            elif low == b"connection":
                nominated = value if nominated is None else nominated + b"," + value
        if nominated is not None:
            drop = frozenset(token.strip().lower() for token in nominated.split(b","))
            lines[:] = _without(lines, drop)
        return length

    def body(self, payload: bytes) -> None:
        """Write payload; hot path: one call per streamed chunk."""
        now = self._clock()
        if self.first_at:
            self._gaps.append(now - self.last_at)
            if len(self._gaps) >= _GAPS_MAX:
                self.settle()
        else:
            self._before_content(payload, now)
        self.last_at = now
        self.scanner.keep(payload)
        if self._filter is not None:
            payload = self._filter.feed(payload)
            if not payload:
                return
        if self._chunked:
            self._write(b"%x\r\n%b\r\n" % (len(payload), payload))
        else:
            self._write(payload)

    def chunk(self, framed: bytes, start: int) -> None:
        """Write one whole chunk, framing and all: the hot path of every stream."""
        if (
            not self.first_at
            or not self._chunked
            or framed[-4:] != b"\n\n\r\n"
            or not framed.startswith(_FIELDS, start)
        ):
            self.body(framed[start:-2])  # not whole events: the scanner needs them unframed
            return
        now = self._clock()
        gaps = self._gaps
        gaps.append(now - self.last_at)
        if len(gaps) >= _GAPS_MAX:
            self.settle()
        self.last_at = now
        self.scanner.tail.append(framed)
        if self._filter is not None and not self._filter.passes(framed):
            framed = self._filter.feed(framed[start:-2])
            if framed:
                self._write(b"%x\r\n%b\r\n" % (len(framed), framed))
            return
        self._write(framed)

    def settle(self) -> None:
        """Hand on the gaps noted so far."""
        gaps, self._gaps = self._gaps, []
        if gaps:
            self.chunks += len(gaps)
            self._itl(gaps)

    def _before_content(self, payload: bytes, now: float) -> None:
        content = self.scanner.is_first_content(payload) if self.stream else True
        if not content:
            return
        self.first_at = now
        self.chunks = 1
        if self.stream:
            self._owner.relay_first_content(now)
        else:
            self.scanner.opening = payload[:OPENING_MAX]

    def complete(self) -> None:
        """Tell the owner, who ends the client's body with `end`."""
        if self.paused_at:
            self.resume()  # the connection may be the next request's by now
        self.connection = None
        self._flush_filter()
        self._owner.relay_done()

    def lost(self, *, unread: bool, reason: str) -> None:
        """Tell the owner; it decides between another attempt, an error and an in-band event."""
        self.connection = None
        self._owner.relay_lost(unread=unread, reason=reason)

    # --- the owner's side

    def inject(self, event: bytes) -> None:
        """Write an event of ours into a stream; the caller sees to it being between events."""
        self._flush_filter()
        self._write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)

    def end(self) -> None:
        """End the client's body by its framing."""
        if self._chunked:
            self._write(_LAST_CHUNK)

    def pause(self, now: float) -> None:
        """Stop reading from the backend: the client does not keep up."""
        self.paused_at = now
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self.paused_at = 0.0
        self.last_at = max(self.last_at, self._clock()) if self.last_at else 0.0
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()

    def abort(self) -> None:
        """Cut the backend's connection; nothing more will be heard of it."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def _flush_filter(self) -> None:
        if self._filter is not None and (rest := self._filter.flush()):
            self._write(b"%x\r\n%b\r\n" % (len(rest), rest) if self._chunked else rest)

    def _framing(self, status: int, length: bytes | None) -> bytes:
        client = self._client
        lines = b""
        if length is None and status not in (204, 304) and not self._bodyless:
            if client.version_11:
                self._chunked = True
                lines = b"transfer-encoding: chunked\r\n"
            else:
                client.keep_alive = False  # HTTP/1.0: the body ends with the connection
        if not client.keep_alive:
            lines += b"connection: close\r\n"
        elif not client.version_11:
            lines += b"connection: keep-alive\r\n"
        return lines


def _without(lines: list[bytes], drop: frozenset[bytes]) -> list[bytes]:
    """Return a head's lines but for those named in `drop`."""
    return [lines[0], *(ln for ln in lines[1:] if ln.partition(b":")[0].lower() not in drop)]
