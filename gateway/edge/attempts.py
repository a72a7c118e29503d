"""The attempts of a request: choose, connect, send, relay; another backend only where that is safe.

An attempt is repeated only when the backend surely did not start it (design, section 4).
"""

import logging
import ssl

from gateway.core.answer import whole_answer
from gateway.core.scan import OPENING_MAX, find_usage
from gateway.core.types import Api, Finish, Outcome, Ticket
from gateway.edge.deadlines import Deadlines
from gateway.edge.descriptors import is_shortage
from gateway.edge.endings import TERMINAL_APIS
from gateway.edge.inband import refusal_events
from gateway.edge.upstreams import Upstream
from gateway.errors import Overloaded, UpstreamError
from gateway.relay.connection import UpstreamConnection
from gateway.relay.relay import Relay
from gateway.relay.why import why_unreached
from gateway.tasks import spawn
from gateway.telemetry.record import AttemptResult

_log = logging.getLogger("radixgate.exchange")
_WHY = "request %s: %s: %s"  # id, backend, reason
_JOIN_BELOW = 16 * 1024  # below this one copy costs less than a second iovec
_LOOK_BYTES = OPENING_MAX + 8192  # an answer's head and the start of its body
_OK = (Outcome.OK, AttemptResult.OK)
_WHOLE = {
    3: (Outcome.UPSTREAM_ERROR, AttemptResult.STATUS_3XX),  # an answer, but to no API call
    4: (Outcome.UPSTREAM_4XX, AttemptResult.STATUS_4XX),
    5: (Outcome.UPSTREAM_5XX, AttemptResult.STATUS_5XX),
}


