"""The data listener's protocol: one client connection, HTTP/1.1 in, answers out, in order.

Everything a server owes its clients is here: limits, deadlines, keep-alive, pipelining, Expect,
smuggling answers, lingering close. What a request means is the handler's business. No task runs
per connection or request; a tick looks at the deadlines of all of them.
"""

import asyncio
import logging
import select
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from gateway.config.schema import LimitsConfig, TimeoutsConfig
from gateway.edge.headmemo import HeadMemo
from gateway.edge.http import HttpRequest, answer_head, origin_form, session_of, sort_headers
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
)

_log = logging.getLogger("radixgate.edge")
TICK_S = 0.1
LINGER_S = 1.0  # how long what a refused client still sends is read away, so it sees the answer
_BODY_TOTAL = 10  # a body may take this many times `body_s` in all: a drip is not progress
_CHUNKING_MAX = 8  # bytes on the wire per byte of body; chunks of one byte need 6
_LOOK_S = 0.5  # how often a client that is not read is asked whether it is still there
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_PIPELINE_MAX = 16  # parsed requests waiting behind the one in progress before reading pauses
_WRITE_HIGH_WATER = 256 * 1024
_NEVER = float("inf")


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

    def start(self, connection: "ClientConnection", request: HttpRequest) -> Exchange | None:
        """Begin a complete request; None = it has been answered already."""

    def error_answer(self, request: HttpRequest | None, error: GatewayError) -> tuple[bytes, bytes]:
        """Return (header lines, body) for an error, and count it."""


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
        self.closing = False
        self._timer: asyncio.TimerHandle | None = None
        self.configure(limits, timeouts)

    def configure(self, limits: LimitsConfig, timeouts: TimeoutsConfig) -> None:
        """Take new limits; they hold for requests that begin from now on."""
        self.timeouts = timeouts
        self.header_bytes = limits.header_kib * 1024
        self.header_count = limits.header_count
        self.body_bytes = limits.body_mib * 1024 * 1024

    def protocol(self) -> "ClientConnection":
        """Return the protocol of a new connection."""
        return ClientConnection(self)

    def start_ticking(self) -> None:
        """Begin to watch deadlines."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop_ticking(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def close_idle(self) -> None:
        """Stop keep-alive: idle connections close now, busy ones after their answer."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

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


