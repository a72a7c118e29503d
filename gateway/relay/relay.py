"""Moves one answer from a backend connection to the client's transport, byte for byte.

Payload is never decompressed, re-serialised or line-iterated; the framing (chunked, length, close)
is written anew, so that an error event, a keep-alive comment or a removed usage chunk always falls
between chunks. The scanner notes TTFT, ITL and usage on the side.

The relay knows nothing of routing: its owner hears `relay_started`, `relay_first_content`,
`relay_done`, `relay_lost` and decides.
"""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from gateway.core.scan import NOTHING_SEEN, OPENING_MAX, Scanner
from gateway.core.types import Api
from gateway.relay.connection import UpstreamConnection
from gateway.relay.heads import AnswerMemo, Headers, Sorted, without
from gateway.relay.late import LateAnswer
from gateway.relay.usage_filter import UsageFilter

_STREAM_OURS = frozenset({b"x-accel-buffering", b"cache-control"})
_STREAM_HEADERS = b"x-accel-buffering: no\r\ncache-control: no-cache\r\n"
_NEVER = b"\0"
_CHOICES = (b'"choices":[{', b'"choices": [{')
_GAPS_MAX = 64  # noted gaps that are handed on together: a quarter of the cost of one by one
_LAST_CHUNK = b"0\r\n\r\n"


