"""The receiving half of a client connection: bytes in, complete requests queued in order.

Limits, smuggling answers, Expect, deadlines of heads and bodies. What is done with a queued request
is the other half's business (`client`); one object is both, so that no call lies between them.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from gateway.edge.framing import body_too_large, check_framing, framing_line, headers_too_large
from gateway.edge.headmemo import HeadMemo
from gateway.edge.http import HttpRequest, origin_form, session_of, sort_headers
from gateway.errors import BodyTooLarge, GatewayError, InvalidRequest

if TYPE_CHECKING:
    from gateway.edge.server import Exchange, Listener

NEVER = float("inf")
_BODY_TOTAL = 10  # a body may take this many times `body_s` in all: a drip is not progress
_CHUNKING_MAX = 8  # bytes on the wire per byte of body; chunks of one byte need 6


class Receiver(asyncio.Protocol):
    """Parses what one client sends into `_ready`; `_pump` is called after every read."""

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
        "_owes_continue",
        "_parser",
        "_ready",
        "_request",
        "_resuming",
        "_target",
        "deadline",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, listener: "Listener") -> None:
        self._listener = listener
        # per connection
        self._parser: Any = httptools.HttpRequestParser(self)
        self._ready: deque[HttpRequest] = deque()
        self._exchange: Exchange | None = None
        self._fatal: GatewayError | None = None
        self._discarding = False
        self.deadline = NEVER
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
        self._owes_continue = False  # it waits for a 100, which must not overtake an answer
        # heads seen before
        self._memo = HeadMemo()
        self._noted: HttpRequest | None = None

    def _serve(self, request: HttpRequest) -> None:
        """Start `request` at once; the other half's."""
        raise NotImplementedError

    def _pump(self) -> None:
        """Start what is complete; the other half's."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Parse; complete requests are started after the parser has returned."""
        if self._discarding:
            return
        fresh = False
        if self._body_left:
            data = self._take_body(data)
        elif self._request is None and not self._in_head:
            known = self._memo.match(data, self._listener.clock())
            if known is None or known[2] > self._listener.body_bytes:
                fresh = True
            elif known[1] + known[2] == len(data) and self._exchange is None and not self._ready:
                # Hot path: a whole request, nothing before it and nothing behind.
                request = known[0]
                request.body = data[known[1] :]
                self._precheck(request)
                self._serve(request)
                return
            else:
                data = self._begin_known(data, *known)
        if data:
            self._parse(data, fresh=fresh)
        self._pump()

    def _precheck(self, request: HttpRequest) -> None:
        """Judge a request whose head is remembered."""
        era = request.era
        try:
            self._listener.handler.precheck(request)
        except GatewayError as error:
            request.error = error
        if request.era is not era:
            self._memo.renew(request)

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
            self._refuse(
                headers_too_large(self._listener.header_bytes, self._listener.header_count)
            )
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
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing_line(request))
        self._resuming = False
        if rest:
            self._parse(rest, fresh=False)

    def _begin_known(self, data: bytes, request: HttpRequest, start: int, length: int) -> bytes:
        """Begin a request whose head is remembered; return what follows its body."""
        self._start_body(request)
        self._precheck(request)
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
                raise headers_too_large(self._listener.header_bytes, self._listener.header_count)

    def on_headers_complete(self) -> None:
        """Judge the head before any of the body is kept."""
        if self._resuming:
            return
        self._in_head = False
        listener, headers = self._listener, self._headers
        size = len(self._target) + sum(len(n) + len(v) + 4 for n, v in headers)
        if size > listener.header_bytes:
            raise headers_too_large(listener.header_bytes, listener.header_count)
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
        check_framing(version, headers, picked)
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
        self._owes_continue = False  # it did not wait
        self._body_bytes += len(part)
        if self._body_bytes > self._listener.body_bytes:
            raise request.error or body_too_large(self._listener.body_bytes)
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

    # --- judging what comes

    def _start_body(self, request: HttpRequest) -> None:
        self._request = request
        self._body = []
        self._body_bytes = self._body_raw = 0
        self._owes_continue = False
        self._body_until = request.received_at + _BODY_TOTAL * self._listener.timeouts.body_s

    def _judge(self, request: HttpRequest) -> None:
        """Find errors the head alone shows; they are answered when the body has been read away."""
        listener = self._listener
        try:
            listener.handler.precheck(request)
            length = request.picked.get(b"content-length")
            if length is not None and int(length) > listener.body_bytes:
                raise body_too_large(listener.body_bytes)
        except BodyTooLarge:
            raise
        except GatewayError as error:
            request.error = error
        if request.picked.get(b"expect", b"").lower() == b"100-continue" and request.version_11:
            if request.error is not None:
                raise request.error  # the client is waiting: tell it now, body unsent
            self._owes_continue = True
            if self._exchange is None and not self._ready:
                self._continue()

    def _continue(self) -> None:
        self._owes_continue = False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_turn(self) -> None:
        """Time and invite what is being received: all answers before its own are written."""
        now, timeouts = self._listener.clock(), self._listener.timeouts
        if self._in_head:
            self.deadline = now + timeouts.header_s
            return
        self._body_until = now + _BODY_TOTAL * timeouts.body_s
        self._extend_body_deadline()
        if self._owes_continue:
            self._continue()

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