class ClientConnection(asyncio.Protocol):
    """One client socket."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_body_left",
        "_body_raw",
        "_body_until",
        "_declining",
        "_discarding",
        "_exchange",
        "_fatal",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_listener",
        "_memo",
        "_noted",
        "_parser",
        "_pumping",
        "_reading",
        "_ready",
        "_request",
        "_resuming",
        "_target",
        "deadline",
        "keep_alive",
        "peer",
        "transport",
        "version_11",
        "writing_paused",
    )

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        # per connection
        self._parser: Any = httptools.HttpRequestParser(self)
        self._ready: deque[HttpRequest] = deque()
        self._exchange: Exchange | None = None
        self._fatal: GatewayError | None = None
        self._discarding = self._pumping = False
        self._reading = True
        self.writing_paused = False
        self.deadline = _NEVER
        self.peer = ""
        # the request being answered
        self.keep_alive = self.version_11 = True
        # the request being received
        self._request: HttpRequest | None = None
        self._in_head = False
        self._declining = self._resuming = False  # an offered upgrade
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_until = 0.0
        self._body_left = self._body_raw = 0
        # heads seen before
        self._memo = HeadMemo()
        self._noted: HttpRequest | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the first header deadline."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        self._listener.connections.add(self)
        self.deadline = self._listener.clock() + self._listener.timeouts.header_s

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Stop what was in progress."""
        self._listener.connections.discard(self)
        self.deadline = _NEVER
        self._discarding = True
        self._ready.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_lost()

    def eof_received(self) -> bool:
        """Treat a half-close as leaving: a client that left looks the same (docs: limits)."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:  # closing would wait for a reader that may be gone
            exchange.client_lost()
            self.transport.abort()
        return False

    def pause_writing(self) -> None:
        """Hold the backend."""
        self.writing_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """Let the backend go on."""
        self.writing_paused = False
        if self._exchange is not None:
            self._exchange.resume()

    def data_received(self, data: bytes) -> None:
        """Parse; complete requests are started after the parser has returned."""
        if self._discarding:
            return
        fresh = False
        if self._body_left:
            data = self._take_body(data)
        elif self._request is None and not self._in_head:
            known = self._memo.match(data, self._listener.clock())
            if known is not None and known[2] <= self._listener.body_bytes:
                data = self._begin_known(data, *known)
            else:
                fresh = True
        if data:
            self._parse(data, fresh=fresh)
        self._pump()

    def _parse(self, data: bytes, *, fresh: bool) -> None:
        """Feed the parser; `fresh` = `data` begins with a request's first byte."""
        if self._in_head:
            self._head_bytes += len(data)
        self._noted = None
        receiving = self._request
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._parser_failed(error)
        if self._in_head and self._head_bytes > self._listener.header_bytes:
            self._refuse(_headers_too_large(self._listener))
        elif self._request is not None and not self._in_head:
            if self._request is receiving:  # the read is all its own
                self._check_overhead(len(data))
            self._extend_body_deadline()
        if fresh:
            self._remember_head(data)

    def _remember_head(self, data: bytes) -> None:
        if self._noted is not None:
            self._memo.note(data, self._noted)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1: Java's client offers h2c with every connection's first request.

        The parser has stopped behind the head, body unread: a fresh one takes over from there.
        """
        request = self._request
        if not self._declining or request is None:  # CONNECT: what follows is not HTTP
            self._discarding = True
            return
        self._declining = False
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % _framing_line(request))
        self._resuming = False
        if rest:
            self._parse(rest, fresh=False)

    def _begin_known(self, data: bytes, request: HttpRequest, start: int, length: int) -> bytes:
        """Begin a request whose head is remembered; return what follows its body."""
        self._start_body(request)
        try:
            self._listener.handler.precheck(request)
        except GatewayError as error:
            request.error = error
        self._body_left = length
        if length == 0:
            self.on_message_complete()
            return data[start:]
        return self._take_body(data[start:])

    def _take_body(self, data: bytes) -> bytes:
        """Collect the body of a request that the parser did not see; return what follows it."""
        left = self._body_left
        part = data if len(data) <= left else data[:left]
        self._body_left = left - len(part)
        if self._request is not None and self._request.error is None:
            self._body.append(part)
        if self._body_left:
            self._extend_body_deadline()
            return b""
        self.on_message_complete()
        return data[left:]

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        """Start a head."""
        if self._resuming:
            return
        self._in_head = True
        self._head_bytes = 0
        self._target = b""
        self._headers = []
        if self._exchange is None and not self._ready:
            self.deadline = self._listener.clock() + self._listener.timeouts.header_s

    def on_url(self, target: bytes) -> None:
        """Collect the request target."""
        if not self._resuming:
            self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; trailers are dropped."""
        if self._in_head:
            self._headers.append((name, value))
            if len(self._headers) > self._listener.header_count:
                raise _headers_too_large(self._listener)

    def on_headers_complete(self) -> None:
        """Judge the head before any of the body is kept."""
        if self._resuming:
            return
        self._in_head = False
        listener, headers = self._listener, self._headers
        size = len(self._target) + sum(len(n) + len(v) + 4 for n, v in headers)
        if size > listener.header_bytes:
            raise _headers_too_large(listener)
        parser = self._parser
        version = parser.get_http_version()
        picked, forward = sort_headers(headers)
        target = self._target
        if target[:1] != b"/":
            target = origin_form(target)
        path, mark, query = target.partition(b"?")
        request = HttpRequest(
            method=parser.get_method().decode("latin-1"),
            path=path.decode("latin-1"),
            query=mark + query,
            version_11=version == "1.1",
            keep_alive=parser.should_keep_alive(),
            received_at=listener.clock(),
            picked=picked,
            forward=forward,
            user_agent=picked.get(b"user-agent", b"").decode("latin-1"),
            session=session_of(picked),
        )
        _check_framing(version, headers, picked)
        if parser.should_upgrade():
            self._declining = request.method != "CONNECT"
            request.keep_alive = request.keep_alive and self._declining
        self._start_body(request)
        if self._noted is None:  # only the first head in a read is where the read begins
            self._noted = request
        self._judge(request)

    def on_body(self, part: bytes) -> None:
        """Collect the body within its limit; a refused request's body is read away."""
        request = self._request
        if request is None:
            return
        self._body_bytes += len(part)
        if self._body_bytes > self._listener.body_bytes:
            raise request.error or _body_too_large(self._listener)
        if request.error is None:
            self._body.append(part)

    def on_message_complete(self) -> None:
        """Queue the complete request; `_pump` starts it."""
        if self._declining:
            return  # the parser leaves out the body of a request that offers an upgrade
        request, self._request = self._request, None
        if request is None:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        self._ready.append(request)

    # --- the exchange's side

    def respond(self, request: HttpRequest, status: int, headers: bytes, body: bytes) -> None:
        """Write a whole answer of ours."""
        self.keep_alive = request.keep_alive
        head = answer_head(status, headers, len(body), request)
        self.transport.write(head if request.method == "HEAD" else head + body)

    def respond_error(self, request: HttpRequest, error: GatewayError) -> None:
        """Write an error answer."""
        headers, body = self._listener.handler.error_answer(request, error)
        self.respond(request, error.status, headers, body)

    def done(self) -> None:
        """The exchange has ended and its answer is written: go on with the next, or close."""
        self._exchange = None
        if not self._pumping:
            self._after_answer()
            self._pump()

    def close_if_idle(self) -> None:
        """Close unless a request is being received or answered."""
        if self._exchange is None and not self._ready and self._request is None:
            self._close()

    def abort(self) -> None:
        """Cut the connection: the answer in progress cannot be ended honestly."""
        self._exchange = None
        self.transport.abort()

    def expired(self, now: float) -> None:
        """A deadline passed: act on it, or set the next one."""
        if self._exchange is not None:
            if not self._reading and self._left():
                self.eof_received()
                return
            self.deadline = _NEVER  # `check` may end the exchange, which sets its own
            again = self._exchange.check(now)
            self.deadline = min(self.deadline, again, _NEVER if self._reading else now + _LOOK_S)
        elif self._discarding or (self._request is None and not self._in_head):
            if self._discarding:
                self.deadline = _NEVER
                self.transport.abort()
            else:
                self._close()
        else:
            what = "header" if self._in_head else "body"
            self._refuse(RequestTimeout(f"The request's {what} did not arrive in time."))
            self._pump()

    # --- internals

    def _left(self) -> bool:
        """Return whether the client has gone, which a socket that is not read does not tell."""
        sock = self.transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(sock.fileno(), _GONE)
        return bool(poll.poll(0))

    def _start_body(self, request: HttpRequest) -> None:
        self._request = request
        self._body = []
        self._body_bytes = self._body_raw = 0
        self._body_until = request.received_at + _BODY_TOTAL * self._listener.timeouts.body_s

    def _judge(self, request: HttpRequest) -> None:
        """Find errors the head alone shows; they are answered when the body has been read away."""
        listener = self._listener
        try:
            listener.handler.precheck(request)
            length = request.picked.get(b"content-length")
            if length is not None and int(length) > listener.body_bytes:
                raise _body_too_large(listener)
        except BodyTooLarge:
            raise
        except GatewayError as error:
            request.error = error
        if request.picked.get(b"expect", b"").lower() == b"100-continue" and request.version_11:
            if request.error is not None:
                raise request.error  # the client is waiting: tell it now, body unsent
            if self._exchange is None and not self._ready:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_overhead(self, size: int) -> None:
        """Bound trailers and chunk extensions, which count neither as head nor as body."""
        self._body_raw += size
        if self._body_raw > _CHUNKING_MAX * self._body_bytes + 2 * self._listener.header_bytes:
            self._refuse(InvalidRequest("Chunk extensions or trailers are too long."))

    def _extend_body_deadline(self) -> None:
        if self._exchange is None and not self._ready:
            until = self._listener.clock() + self._listener.timeouts.body_s
            self.deadline = min(until, self._body_until)

    def _parser_failed(self, error: Exception) -> None:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, GatewayError):
            self._refuse(cause)
        elif isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            raise cause
        else:
            self._refuse(InvalidRequest(f"Malformed HTTP request: {str(error)[:100]}."))

    def _refuse(self, error: GatewayError) -> None:
        """Answer with an error and close; requests received before it are answered first."""
        self._discarding = True
        self._fatal = error

    def _pump(self) -> None:
        """Start requests in order until one is in progress."""
        if self._pumping:
            return
        self._pumping = True
        while self._exchange is None and self._ready and not self.transport.is_closing():
            request = self._ready.popleft()
            if self._listener.closing:
                request.keep_alive = False
            self.version_11, self.keep_alive = request.version_11, request.keep_alive
            if request.error is not None:
                self.respond_error(request, request.error)
            else:
                self._exchange = self._listener.handler.start(self, request)
            if self._exchange is None:
                self._after_answer()
        self._pumping = False
        if self._exchange is not None:
            self.deadline = 0.0  # the exchange's own deadlines, looked at with the next tick
        elif self._fatal is not None and not self.transport.is_closing():
            self._answer_fatal()
        self._hold_pipeline()

    def _answer_fatal(self) -> None:
        error, self._fatal = self._fatal, None
        assert error is not None
        request = self._request
        headers, body = self._listener.handler.error_answer(request, error)
        self.transport.write(answer_head(error.status, headers, len(body), None) + body)
        self._linger()

    def _after_answer(self) -> None:
        if not self.keep_alive or self._listener.closing:
            self._linger() if self._request is not None else self._close()
        else:
            self.deadline = self._listener.clock() + self._listener.timeouts.keepalive_s

    def _close(self) -> None:
        """Close once the client has read what is written; it gets `idle_s` for that."""
        wait = self._listener.timeouts.idle_s
        unread = self.transport.get_write_buffer_size() > 0
        self.deadline = self._listener.clock() + wait if unread and wait else _NEVER
        self._discarding = True
        self.transport.close()

    def _linger(self) -> None:
        """Half-close and read away what still comes, so that no reset overtakes the answer."""
        self._discarding = True
        self.deadline = self._listener.clock() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _hold_pipeline(self) -> None:
        """Stop reading from a client that sends far ahead of its answers."""
        hold = len(self._ready) >= _PIPELINE_MAX
        if hold == self._reading and not self.transport.is_closing():
            self._reading = not hold
            self.transport.pause_reading() if hold else self.transport.resume_reading()