class Owner(Protocol):
    """Who started the relay."""

    def relay_started(self, status: int, *, stream: bool) -> bytes:
        """Return the header lines (CRLF-terminated) to add to the answer's head."""

    def relay_first_content(self, now: float) -> None:
        """Hear that the first content of a stream went out."""

    def relay_whole(self, data: bytes, now: float) -> None:
        """Hear that `data`, whose head was known, is the whole answer and has been written."""

    def relay_gaps(self, gaps: list[float]) -> None:
        """Hear the seconds between chunks of content."""

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
        "_followed",
        "_owner",
        "_single",
        "_tail",
        "_times",
        "_usual",
        "_write",
        "api",
        "chunks",
        "connection",
        "encoded",
        "first_at",
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
        *,
        remove_usage: bool,
        followed: bool = False,
    ) -> None:
        self._owner = owner
        self._client = client
        self._clock = clock
        self._write = client.transport.write
        self._filter = UsageFilter() if remove_usage else None
        self._bodyless = self._chunked = False
        # What a chunk of whole events begins with that may pass as it came, and whether it must
        # hold one event only: with a filter, what proves that it is not the usage chunk.
        self._usual = _NEVER
        self._single = remove_usage
        self._times: list[float] = []  # when content came, the last time settled first
        self.api = api
        self._followed = api if followed else None  # what the answer says is wanted
        self.scanner = NOTHING_SEEN  # until the head came
        self._tail = NOTHING_SEEN.tail
        self.connection: UpstreamConnection | None = None
        self.status = 0
        self.stream = False
        self.opened = False  # a head of ours went out before the backend's
        self.late: bytes | None = None  # what the backend then answered, if it was no stream
        self.encoded = False  # a content coding hides the events: nothing can be read or added
        self.chunks = 0  # up to date after `settle`
        self.first_at = 0.0
        self.paused_at = 0.0
        self.written_at = 0.0  # when a keep-alive comment of ours last went out

    @property
    def last_at(self) -> float:
        """Return when payload last came, 0 if none did."""
        times = self._times
        return times[-1] if times else 0.0

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
        if self.opened:
            connection.recognises = False

    # --- Sink

    def head(self, status: int, reason: bytes, headers: Headers) -> None:
        """Write the client's head."""
        if self.opened:
            self._head_after_opening(status, headers)
            return
        self._scan()
        fields = Sorted(headers)
        lines, length = fields.lines, fields.length
        self.stream, self.encoded = fields.stream, fields.encoded
        if not self.stream or self.encoded:
            self._filter = None
            self._single = False
        if self.stream:
            lines = without(lines, _STREAM_OURS)
        if self._filter is not None:
            length = None
        self.status = status
        if length is not None:
            lines.append(b"content-length: %b\r\n" % length)
        lines.append(self._framing(status, length))
        if self.stream:
            lines.append(_STREAM_HEADERS)
        lines.append(self._owner.relay_started(status, stream=self.stream))
        self._write(b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, b"".join(lines)))

    def whole(self, memo: AnswerMemo, data: bytes, start: int) -> None:
        """Write a complete answer whose head is known; it is no stream."""
        if self.paused_at:
            self.resume()  # the connection may be the next request's by now
        self.connection = None
        self.status = status = memo.status
        self.first_at = now = self._clock()
        self._times = [now]
        self.chunks = 1
        client, owner = self._client, self._owner
        lines = owner.relay_started(status, stream=False)
        if not client.keep_alive or not client.version_11:
            lines += self._framing(status, memo.length)
        self._write(b"%b%b\r\n%b\r\n%b" % (memo.head, memo.length, lines, data[start:]))
        owner.relay_whole(data, now)

    def open_early(self) -> None:
        """Write a stream's head before the backend's has come, so that comments can follow."""
        self.opened = self.stream = True
        self._scan()
        if self.connection is not None:  # an answer of any form is parsed: its head came too late
            self.connection.recognises = False
        lines = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"]
        lines += (self._framing(200, None), _STREAM_HEADERS)
        lines += (self._owner.relay_started(200, stream=True), b"\r\n")
        self._write(b"".join(lines))

    def adopt(self, earlier: "Relay") -> None:
        """Go on with the stream that an earlier attempt opened."""
        self.opened, self.stream = earlier.opened, earlier.stream
        self._chunked, self.written_at = earlier._chunked, earlier.written_at  # noqa: SLF001

    def _head_after_opening(self, status: int, headers: Headers) -> None:
        self._scan()
        fields = Sorted(headers)
        if self.connection is not None and not (
            status == 200 and fields.stream and not fields.encoded
        ):
            self.connection.sink = LateAnswer(self)
        self.status = status

    def _scan(self) -> None:
        if self.scanner is NOTHING_SEEN:
            self.scanner = Scanner(self._followed)
            self._tail = self.scanner.tail

    def body(self, payload: bytes) -> None:
        """Write payload of any form."""
        now = self._clock()
        if self.first_at:
            self._times.append(now)
            if len(self._times) > _GAPS_MAX:
                self.settle()
        else:
            self._times = [now]
            self._before_content(payload, now)
        self.scanner.keep(payload)
        if self._filter is not None:
            self._usual = _NEVER
            whole, payload = payload, self._filter.feed(payload)
            if not payload:
                return
            if payload == whole and self.first_at and self._chunked and self._filter.idle:
                self._usual = _up_to_choices(payload)
        elif self.first_at and self._chunked:
            self._usual = b"event:" if payload[:6] == b"event:" else b"data:"
        if self._chunked:
            self._write(b"%x\r\n%b\r\n" % (len(payload), payload))
        else:
            self._write(payload)

    def event(self, framed: bytes, start: int) -> None:
        """Write one chunk of whole events, framing and all: the hot path of every stream."""
        usual = self._usual
        if framed[start : start + len(usual)] != usual or (
            self._single and framed.find(b"\n", start) != len(framed) - 4
        ):
            self.body(framed[start:-2])
            return
        times = self._times
        times.append(self._clock())
        if len(times) > _GAPS_MAX:
            self.settle()
        self._tail.append(framed)
        self._write(framed)

    def chunk(self, framed: bytes, start: int) -> None:
        """Write one whole chunk that is not whole events: the scanner needs them unframed."""
        self.body(framed[start:-2])

    def settle(self) -> None:
        """Hand on the gaps noted so far."""
        times = self._times
        if self.first_at and len(times) > 1:
            self.chunks += len(times) - 1
            self._owner.relay_gaps([after - before for before, after in pairwise(times)])
            del times[:-1]
            self.scanner.settle()

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
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read on."""
        self.paused_at = 0.0
        times = self._times
        if times:  # the wait was the client's: no gap of the backend's
            self.settle()
            times[-1] = max(times[-1], self._clock())
        if self.connection is not None:
            self.connection.resume()

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


def _up_to_choices(event: bytes) -> bytes:
    """Return an event's beginning up to its first choice: the rest of its stream's begin so too."""
    for mark in _CHOICES:
        end = event.find(mark) + len(mark)
        if end >= len(mark) and event.startswith(b"data:") and event.find(b"\n") > end:
            return event[:end]
    return _NEVER
