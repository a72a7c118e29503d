"""One request's life, in named phases with one exit.

decode -> parse -> resolve -> permit -> chain, classify -> admit -> attempt (-> attempt) -> relay
-> `_finish`, which runs exactly once whatever happened and gives everything back. No task runs
except while a new connection is being opened.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from gateway.core.request import ParsedRequest, UsageOption
from gateway.core.splice import replace_model, replace_priority, request_usage
from gateway.core.types import (
    Api,
    Finish,
    Outcome,
    Refusal,
    RefusalKind,
    Ticket,
    Usage,
)
from gateway.edge import keys
from gateway.edge.decode import decode_body
from gateway.edge.http import HttpRequest
from gateway.edge.inband import KEEPALIVE, error_events, refusal_events
from gateway.edge.query import build_query, model_not_found, parse_body, resolve_model
from gateway.edge.server import ClientConnection
from gateway.edge.upstreams import Upstream
from gateway.errors import (
    GatewayError,
    InternalError,
    NoBackend,
    NotFound,
    RateLimited,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.relay.connection import UpstreamConnection
from gateway.relay.relay import Relay
from gateway.tasks import spawn
from gateway.telemetry.record import AdmissionResult, AttemptResult, RequestRecord

if TYPE_CHECKING:
    from gateway.edge.handler import Handler

_log = logging.getLogger("radixgate.exchange")
_NEVER = float("inf")
_USAGE_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})
_TERMINAL_APIS = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES})


class Exchange:
    """A request in progress. Owns its ticket, its relay and, for a moment, a connecting task."""

    __slots__ = (
        "_body",
        "_client",
        "_connecting",
        "_handler",
        "_inject_usage",
        "_parsed",
        "_pooled",
        "_relay",
        "_sent_at",
        "_ticket",
        "_upstream",
        "ended",
        "record",
        "request",
    )

    def __init__(self, handler: "Handler", client: ClientConnection, request: HttpRequest) -> None:
        assert request.route is not None
        self._handler = handler
        self._client = client
        self.request = request
        self.record = RequestRecord(
            request_id=request.request_id.decode("latin-1"),
            api=request.route.path,
            received_at=request.received_at,
            key=request.key.name if request.key is not None else None,
            client=client.peer,
        )
        self.ended = False
        self._body = request.body
        request.body = b""
        self._parsed: ParsedRequest | None = None
        self._ticket: Ticket | None = None
        self._upstream: Upstream | None = None
        self._relay: Relay | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._inject_usage = False
        self._pooled = False  # the attempt's connection had served before: it may be stale
        self._sent_at = 0.0

    @property
    def policy(self) -> str:
        """Return the routing policy that decided, for the debug header."""
        return self._ticket.policy if self._ticket is not None else "none"

    @property
    def query_tokens(self) -> int:
        """Return the prompt's tokens as counted before dispatch."""
        return self._ticket.query.chain.tokens if self._ticket is not None else 0

    # --- phases

    def begin(self) -> None:
        """Run the phases up to the first attempt; any error is answered."""
        try:
            self._handler.check_capacity()
            if self.request.route is not None and self.request.route.id is not None:
                self._begin_by_id(self.request.route.id)
            else:
                self._begin_routed()
        except GatewayError as error:
            self.refuse(error)
        except Exception:  # noqa: BLE001 - a fault of ours costs one request, never the process
            _log.exception("request %s failed", self.record.request_id)
            self.refuse(InternalError("Internal error of the gateway; its log has the cause."))

    def _begin_routed(self) -> None:
        self._decode()
        parsed = self._parse()
        model = self.record.model = resolve_model(self._handler.dispatcher, parsed.model)
        keys.require(self.request.key, model)
        self._ticket = self._admit(parsed, model)
        self._edit_body(parsed, model)
        self._attempt()

    def _begin_by_id(self, response_id: str) -> None:
        """`/v1/responses/{id}`: only the backend that made a response knows it."""
        made_by = self._handler.responses.get(response_id)
        self._upstream = self._handler.upstreams.get(made_by) if made_by is not None else None
        if self._upstream is None:
            raise NotFound("No response with this id was made through this gateway.", param="id")
        self.record.backend = self._upstream.name
        self.record.attempts = 1
        self._send_or_connect(self._upstream)

    def _decode(self) -> None:
        encoding = self.request.picked.get(b"content-encoding")
        if encoding is not None:
            limit = self._handler.body_limit
            self._body = decode_body(self._body, encoding.decode("latin-1"), limit)

    def _parse(self) -> ParsedRequest:
        route = self.request.route
        assert route is not None
        kind = (self.request.text(b"content-type") or "") if route.multipart else ""
        self._parsed = parsed = parse_body(route, self._body, kind)
        self.record.stream = parsed.stream
        return parsed

    def _admit(self, parsed: ParsedRequest, model: str) -> Ticket:
        handler, request, record = self._handler, self.request, self.record
        may_choose = request.key.choose_class if request.key is not None else handler.keys.open
        query = build_query(
            handler.dispatcher,
            handler.prompter(model),
            parsed,
            model,
            path=record.api,
            user_agent=request.user_agent,
            key=request.key,
            forced_class=request.text(b"x-gateway-class") if may_choose else None,
            session=request.session,
        )
        cls = record.cls = query.cls
        answer = handler.dispatcher.admit(query, handler.clock())
        if isinstance(answer, Refusal):
            raise self._refusal(answer, cls, model)
        handler.telemetry.admission(cls, AdmissionResult.ADMITTED)
        record.prompt_tokens = query.chain.tokens
        record.queue_s = 0.0
        return answer

    def _refusal(self, refusal: Refusal, cls: str, model: str) -> GatewayError:
        telemetry = self._handler.telemetry
        if refusal.kind is RefusalKind.RATE:
            telemetry.admission(cls, AdmissionResult.REJECTED_RATE)
            message = f"The token bucket of class `{cls}` is empty; see retry-after."
            return RateLimited(message, retry_after_s=refusal.retry_after_s)
        if refusal.kind is RefusalKind.UNKNOWN_MODEL:
            return model_not_found(model)
        telemetry.admission(cls, AdmissionResult.NO_BACKEND)
        message = f"No backend of `{model[:100]}` is up."
        return NoBackend(message, retry_after_s=refusal.retry_after_s)

    def _edit_body(self, parsed: ParsedRequest, model: str) -> None:
        """Splice in the values a rule changes; every other byte stays the client's."""
        if parsed.model is not None and parsed.model != model and not self._multipart:
            self._body = replace_model(self._body, model)
        key = self.request.key
        if key is not None and not key.choose_priority and parsed.data.get("priority"):
            self._body = replace_priority(self._body, 0)
        if (
            self._handler.inject_usage
            and parsed.stream
            and parsed.api in _USAGE_APIS
            and parsed.usage_option is not UsageOption.EXPLICIT
        ):
            self._body = request_usage(self._body, parsed.usage_option)
            self._inject_usage = True

    @property
    def _multipart(self) -> bool:
        return self.request.route is not None and self.request.route.multipart

    # --- attempts

    def _attempt(self) -> None:
        ticket = self._ticket
        assert ticket is not None
        self._note_placement(ticket)
        upstream = self._handler.upstreams.get(ticket.backend)
        if upstream is None:
            self._next_attempt(AttemptResult.CONNECT_FAILED, "backend was removed")
            return
        self._upstream = upstream
        self._send_or_connect(upstream)

    def _note_placement(self, ticket: Ticket) -> None:
        handler, record = self._handler, self.record
        handler.dispatcher.remember(record.request_id, ticket, handler.clock())
        record.backend = ticket.backend
        record.attempts = ticket.attempts
        record.predicted_tokens = ticket.hit_tokens
        record.reason = ticket.reason

    def _send_or_connect(self, upstream: Upstream) -> None:
        connection = upstream.pool.take(self._handler.clock())
        if connection is not None:
            self._pooled = True
            self._send(upstream, connection)
        else:
            self._open(upstream)

    def _open(self, upstream: Upstream) -> None:
        self._pooled = False
        self._connecting = spawn(self._connect(upstream), name=f"connect {upstream.name}")

    async def _connect(self, upstream: Upstream) -> None:
        """Open a connection; the only part of a request that waits in a task."""
        try:
            connection = await upstream.pool.connect(self._handler.timeouts.connect_s)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: no name for IDNA
            self._connecting = None
            if not self.ended:
                self._next_attempt(AttemptResult.CONNECT_FAILED, _reason(error))
            return
        self._connecting = None
        if self.ended:
            connection.abort()
        else:
            self._send(upstream, connection)

    def _send(self, upstream: Upstream, connection: UpstreamConnection) -> None:
        request, handler, parsed = self.request, self._handler, self._parsed
        assert request.route is not None
        api = parsed.api if parsed is not None else Api.RESPONSES
        earlier = self._relay
        self._relay = relay = Relay(
            self,
            self._client,
            api,
            handler.clock,
            handler.telemetry.itl(self.record.cls, self.record.model).observe_all,
            remove_usage=self._inject_usage,
        )
        if earlier is not None and earlier.opened:
            relay.adopt(earlier)
        self._sent_at = handler.clock()
        length = len(self._body) if request.method == "POST" else None
        lines = request.forward + handler.forwarding_lines(request, self._client.peer)
        # A coded stream would hide the usage chunk that the client must not see.
        coding = b"identity" if self._inject_usage else request.picked.get(b"accept-encoding")
        if coding is not None:
            lines += b"accept-encoding: %b\r\n" % coding
        head = upstream.head(request.method, request.route.path, request.query, lines, length)
        short = len(self._body) < _JOIN_BELOW
        pieces = [head + self._body] if short else [head, self._body]
        relay.start(connection, pieces, bodyless=request.method == "HEAD")
        if self._client.writing_paused:  # by an earlier answer that the client has not read
            relay.pause(self._sent_at)

    def _next_attempt(self, result: AttemptResult, reason: str) -> None:
        """The attempt surely did not start at the backend: try another, or give up."""
        handler, ticket = self._handler, self._ticket
        now = handler.clock()
        self._count_attempt(result)
        if ticket is not None:
            handler.dispatcher.attempt_failed(ticket, now)
            if ticket.attempts < handler.max_attempts and handler.dispatcher.reassign(ticket, now):
                self._attempt()
                return
        _log.warning("request %s: %s: %s", self.record.request_id, self.record.backend, reason)
        self.refuse(UpstreamError("The backend could not be reached."))

    # --- Relay's owner

    def relay_started(self, status: int, *, stream: bool) -> bytes:
        """Return the header lines of ours."""
        self.record.status = status
        self.record.stream = stream
        return self._handler.answer_lines(self)

    def relay_first_content(self, now: float) -> None:
        """Note TTFT; the prefill is no longer owed."""
        self.record.ttft_s = now - self.record.received_at
        if self._ticket is not None:
            self._handler.dispatcher.first_token(self._ticket, now)

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
        self._count_attempt(_ATTEMPT_RESULTS.get(relay.status // 100, AttemptResult.OK))
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
            self._count_attempt(AttemptResult.RESET)
            self._backend_failed()
            self.refuse(UpstreamError("The backend broke off before answering."))
            return
        _log.warning("request %s: %s: %s", self.record.request_id, self.record.backend, reason)
        self._count_attempt(AttemptResult.RESET)
        self._backend_failed()
        self._break_off(relay, Outcome.UPSTREAM_ERROR, "The backend broke off in mid-stream.")

    def _outcome_of_complete(self, relay: Relay) -> Outcome:
        if relay.status >= 500:
            return Outcome.UPSTREAM_5XX
        if relay.status >= 400:
            return Outcome.UPSTREAM_4XX
        if not relay.stream or relay.encoded or relay.api not in _TERMINAL_APIS:
            return Outcome.OK
        if not relay.scanner.terminated(relay.api):
            return Outcome.UPSTREAM_TRUNCATED
        return Outcome.UPSTREAM_ERROR if relay.scanner.reported_error() else Outcome.OK

    def _break_off(self, relay: Relay, outcome: Outcome, message: str) -> None:
        """End an answer that has begun: in-band where it is a stream, by cutting it otherwise."""
        relay.abort()
        if relay.stream and not relay.encoded:
            self._inject_error(relay, message)
            relay.end()
            self._finish(outcome)
            self._client.done()
        else:
            self._finish(outcome)
            self._client.abort()

    def _inject_error(self, relay: Relay, message: str) -> None:
        gap = b"" if relay.scanner.ends_between_events() else b"\n\n"
        relay.inject(gap + error_events(relay.api, message, "upstream_error"))

    def _backend_failed(self) -> None:
        if self._ticket is not None:
            self._handler.dispatcher.attempt_failed(self._ticket, self._handler.clock())

    def _count_attempt(self, result: AttemptResult) -> None:
        if self.record.backend is not None:
            self._handler.telemetry.attempt(self.record.backend, result)

    # --- the client connection's side

    def client_lost(self) -> None:
        """The client left: whatever phase this is, the backend is told at once."""
        if self.ended:
            return
        self._stop_upstream()
        self._finish(Outcome.CLIENT_CLOSED)

    def pause(self) -> None:
        """The client does not keep up."""
        if self._relay is not None:
            self._relay.pause(self._handler.clock())

    def resume(self) -> None:
        """The client reads again."""
        if self._relay is not None:
            self._relay.resume()

    def check(self, now: float) -> float:
        """Act on a deadline that passed; return the next one."""
        if self.ended:
            return _NEVER
        due, message = self._next_deadline()
        if due > now:
            return min(due, now + self._handler.look_again_s, self._keepalive(now))
        self._expire(message)
        return _NEVER

    def _next_deadline(self) -> tuple[float, str]:
        """Return (when, what to say); an empty message blames the client."""
        timeouts, relay = self._handler.timeouts, self._relay
        due, message = _NEVER, ""
        if timeouts.total_s:
            due = self.record.received_at + timeouts.total_s
            message = f"The request took longer than {timeouts.total_s:g} s (timeouts.total_s)."
        if relay is None or self._connecting is not None:
            return due, message
        if relay.paused_at:
            stalled = relay.paused_at + timeouts.idle_s if timeouts.idle_s else _NEVER
            return (stalled, "") if stalled < due else (due, message)
        if not relay.last_at:
            limit, since, what = timeouts.first_byte_s, self._sent_at, "first_byte_s"
        else:
            limit, since, what = timeouts.idle_s, relay.last_at, "idle_s"
        if limit and since + limit < due:
            due = since + limit
            message = f"The backend was silent for {limit:g} s (timeouts.{what})."
        return due, message

    def _expire(self, message: str) -> None:
        relay = self._relay
        if not message:  # a client that stopped reading
            self._stop_upstream()
            self._finish(Outcome.CLIENT_CLOSED)
            self._client.abort()
            return
        self._count_attempt(AttemptResult.TIMEOUT)
        self._backend_failed()
        if relay is not None and relay.started:
            self._break_off(relay, Outcome.UPSTREAM_TIMEOUT, message)
            return
        self._stop_upstream()
        self.refuse(UpstreamTimeout(message))

    def _keepalive(self, now: float) -> float:
        """Break a stream's silence with a comment if configured; return when to look again."""
        every, relay = self._handler.keepalive_s, self._relay
        if not every:
            return _NEVER
        if relay is None or relay.encoded or relay.paused_at or not self._streams(relay):
            return now + every
        since = max(relay.last_at, relay.written_at, self._sent_at)
        if now - since >= every:
            if not relay.stream:
                relay.open_early()
            if relay.scanner.ends_between_events():
                relay.inject(KEEPALIVE)
            relay.written_at = since = now
        return since + every

    def _streams(self, relay: Relay) -> bool:
        """Return whether the answer is a stream, or will be if the backend does as asked."""
        wanted = self.record.stream and relay.api in _TERMINAL_APIS
        return relay.stream or (wanted and not relay.started)

    def shut_down(self) -> None:
        """The gateway stops and the drain time is over: end this now."""
        if self.ended:
            return
        relay = self._relay
        if relay is not None and relay.started:
            self._break_off(relay, Outcome.UPSTREAM_ERROR, "The gateway is shutting down.")
            return
        self._stop_upstream()
        self.refuse(NoBackend("The gateway is shutting down."))

    # --- endings

    def refuse(self, error: GatewayError) -> None:
        """Answer with an error of ours; nothing of an answer has been written yet."""
        if self.ended:
            return
        relay = self._relay
        if relay is not None and relay.opened:
            relay.inject(error_events(relay.api, error.message, error.code))
            relay.end()
            self._finish(error.outcome)
            self._client.done()
            return
        self.record.status = error.status
        self._finish(error.outcome)
        lines, body = self._handler.render_error(self.request, error)
        self._client.respond(self.request, error.status, lines + self._routed_lines(), body)
        self._client.done()

    def _routed_lines(self) -> bytes:
        return self._handler.debug_lines(self) if self.record.cls is not None else b""

    def _stop_upstream(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._relay is not None and self._relay.connection is not None:
            self._relay.abort()
            self._count_attempt(AttemptResult.ABORTED)

    def _finish(self, outcome: Outcome) -> None:
        """Give everything back, learn, count: the one exit."""
        self.ended = True
        handler, record = self._handler, self.record
        now = handler.clock()
        record.outcome = outcome
        record.total_s = now - record.received_at
        handler.ended(self)
        try:
            self._settle(outcome, now)
        except Exception:  # noqa: BLE001 - a fault in the books costs no client its answer
            _log.exception("request %s: a fault in its settlement", record.request_id)
        self._relay = None  # it refers back: without the cycle, all this goes at once
        handler.telemetry.finished(record)

    def _settle(self, outcome: Outcome, now: float) -> None:
        handler, record, relay, ticket = self._handler, self.record, self._relay, self._ticket
        if relay is not None:
            relay.settle()
        usage = relay.scanner.usage() if relay is not None and relay.started else Usage()
        self._note_usage(usage)
        if ticket is not None and not ticket.finished:
            ok = relay is not None and 200 <= relay.status < 400
            finish = Finish(
                outcome=outcome,
                prefilled=ok and (relay is not None and relay.last_at > 0),
                usage=usage,
                chunks=relay.chunks if relay is not None else 0,
                last_token_at=relay.last_at if relay is not None and relay.last_at else None,
            )
            handler.dispatcher.finish(ticket, finish, now)
            self._learn(ticket, usage)
        if relay is not None and record.api == Api.RESPONSES.value and record.backend is not None:
            handler.responses.learn(relay.scanner.opening, record.backend)

    def _learn(self, ticket: Ticket, usage: Usage) -> None:
        if usage.prompt_tokens is not None:
            query = ticket.query
            prompter = self._handler.prompter(query.model)
            prompter.learn(query.model, query.cls, query.chain, usage.prompt_tokens)

    def _note_usage(self, usage: Usage) -> None:
        record = self.record
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens


_JOIN_BELOW = 16 * 1024  # below this one copy costs less than a second iovec
_ATTEMPT_RESULTS = {4: AttemptResult.STATUS_4XX, 5: AttemptResult.STATUS_5XX}


def _reason(error: Exception) -> str:
    return "connect timed out" if isinstance(error, TimeoutError) else type(error).__name__