def _framing_line(request: HttpRequest) -> bytes:
    if b"transfer-encoding" in request.picked:
        return b"transfer-encoding: chunked\r\n"
    length = request.picked.get(b"content-length")
    return b"" if length is None else b"content-length: %b\r\n" % length


def _check_framing(
    version: str, headers: list[tuple[bytes, bytes]], picked: dict[bytes, bytes]
) -> None:
    """Refuse what llhttp lets pass and a second parser could read otherwise (RFC 9112 6)."""
    if version not in ("1.1", "1.0"):
        raise InvalidRequest("HTTP version not supported: use HTTP/1.1.")
    hosts = sum(1 for name, _ in headers if name.lower() == b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise InvalidRequest("Exactly one Host header is required.")
    coding = picked.get(b"transfer-encoding")
    if coding is not None and (version == "1.0" or coding.strip().lower() != b"chunked"):
        raise InvalidRequest("Transfer-Encoding must be chunked, on HTTP/1.1.")


def _headers_too_large(listener: Listener) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"Request head over the limit of {listener.header_bytes} bytes or "
        f"{listener.header_count} fields (limits.header_kib, limits.header_count)."
    )


def _body_too_large(listener: Listener) -> BodyTooLarge:
    return BodyTooLarge(
        f"Request body over the limit of {listener.body_bytes} bytes (limits.body_mib)."
    )
