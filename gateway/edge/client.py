"""The answering half of a client connection: requests in order, answers out, an honest end.

Keep-alive, pipelining, backpressure, lingering close. What a request means is the handler's
business. No task runs per connection or request; a tick looks at the deadlines of all of them.
"""

import asyncio
import select
from typing import TYPE_CHECKING, cast

from gateway.edge.http import HttpRequest, answer_head
from gateway.edge.receiver import NEVER, Receiver
from gateway.errors import GatewayError, RequestTimeout

if TYPE_CHECKING:
    from gateway.edge.server import Listener

_LINGER_S = 1.0  # how long what a refused client still sends is read away, so it sees the answer
_LOOK_S = 0.5  # how often a client that is not read is asked whether it is still there
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_PIPELINE_MAX = 16  # parsed requests waiting behind the one in progress before reading pauses
_WRITE_HIGH_WATER = 256 * 1024


class ClientConnection(Receiver):
    """One client socket."""

    __slots__ = (
        "_kept",
        "_pumping",
        "_reading",
        "keep_alive",
        "peer",
        "version_11",
        "writing_paused",
    )

    def __init__(self, listener: "Listener") -> None:
        super().__init__(listener)
        self._pumping = self._kept = False
        self._reading = True
        self.writing_paused = False
        self.peer = ""
        # the request being answered
        self.keep_alive = self.version_11 = True

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the first header deadline."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        self.deadline = self._listener.clock() + self._listener.timeouts.header_s
        self._listener.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Stop what was in progress."""
        self._listener.left(self)
        self.deadline = NEVER
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

    # --- the exchange's side

    def respond(self, request: HttpRequest, status: int, headers: bytes, body: bytes) -> None:
        """Write a whole answer of ours."""
        if self._listener.parting:
            request.keep_alive = False
        self.keep_alive = request.keep_alive
        head = answer_head(status, headers, len(body), request)
        self.transport.write(head if request.method == "HEAD" else head + body)

    def respond_error(self, request: HttpRequest, error: GatewayError) -> None:
        """Write an error answer."""
        headers, body = self._listener.handler.error_answer(request, error, peer=self.peer)
        self.respond(request, error.status, headers, body)

    def done(self) -> None:
        """The exchange has ended and its answer is written: go on with the next, or close."""
        self._exchange = None
        if not self._pumping:
            self._after_answer()
            if self._ready or self._fatal is not None or not self._reading:
                self._pump()

    def unsent(self) -> int:
        """Return how many bytes of answers have not left for the client's socket."""
        return self.transport.get_write_buffer_size()

    def turn_away(self, error: GatewayError) -> None:
        """Answer before anything was asked, and close."""
        self._fatal = error
        self._answer_fatal()

    def idle_since(self) -> float:
        """Return since when nothing has been asked or answered; infinity = something is."""
        if self._exchange is not None or self._ready or self._request is not None:
            return NEVER
        if self._in_head or self._discarding:
            return NEVER
        timeouts = self._listener.timeouts
        return self.deadline - (timeouts.keepalive_s if self._kept else timeouts.header_s)

    @property
    def receiving(self) -> bool:
        """Return whether a request is coming whose end is not here, and nothing before it is left."""
        unfinished = self._in_head or self._request is not None
        return unfinished and self._exchange is None and not self._discarding

    def give_up(self, error: GatewayError) -> None:
        """Wait no more for the rest of a request: answer it so, and close."""
        self._refuse(error)
        self._pump()

    def close_if_idle(self) -> None:
        """Close unless a request is being received or answered, or waits to be read."""
        busy = self._exchange is not None or self._ready or self._request is not None
        if busy or self._in_head or self.transport.is_closing():
            return
        if not self._polled(select.POLLIN):  # closing would reset what has come
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
            self.deadline = NEVER  # `check` may end the exchange, which sets its own
            again = self._exchange.check(now)
            self.deadline = min(self.deadline, again, NEVER if self._reading else now + _LOOK_S)
        elif self._discarding or (self._request is None and not self._in_head):
            if self._discarding:
                self.deadline = NEVER
                self.transport.abort()
            else:
                self._close()
        else:
            what = "header" if self._in_head else "body"
            self.give_up(RequestTimeout(f"The request's {what} did not arrive in time."))

    # --- internals

    def _left(self) -> bool:
        """Return whether the client has gone, which a socket that is not read does not tell."""
        return self._polled(_GONE)

    def _polled(self, events: int) -> bool:
        """Return whether the system knows of any of these for the socket."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), events)
        return bool(poll.poll(0))

    def _serve(self, request: HttpRequest) -> None:
        """Start the only request there is."""
        listener = self._listener
        self._pumping = True
        if listener.parting:
            request.keep_alive = False
        self.version_11, self.keep_alive = request.version_11, request.keep_alive
        if request.error is None:
            self._exchange = exchange = listener.handler.start(self, request)
        else:
            exchange = None
            self.respond_error(request, request.error)
        self._pumping = False
        if exchange is None:
            request.body = b""  # a remembered head must not keep it
            self._after_answer()
        else:
            self.deadline = 0.0  # the exchange's own deadlines, looked at with the next tick

    def _pump(self) -> None:
        """Start requests in order until one is in progress."""
        if self._pumping:
            return
        self._pumping = True
        while self._exchange is None and self._ready and not self.transport.is_closing():
            request = self._ready.popleft()
            if self._listener.parting:
                request.keep_alive = False
            self.version_11, self.keep_alive = request.version_11, request.keep_alive
            if request.error is not None:
                self.respond_error(request, request.error)
            else:
                self._exchange = self._listener.handler.start(self, request)
            if self._exchange is None:
                request.body = b""
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
        target = self._target if request is None else b""
        headers, body = self._listener.handler.error_answer(request, error, target, peer=self.peer)
        self.transport.write(answer_head(error.status, headers, len(body), None) + body)
        self._linger()

    def _after_answer(self) -> None:
        if not self.keep_alive or self._listener.closing:
            self._linger() if self._request is not None else self._close()
        elif not self._ready and (self._in_head or self._request is not None):
            self._take_turn()
        else:
            self._kept = True
            self.deadline = self._listener.clock() + self._listener.timeouts.keepalive_s

    def _close(self) -> None:
        """Close once the client has read what is written; it gets `idle_s` for that."""
        wait = self._listener.timeouts.idle_s
        unread = self.transport.get_write_buffer_size() > 0
        self.deadline = self._listener.clock() + wait if unread and wait else NEVER
        self._discarding = True
        self.transport.close()

    def _linger(self) -> None:
        """Half-close and read away what still comes, so that no reset overtakes the answer."""
        self._discarding = True
        self.deadline = self._listener.clock() + _LINGER_S
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