class Attempts(Deadlines):
    """The layer that talks to backends; the relay's owner."""

    __slots__ = ()

    def _attempt(self, ticket: Ticket, now: float) -> None:
        """Go to the backend that `ticket` was placed on at `now`."""
        handler, record = self._handler, self.record
        handler.dispatcher.remember(record.request_id, ticket, now)
        record.backend = ticket.backend
        record.attempts = ticket.attempts
        record.predicted_tokens = ticket.hit_tokens
        record.reason = ticket.reason
        self._uncounted = True
        self._upstream = upstream = handler.upstreams.get(ticket.backend)
        if upstream is None:
            self._next_attempt(AttemptResult.CONNECT_FAILED, "backend was removed")
        else:
            self._go(upstream, now)

    def _go(self, upstream: Upstream, now: float) -> None:
        connection = upstream.pool.take(now)
        if connection is not None:
            self._pooled = True
            self._give(upstream, connection, now)
        else:
            self._open(upstream)

    def _open(self, upstream: Upstream) -> None:
        self._pooled = False
        self._waiting = spawn(self._connect(upstream), name=f"connect {upstream.name}")

    async def _connect(self, upstream: Upstream) -> None:
        """Open a connection; the only part of a request that waits in a task."""
        try:
            connection = await upstream.pool.connect(self._handler.timeouts.connect_s)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: no name for IDNA
            self._waiting = None
            if is_shortage(error):  # of ours: no backend's fault, and no other would do better
                self._count_attempt(AttemptResult.ABORTED)
                self.refuse(Overloaded("The gateway has no descriptor left for this request."))
            elif not self.ended:
                refused = isinstance(error, ssl.SSLError)
                result = AttemptResult.TLS_FAILED if refused else AttemptResult.CONNECT_FAILED
                self._next_attempt(result, why_unreached(error))
            return
        self._waiting = None
        if self.ended:
            connection.abort()
        else:
            self._give(upstream, connection, self._handler.clock())

    def _give(self, upstream: Upstream, connection: UpstreamConnection, now: float) -> None:
        """Send over a connection that is ours now: a fault must not keep it."""
        try:
            self._send(upstream, connection, now)
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request, never the process
            connection.abort()
            self._fail(error)

    def _send(self, upstream: Upstream, connection: UpstreamConnection, now: float) -> None:
        request, handler, client, body = self.request, self._handler, self._client, self._body
        earlier, route, plan = self._relay, self._route, request.plan
        self._relay = relay = self._new_relay()
        if earlier is not None and earlier.opened:
            relay.adopt(earlier)
        self._sent_at = now
        if not plan.plain:
            handler.fill_plan(request, client.peer)
        # A coded stream would hide the usage chunk that the client must not see.
        lines = plan.plain if self._inject_usage else plan.lines
        bodyless = False
        if route.id is None and not request.query:
            opening = upstream.openings.get(route.path) or upstream.opening(route.path)
            head = b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
                opening,
                lines,
                request.request_id,
                len(body),
            )
        else:
            bodyless = request.method == "HEAD"
            lines += b"x-request-id: %b\r\n" % request.request_id
            length = len(body) if request.method == "POST" else None
            head = upstream.head(request.method, route.path, request.query, lines, length)
        pieces = [head + body] if len(body) < _JOIN_BELOW else [head, body]
        relay.start(connection, pieces, bodyless=bodyless)
        if client.writing_paused:  # by an earlier answer that the client has not read
            relay.pause(now)

    def _new_relay(self) -> Relay:
        """Return what will carry this request's answer to its client."""
        return Relay(
            self,
            self._client,
            self._route.api or Api.RESPONSES,
            self._handler.clock,
            remove_usage=self._inject_usage,
            followed=self._followed,
        )

    def _next_attempt(self, result: AttemptResult, reason: str) -> None:
        """The attempt surely did not start at the backend: try another, or give up."""
        handler, ticket, record = self._handler, self.ticket, self.record
        now, failed = handler.clock(), record.backend
        self._count_attempt(result)
        if ticket is not None:
            handler.dispatcher.attempt_failed(ticket, now, reason)
            if ticket.attempts < handler.max_attempts and handler.dispatcher.reassign(ticket, now):
                _log.info(_WHY, record.request_id, failed, f"{reason}; another is tried")
                self._attempt(ticket, now)
                return
        _log.warning(_WHY, record.request_id, failed, reason)
        self.refuse(UpstreamError("The backend could not be reached."))

    # --- Relay's owner

    def relay_started(self, status: int, *, stream: bool) -> bytes:
        """Return the header lines of ours."""
        record, handler, ticket = self.record, self._handler, self.ticket
        record.status = status
        record.stream = stream
        relay = self._relay
        if relay is not None and not relay.opened:
            self._body = b""  # an answer has begun: no other attempt will need it
        if ticket is not None and record.attempts == 1:
            shown = handler.shown.get((record.backend, record.cls, ticket.policy))
            if shown is not None:  # the usual case; the general one fills the table
                lines = b"x-request-id: %b\r\n%b%d/%d\r\nx-gateway-queue-ms: %d\r\n" % (
                    self.request.request_id,
                    shown,
                    ticket.hit_tokens,
                    ticket.query.chain.tokens,
                    1000 * (record.queue_s or 0.0) + 0.5,
                )
                key = self.request.key
                return lines if key is None else lines + handler.limit_lines(key)
        return handler.answer_lines(self)

    def relay_first_content(self, now: float) -> None:
        """Note TTFT; the prefill is no longer owed."""
        self._body = b""
        self.record.ttft_s = now - self.record.received_at
        if self.ticket is not None:
            self._handler.dispatcher.first_token(self.ticket, now)

    def relay_gaps(self, gaps: list[float]) -> None:
        """Count the gaps between chunks."""
        record = self.record
        self._handler.telemetry.itl(record.cls, record.model).observe_all(gaps)

    def relay_whole(self, data: bytes, now: float) -> None:
        """Finish with an answer that came, and went on, in one piece."""
        kind = self.record.status // 100
        outcome, result = _WHOLE.get(kind, _OK)
        if self.record.backend is not None:
            self._uncounted = False
            self._handler.telemetry.attempt(self.record.backend, result)
        opening = data[:_LOOK_BYTES] if self._route.api is Api.RESPONSES else b""
        usage, said = find_usage(data), None
        if self._followed and kind < 3:
            said = whole_answer(self._route.api, data, usage.completion_tokens)
        self._close_books(Finish(outcome, kind < 3, usage, 1, now), now, opening, said)
        self._client.done()

    def relay_done(self) -> None:
        """Classify a properly ended answer and finish."""
        relay = self._relay
        assert relay is not None
        outcome = self._outcome_of_complete(relay)
        if outcome is Outcome.UPSTREAM_TRUNCATED:
            self._inject_error(relay, "The backend ended the stream before its terminal event.")
        elif relay.late is not None:
            relay.inject(refusal_events(relay.api, relay.status, relay.late))
        relay.end()
        self._count_attempt(_WHOLE.get(relay.status // 100, _OK)[1])
        self._finish(outcome)
        self._client.done()

    def relay_lost(self, *, unread: bool, reason: str) -> None:
        """Try elsewhere if nothing was read, tell the client otherwise."""
        relay = self._relay
        assert relay is not None
        if not relay.started:
            if unread and self._pooled and self._upstream is not None:
                self._open(self._upstream)  # it closed while idle: the attempt has yet to begin
                return
            if unread:
                self._next_attempt(AttemptResult.RESET, reason)
                return
        _log.warning(_WHY, self.record.request_id, self.record.backend, reason)
        self._count_attempt(AttemptResult.RESET)
        self._backend_failed(reason)
        if relay.started:
            self._break_off(relay, Outcome.UPSTREAM_ERROR, "The backend broke off in mid-stream.")
        else:
            self.refuse(UpstreamError("The backend broke off before answering."))

    def _outcome_of_complete(self, relay: Relay) -> Outcome:
        if relay.status >= 300:
            return _WHOLE.get(relay.status // 100, _OK)[0]
        if not relay.stream or relay.encoded or relay.api not in TERMINAL_APIS:
            return Outcome.OK
        if not relay.scanner.terminated(relay.api):
            return Outcome.UPSTREAM_TRUNCATED
        return Outcome.UPSTREAM_ERROR if relay.scanner.reported_error() else Outcome.OK
