"""What a request in progress waits for, how long at most, and what happens then."""

from gateway.core.types import Outcome
from gateway.edge.endings import TERMINAL_APIS, Endings
from gateway.edge.inband import KEEPALIVE
from gateway.errors import UpstreamTimeout
from gateway.relay.relay import Relay
from gateway.telemetry.record import AttemptResult

_NEVER = float("inf")


class Deadlines(Endings):
    """The layer that the connection's tick asks."""

    __slots__ = ()

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
        if relay is None or self._waiting is not None or self._parked:
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
        self._blame()
        if relay is not None and relay.started:
            self._break_off(relay, Outcome.UPSTREAM_TIMEOUT, message)
            return
        self._stop_upstream()
        self.refuse(UpstreamTimeout(message))

    def _blame(self) -> None:
        """Count the silence against the backend; one that sent something of late had none."""
        handler, relay, ticket = self._handler, self._relay, self.ticket
        now, idle_s = handler.clock(), handler.timeouts.idle_s
        if ticket is None:
            return
        if relay is not None and relay.last_at and (not idle_s or now < relay.last_at + idle_s):
            handler.dispatcher.excuse(ticket)  # its answer is long: `timeouts.total_s`
        else:
            handler.dispatcher.attempt_failed(ticket, now, "it was silent too long")

    def _keepalive(self, now: float) -> float:
        """Break a stream's silence with a comment if configured; return when to look again."""
        every, relay = self._handler.keepalive_s, self._relay
        if not every:
            return _NEVER
        if relay is None and self._parked and now - self._waits_since >= every:
            self._relay = relay = self._new_relay()
        if relay is None or relay.encoded or relay.paused_at or not self._streams(relay):
            return now + every
        since = max(relay.last_at, relay.written_at, self._sent_at, self._waits_since)
        if now - since >= every:
            if not relay.stream:
                relay.open_early()
            if relay.scanner.ends_between_events():
                relay.inject(KEEPALIVE)
            relay.written_at = since = now
        return since + every

    @property
    def _waits_since(self) -> float:
        """When it began to wait at the gateway; 0 = it does not."""
        ticket = self.ticket
        return ticket.admitted_at if ticket is not None and ticket.held else 0.0

    def _new_relay(self) -> Relay:
        """Return what will carry this request's answer to its client."""
        raise NotImplementedError

    def _streams(self, relay: Relay) -> bool:
        """Return whether the answer is a stream, or will be if the backend does as asked."""
        wanted = self.record.stream and relay.api in TERMINAL_APIS
        return relay.stream or (wanted and not relay.started)
