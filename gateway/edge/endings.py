"""The state of a request in progress and every way it can end; `_finish` is the one exit.

It runs exactly once whatever happened and gives everything back. The other layers of the same
object are `deadlines`, `attempts` and `exchange`: one idea per file, no call between them.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from gateway.core.answer import Said
from gateway.core.prompter import Prompter
from gateway.core.scan import NO_USAGE
from gateway.core.types import Api, Finish, Outcome, Ticket, Usage
from gateway.edge.client import ClientConnection
from gateway.edge.homes import Home
from gateway.edge.http import HttpRequest
from gateway.edge.inband import error_events
from gateway.edge.routes import Route
from gateway.edge.upstreams import Upstream
from gateway.errors import Draining, GatewayError, InternalError
from gateway.relay.relay import Relay
from gateway.telemetry.record import AttemptResult, RequestRecord
from gateway.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from gateway.edge.handler import Handler

_log = logging.getLogger("radixgate.exchange")
TERMINAL_APIS = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES})


class Endings:
    """A request in progress. Owns its ticket, its relay and, for a moment, a task."""

    __slots__ = (
        "_began",
        "_body",
        "_client",
        "_followed",
        "_handler",
        "_inject_usage",
        "_pooled",
        "_prompter",
        "_relay",
        "_route",
        "_sent_at",
        "_uncounted",
        "_upstream",
        "_waiting",
        "ended",
        "record",
        "request",
        "ticket",
    )

    def __init__(
        self, handler: "Handler", client: ClientConnection, request: HttpRequest, route: Route
    ) -> None:
        key = request.key
        self._handler = handler
        self._client = client
        self.request = request
        self._route = route
        self.record = RequestRecord(
            request.request_id.decode("latin-1"),
            route.pattern or route.path,
            request.received_at,
            None,
            None,
            None,
            None if key is None else key.name,
            client=client.peer
            if handler.proxies is None
            else handler.client_of(request, client.peer),
        )
        self.ended = False
        self._body = request.body
        request.body = b""  # a head may be remembered, with the request it came with
        self._prompter: Prompter | None = None
        self.ticket: Ticket | None = None
        self._upstream: Upstream | None = None
        self._relay: Relay | None = None
        self._waiting: asyncio.Task[None] | None = None  # connects, or reads a large body
        self._inject_usage = False
        self._followed = False  # the next turn can be foreseen from the answer
        self._pooled = False  # the attempt's connection had served before: it may be stale
        self._began = 0.0  # by a clock that counts microseconds, for the decision's time
        self._sent_at = 0.0
        self._uncounted = False  # an attempt runs, and its result is not counted yet

    def client_lost(self) -> None:
        """The client left: whatever phase this is, the backend is told at once."""
        if self.ended:
            return
        relay = self._relay
        if relay is not None and _told_all(relay):
            # Clients may close on `[DONE]`: the answer is whole, only the framing's end is not.
            self._stop_upstream()
            self._count_attempt(AttemptResult.OK)
            self._finish(Outcome.OK)
            return
        sent = relay is not None and self._waiting is None and not self._parked
        self._stop_upstream()
        self._finish(Outcome.CLIENT_CLOSED, sent=sent)

    @property
    def heard_at(self) -> float:
        """When a part of the answer last came, 0 if none did."""
        return 0.0 if self._relay is None else self._relay.last_at

    @property
    def _parked(self) -> bool:
        """Whether it waits at the gateway for a backend."""
        return self.ticket is not None and self.ticket.held

    def shut_down(self) -> None:
        """The gateway stops and the drain time is over: end this now."""
        if self.ended:
            return
        relay = self._relay
        if relay is not None and relay.started:
            self._break_off(relay, Outcome.UPSTREAM_ERROR, "The gateway is shutting down.")
            return
        self._stop_upstream()
        self.refuse(Draining("The gateway is shutting down."))

    def refuse(self, error: GatewayError) -> None:
        """Answer with an error of ours; nothing of an answer has been written yet."""
        if self.ended:
            return
        self._handler.telemetry.refused(self.record.cls, error.code)
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
        lines += self._routed_lines() + self._handler.limit_lines(self.request.key)
        self._client.respond(self.request, error.status, lines, body)
        self._client.done()

    def _fail(self, error: Exception) -> None:
        """Answer with the refusal that was raised, or own up to a fault of ours."""
        self._waiting = None
        if not isinstance(error, GatewayError):
            _log.error("request %s failed", self.record.request_id, exc_info=error)
            error = InternalError("Internal error of the gateway; its log has the cause.")
        self.refuse(error)

    def _routed_lines(self) -> bytes:
        return self._handler.debug_lines(self) if self.record.cls is not None else b""

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

    def _stop_upstream(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._relay is not None:
            self._relay.abort()

    def _backend_failed(self, why: str) -> None:
        if self.ticket is not None:
            self._handler.dispatcher.attempt_failed(self.ticket, self._handler.clock(), why)

    def _count_attempt(self, result: AttemptResult) -> None:
        """Count how the attempt that runs ended; what comes after its end is not its result."""
        if self._uncounted and self.record.backend is not None:
            self._uncounted = False
            self._handler.telemetry.attempt(self.record.backend, result)

    # --- the one exit

    def _finish(self, outcome: Outcome, *, sent: bool = True) -> None:
        """Give everything back, learn, count; whatever the answer was. `sent` as in `Finish`."""
        self._count_attempt(AttemptResult.ABORTED)  # unless it has ended before
        relay = self._relay
        usage, reached, opening, chunks, last_at = NO_USAGE, False, b"", 0, 0.0
        said = None
        if relay is not None:
            relay.settle()
            if relay.started:
                scanner = relay.scanner
                usage, opening = scanner.usage(), scanner.opening
                if outcome is Outcome.OK and not relay.encoded:
                    said = scanner.said(stream=relay.stream)
            chunks, last_at = relay.chunks, relay.last_at
            reached = 200 <= relay.status < 300 and last_at > 0
        finish = Finish(outcome, reached, usage, chunks, last_at or None, sent)
        self._close_books(finish, self._handler.clock(), opening, said)

    def _close_books(
        self, finish: Finish, now: float, opening: bytes, said: Said | None = None
    ) -> None:
        """Leave, settle, learn and be counted.

        `opening` is how the answer's payload began, `said` what the next turn will repeat of it.
        """
        self.ended = True
        handler, record, ticket, usage = self._handler, self.record, self.ticket, finish.usage
        record.outcome = finish.outcome
        record.total_s = now - record.received_at
        if usage is not NO_USAGE:
            record.completion_tokens = usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
            if usage.prompt_tokens is not None:
                record.prompt_tokens = usage.prompt_tokens
        _note_use(record, ticket, finish)
        live = handler.live
        live.discard(self)
        if handler.draining and not live:
            handler.quiet.set()
        try:
            if ticket is not None and not ticket.finished:
                if ticket.held:  # it leaves, or is ended, while it waits
                    record.queue_s = now - ticket.admitted_at
                    handler.parking.leave(ticket)
                handler.dispatcher.finish(ticket, finish, now)
                if self._prompter is not None:
                    self._teach(self._prompter, ticket, usage, said)
            if opening and ticket is not None and self._route.api is Api.RESPONSES:
                home = Home(ticket.backend, ticket.query.model, record.key)
                handler.responses.learn(opening, home)
        except Exception:  # noqa: BLE001 - a fault in the books costs no client its answer
            _log.exception("request %s: a fault in its settlement", record.request_id)
        self._relay = None  # it refers back: without the cycle, all this goes at once
        handler.telemetry.finished(record)
        if handler.recorder is not None:
            self._write_down(handler.recorder, finish)

    def _teach(self, prompter: Prompter, ticket: Ticket, usage: Usage, said: Said | None) -> None:
        """Learn the prompt's real length, and that its backend holds the answer as well."""
        query = ticket.query
        if said is not None:
            hashes = prompter.grow(query.chain, said, usage.completion_tokens)
            if hashes is not None:
                self._handler.dispatcher.grow(ticket, hashes, self._handler.clock())
        if usage.prompt_tokens is not None:
            prompter.learn(query.model, query.cls, query.chain, usage.prompt_tokens)

    def _write_down(self, recorder: Recorder, finish: Finish) -> None:
        """Give a request that was admitted to the trace; one that was refused is there already."""
        if self.ticket is not None:
            at = self.record.received_at
            recorder.note(self.ticket.query, finish.usage, finish.chunks, finish.outcome, at)


def _note_use(record: RequestRecord, ticket: Ticket | None, finish: Finish) -> None:
    """Note whether the prompt was computed, and what came of an answer: a broken one as well."""
    if ticket is None or not ticket.query.prefills:
        return
    left = finish.outcome is Outcome.CLIENT_CLOSED and finish.sent
    record.ran = left or finish.prefilled or ticket.first_token_at is not None
    if ticket.query.expected_output_tokens:
        record.chunks = finish.chunks


def _told_all(relay: Relay) -> bool:
    """Return whether a stream's own last event has gone out, and no error with it."""
    if not relay.stream or relay.encoded or relay.status != 200 or relay.api not in TERMINAL_APIS:
        return False
    scanner = relay.scanner
    return scanner.terminated(relay.api) and not scanner.reported_error()
