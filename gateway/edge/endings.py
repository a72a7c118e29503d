"""The state of a request in progress and every way it can end; `_finish` is the one exit.

It runs exactly once whatever happened and gives everything back. The other layers of the same
object are `deadlines`, `attempts` and `exchange`: one idea per file, no call between them.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from gateway.core.request import ParsedRequest
from gateway.core.types import Api, Finish, Outcome, Ticket, Usage
from gateway.edge.client import ClientConnection
from gateway.edge.http import HttpRequest
from gateway.edge.inband import error_events
from gateway.edge.upstreams import Upstream
from gateway.errors import GatewayError, NoBackend
from gateway.relay.relay import Relay
from gateway.telemetry.record import AttemptResult, RequestRecord

if TYPE_CHECKING:
    from gateway.edge.handler import Handler

_log = logging.getLogger("radixgate.exchange")


class Endings:
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

    def client_lost(self) -> None:
        """The client left: whatever phase this is, the backend is told at once."""
        if self.ended:
            return
        self._stop_upstream()
        self._finish(Outcome.CLIENT_CLOSED)

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
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._relay is not None and self._relay.connection is not None:
            self._relay.abort()
            self._count_attempt(AttemptResult.ABORTED)

    def _backend_failed(self) -> None:
        if self._ticket is not None:
            self._handler.dispatcher.attempt_failed(self._ticket, self._handler.clock())

    def _count_attempt(self, result: AttemptResult) -> None:
        if self.record.backend is not None:
            self._handler.telemetry.attempt(self.record.backend, result)

    # --- the one exit

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
