"""An exchange that notes its phases for a trace, and tells the engine which span is above its own.

`Handler.exchange` is this instead of `Exchange` while tracing is on: an exchange that is not traced
has no branch about it. Decides nothing about a request.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gateway.core.answer import Said
from gateway.core.types import Finish, Outcome
from gateway.edge.client import ClientConnection
from gateway.edge.exchange import Exchange
from gateway.edge.http import HttpRequest, Plan
from gateway.edge.routes import Route
from gateway.edge.upstreams import Upstream
from gateway.relay.connection import UpstreamConnection
from gateway.telemetry.record import AttemptResult
from gateway.telemetry.traces import Tracing, parse_traceparent

if TYPE_CHECKING:
    from gateway.edge.handler import ExchangeOf, Handler

_RESULTS = {
    Outcome.OK: AttemptResult.OK,
    Outcome.UPSTREAM_4XX: AttemptResult.STATUS_4XX,
    Outcome.UPSTREAM_5XX: AttemptResult.STATUS_5XX,
}


def traced(tracing: Tracing) -> "ExchangeOf":
    """Return what begins exchanges whose traces go to `tracing`."""
    return partial(TracedExchange, tracing)


class TracedExchange(Exchange):
    """An `Exchange` with a trace."""

    __slots__ = ("_trace", "_tracing")

    def __init__(
        self,
        tracing: Tracing,
        handler: "Handler",
        client: ClientConnection,
        request: HttpRequest,
        route: Route,
    ) -> None:
        super().__init__(handler, client, request, route)
        self._tracing = tracing
        context = request.picked.get(b"traceparent")
        self._trace = tracing.begin(self.record, request.method, context)

    def _go(self, upstream: Upstream, now: float) -> None:
        self._trace.begin_attempt(upstream.name, now)
        super()._go(upstream, now)

    def _send(self, upstream: Upstream, connection: UpstreamConnection, now: float) -> None:
        """Send with this attempt's trace context; the plan is shared with other requests."""
        request = self.request
        shared = request.plan
        if not shared.plain:
            self._handler.fill_plan(request, self._client.peer)
        request.plan = self._own_plan(shared)
        try:
            super()._send(upstream, connection, now)
        finally:
            request.plan = shared

    def _own_plan(self, shared: Plan) -> Plan:
        """Return the plan with this trace's context in place of the client's."""
        lines, plain, header = shared.lines, shared.plain, self._trace.header
        context = self.request.picked.get(b"traceparent")
        if context is not None:  # a state belongs to a valid context, or goes with it
            valid = parse_traceparent(context) is not None
            stale = [b"traceparent"] if valid else [b"traceparent", b"tracestate"]
            lines, plain = _without(lines, stale), _without(plain, stale)
        return Plan(lines=lines + header, plain=plain + header)

    def relay_first_content(self, now: float) -> None:
        """Note it for the trace, too."""
        self._trace.first_content(now)
        super().relay_first_content(now)

    def _count_attempt(self, result: AttemptResult) -> None:
        if self._uncounted:
            self._trace.end_attempt(result, self._handler.clock())
        super()._count_attempt(result)

    def _close_books(
        self, finish: Finish, now: float, opening: bytes, said: Said | None = None
    ) -> None:
        trace, ticket = self._trace, self.ticket
        result = _RESULTS.get(finish.outcome, AttemptResult.STATUS_3XX)
        trace.end_attempt(result, now)  # of an answer in one piece: it is counted elsewhere
        if ticket is not None:
            trace.queued_at = ticket.admitted_at
        super()._close_books(finish, now, opening, said)
        self._tracing.finish(trace)


def _without(lines: bytes, names: Sequence[bytes]) -> bytes:
    kept = [line for line in lines.split(b"\r\n") if line.partition(b":")[0].lower() not in names]
    return b"\r\n".join(kept)
