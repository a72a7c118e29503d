"""One keep-alive connection to a backend: writes a request, frames its answer, hands bytes on.

It knows HTTP framing and nothing of routing, retries or the client. Its sink gets exactly one of
`complete` or `lost` per request. Nothing is buffered here.
"""

import asyncio
import logging
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from gateway.relay.heads import AnswerMemo, Headers, without_places
from gateway.relay.why import why_unreached

_log = logging.getLogger("radixgate.relay")
_HEAD_MAX = 256 * 1024  # of an answer, interim heads included; engines send 1 KB
_CHUNKING_MAX = 8  # bytes on the wire per byte of payload; chunks of one byte need 6
_TCP_INFO_BYTES = 256
_BYTES_ACKED = struct.Struct("=Q")
_BYTES_ACKED_AT = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info (4.1+)
_DIRTY = select.POLLIN | select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

_CHUNK_MAX = 8 * 1024  # on the wire, of chunks that are recognised without the parser
_NO_LINE = b"\0"  # no chunk begins like this


def _size_lines() -> list[bytes]:
    """Return, by a chunk's length on the wire, its size line as engines write it."""
    lines = [_NO_LINE] * _CHUNK_MAX
    for size in range(1, _CHUNK_MAX - 8):
        line = b"%x\r\n" % size
        lines[len(line) + size + 2] = line
    return lines


_SIZE_LINES = _size_lines()
_SIZES = {b"%x" % size: size for size in range(1, _CHUNK_MAX)}
_SIZE_LINE_MAX = 6
_CHUNK_MIN = 6  # the shortest chunk


class Sink(Protocol):
    """Who receives an answer."""

    def head(self, status: int, reason: bytes, headers: Headers) -> None:
        """Take the final answer's head (interim 1xx heads are dropped before)."""

    def body(self, payload: bytes) -> None:
        """Take payload bytes, framing removed."""

    def whole(self, memo: AnswerMemo, data: bytes, start: int) -> None:
        """Take a complete answer: its head is `memo`'s, its body `data[start:]`."""

    def event(self, framed: bytes, start: int) -> None:
        """Take one whole chunk as `chunk` does; its payload ends as events do."""

    def chunk(self, framed: bytes, start: int) -> None:
        """Take one whole chunk as it came: size line, payload from `start` on, CRLF."""

    def complete(self) -> None:
        """The answer ended properly, by its own framing."""

    def lost(self, *, unread: bool, reason: str) -> None:
        """The connection broke first. `unread` = the backend surely read none of the request."""


class AmbiguousAnswer(Exception):
    """An answer whose body's end or coding the client might read otherwise than we do."""


class UpstreamConnection(asyncio.Protocol):
    """A backend socket. States: idle (no sink) or busy (one request in flight)."""

    __slots__ = (
        "_between_chunks",
        "_bodyless",
        "_ended",
        "_framed",
        "_head_bytes",
        "_headers",
        "_headers_done",
        "_host",
        "_keep_alive",
        "_memo",
        "_parser",
        "_payload",
        "_poll",
        "_raw",
        "_reason",
        "_release",
        "_sent",
        "_sent_before",
        "_started",
        "_status",
        "idle_since",
        "recognises",
        "sink",
        "transport",
    )

    def __init__(
        self, release: Callable[["UpstreamConnection", bool], None], host: str = ""
    ) -> None:
        """`release(self, reusable)` is called once per finished request, and once when lost.

        `host` is the backend's, which no answer may name.
        """
        self._release = release
        self._host = host
        self.sink: Sink | None = None
        self._ended: Sink | None = None
        self.idle_since = 0.0
        self._sent = self._sent_before = self._head_bytes = self._raw = self._payload = 0
        self._started = self._framed = self._headers_done = self._keep_alive = False
        self._bodyless = self._between_chunks = False
        self._headers: Headers = []
        self._status, self._reason = 0, b""
        self._memo = AnswerMemo()
        self.recognises = True  # whether a known head may be passed by the parser

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport; disable Nagle (uvloop does) and keep a poll object for `alive`."""
        self.transport = cast("asyncio.Transport", transport)
        self._parser: Any = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._poll.register(sock.fileno(), _DIRTY)

    def data_received(self, data: bytes) -> None:
        """Frame what came; bytes nobody asked for end the connection."""
        sink = self.sink
        if sink is None:
            self.transport.abort()
            return
        if self._between_chunks:
            # Hot path: engines write one event per chunk, and it arrives as one read. The parser
            # stands between chunks before and after, so it need not see a whole one.
            length = len(data)
            line = _SIZE_LINES[length] if length < _CHUNK_MAX else _NO_LINE
            if data.startswith(line):
                if data[-4:] == b"\n\n\r\n":
                    sink.event(data, len(line))
                    return
                if data[-2:] == b"\r\n":
                    sink.chunk(data, len(line))
                    return
            elif length > _CHUNK_MIN:
                data = self._pass_chunks(data, sink)
                if not data:
                    return
        elif (
            not self._started
            and self.recognises
            and (start := self._memo.match(data))
            and self.transport.get_write_buffer_size() == 0
        ):
            # The parser stands between answers before and after.
            self.sink = None
            self._release(self, True)
            sink.whole(self._memo, data, start)
            return
        self._parse(data)

    def _pass_chunks(self, data: bytes, sink: Sink) -> bytes:
        """Hand on the whole chunks that `data` begins with; return the rest, for the parser."""
        at, total = 0, len(data)
        while self.sink is sink:
            end = data.find(b"\r\n", at, at + _SIZE_LINE_MAX)
            size = _SIZES.get(data[at:end], 0) if end > 0 else 0
            after = end + 4 + size
            if not size or after > total or data[after - 2 : after] != b"\r\n":
                break
            framed = data[at:after]
            start = end + 2 - at
            if framed[-4:] == b"\n\n\r\n":
                sink.event(framed, start)
            else:
                sink.chunk(framed, start)
            at = after
        return data[at:] if at else data

    def _parse(self, data: bytes) -> None:
        fresh, self._started = not self._started, True
        if self._headers_done:
            self._raw += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._keep_alive = False
            cause = error.__context__
            if not isinstance(cause, AmbiguousAnswer):
                _log.error("a fault of ours in relaying", exc_info=cause)
            self._fail(str(cause) if isinstance(cause, AmbiguousAnswer) else "internal error")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            self._fail(f"malformed answer: {_text(error)}")
        if fresh and self.recognises and self._headers_done and self._keep_alive:
            self._memo.note(data, self._status, self._reason, self._headers)
        if self._ended is not None:
            self._finish()
        elif self.sink is not None:
            self._check_overhead()

    def _check_overhead(self) -> None:
        """Bound what is no payload: the head, then chunk extensions and trailers."""
        if self._head_bytes > _HEAD_MAX and not self._headers_done:
            self._fail("the answer's head is too long")
        elif self._raw > _CHUNKING_MAX * self._payload + _HEAD_MAX:
            self._keep_alive = False
            self._fail("the answer's chunk extensions or trailers are too long")

    def eof_received(self) -> bool:
        """Close; an unframed answer ends here properly, a silent close may prove non-delivery."""
        if self.sink is not None:
            if self._started and self._headers_done and not self._framed:
                self._keep_alive = False
                self._end()
                self._finish()
            else:
                unread = not self._started and self._nothing_acked()
                self._fail("backend closed the connection", unread=unread)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss if a request was in flight."""
        self._fail(why_unreached(exc) if exc else "connection closed")
        self._release(self, False)

    # --- use

    def alive(self) -> bool:
        """Return whether an idle connection may be used: open, and nothing (not even EOF) came."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def send(self, sink: Sink, pieces: list[bytes], *, bodyless: bool = False) -> None:
        """Write one request and route its answer to `sink`; `bodyless` = it is a HEAD."""
        self.sink = sink
        self._bodyless = bodyless
        self._started = self._framed = self._headers_done = self._between_chunks = False
        self._head_bytes = self._raw = self._payload = 0
        self._sent_before = self._sent
        self.recognises = not bodyless
        if len(pieces) == 1:
            self._sent += len(pieces[0])
            self.transport.write(pieces[0])
        else:
            self._sent += sum(map(len, pieces))
            self.transport.writelines(pieces)

    def pause(self) -> None:
        """Read nothing on for now."""
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection now; the sink hears nothing more."""
        self.sink = self._ended = None
        self.transport.abort()

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        """Start a new head; one that follows a finished answer makes the socket unusable."""
        if self._ended is not None:
            self._keep_alive = False
        self._headers = []
        self._reason = b""

    def on_status(self, reason: bytes) -> None:
        """Collect the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; trailers are dropped."""
        if not self._headers_done:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Hand the head on, unless it is interim."""
        status = self._parser.get_status_code()
        self._status = status
        if status < 200:
            return
        self._headers_done = True
        self._keep_alive = self._parser.should_keep_alive()
        self._framed = _is_framed(status, self._headers)
        self._between_chunks = False
        if 300 <= status < 400 or status == 201:
            self._headers = without_places(self._headers, self._host)
        if self.sink is not None:
            self.sink.head(status, self._reason, self._headers)
            if self._bodyless:  # the parser would wait for the body that its head announces
                self._keep_alive = False
                self._end()

    def on_body(self, payload: bytes) -> None:
        """Hand payload on."""
        self._payload += len(payload)
        if self.sink is not None:
            self.sink.body(payload)

    def on_chunk_header(self) -> None:
        """Note that a chunk is being read."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """Note that the next byte begins a chunk."""
        self._between_chunks = True

    def on_message_complete(self) -> None:
        """End the request, unless what ended was interim or an answer nobody asked for."""
        if self._status >= 200 and self.sink is not None:
            self._end()

    # --- endings

    def _end(self) -> None:
        """Detach the sink; it hears `complete` only when the parser has returned."""
        self._ended, self.sink = self.sink, None
        self._between_chunks = False

    def _finish(self) -> None:
        sink, self._ended = self._ended, None
        transport = self.transport
        reusable = self._keep_alive and not transport.is_closing()
        if reusable and transport.get_write_buffer_size() == 0:
            self._release(self, True)
        else:
            transport.close()
        if sink is not None:
            sink.complete()

    def _fail(self, reason: str, *, unread: bool = False) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            partial = self.transport.get_write_buffer_size() > 0
            sink.lost(unread=unread or (partial and not self._started), reason=reason)
        self.transport.abort()

    def _nothing_acked(self) -> bool:
        """Return whether the peer's kernel acknowledged no byte of the request.

        On EOF only: a FIN carries the acknowledgement of everything received before it, so a
        request that is still unacknowledged arrived at a socket already closed (RFC 9110 9.2.2
        lets such a POST be sent again). Unknown counts as read.
        """
        acked = self._acked()
        return acked is not None and acked - 1 <= self._sent_before  # the SYN counts as one

    def _acked(self) -> int | None:
        """Return how many bytes the peer's kernel acknowledged in all; None = unknown."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return None
        if len(info) < _BYTES_ACKED_AT + _BYTES_ACKED.size:
            return None
        return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)[0])


def _is_framed(status: int, headers: Headers) -> bool:
    """Return whether the body's end is told by something other than the connection's close."""
    framed = status in (204, 304)
    for name, value in headers:
        if len(name) == 17 and name.lower() == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise AmbiguousAnswer("transfer coding other than chunked")
            framed = True
        elif len(name) == 14 and name.lower() == b"content-length":
            framed = True
    return framed


def _text(error: Exception) -> str:
    return str(error)[:100]
