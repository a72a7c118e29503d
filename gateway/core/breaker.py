"""When to stop sending to a backend that fails, and when to try it again.

Counts only what is the backend's fault: refused or reset connections, 5xx, timeouts. A client's
mistake (4xx) proves the backend healthy; a client's cancel proves nothing. Must never quarantine
for ever: an open breaker lets one trial request through after a jittered delay.
"""

from enum import Enum, unique
from random import Random

from gateway.core.types import Outcome, Ticket

# Three in a row (the plan's figure): one reset is bad luck, three are a state.
TRIP_AFTER = 3
# First quarantine, doubled per failed trial up to the last: short enough to notice a recovery.
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 10.0
_JITTER = 0.2
_FAULTS = frozenset(
    {
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_TRUNCATED,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_5XX,
    }
)
_ANSWERED = frozenset({Outcome.OK, Outcome.UPSTREAM_4XX})


@unique
class State(Enum):
    """CLOSED lets all through, OPEN none until its delay is over, TRIAL none but the one sent."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    """One backend's record of consecutive failures. Methods return whether eligibility changed.

    `calm` = closed and without a failure: nothing but `failed` changes anything then.
    """

    __slots__ = ("_rng", "calm", "delay_s", "failures", "opened_at", "retry_at", "state", "trial")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.state = State.CLOSED
        self.failures = 0
        self.calm = True
        self.delay_s = FIRST_DELAY_S
        self.opened_at = 0.0
        self.retry_at = 0.0
        self.trial = 0

    def allows(self, now: float) -> bool:
        """Return whether a request may be sent at `now`."""
        if self.state is State.CLOSED:
            return True
        return self.state is State.OPEN and now >= self.retry_at

    def sent(self, ticket_id: int, now: float) -> bool:
        """Note that a request was sent; after an open delay it becomes the one trial."""
        if self.state is not State.OPEN or now < self.retry_at:
            return False
        self.state = State.TRIAL
        self.trial = ticket_id
        return True

    def failed(self, ticket_id: int, now: float) -> bool:
        """Count a failure that is the backend's fault."""
        self.failures += 1
        self.calm = False
        if self.state is State.TRIAL and self.trial == ticket_id:
            self.delay_s = min(LAST_DELAY_S, 2 * self.delay_s)
            return self._open(now)
        if self.state is State.CLOSED and self.failures >= TRIP_AFTER:
            return self._open(now)
        return False

    def succeeded(self, sent_at: float) -> bool:
        """Count an answer; one to a request sent before the breaker opened proves nothing."""
        if self.state is State.CLOSED:
            self.failures = 0
            self.calm = True
            return False
        return sent_at >= self.opened_at and self.reset()

    def withdrawn(self, ticket_id: int, now: float) -> bool:
        """The request ended without telling anything: another may be the trial, at once."""
        if self.state is not State.TRIAL or self.trial != ticket_id:
            return False
        self.state = State.OPEN
        self.retry_at = now
        return True

    def judge(self, ticket: Ticket, outcome: Outcome, now: float) -> bool:
        """Take in how a request ended; a failure counted when its attempt failed counts once."""
        if self.calm and outcome not in _FAULTS:
            return False
        changed = False
        if outcome in _ANSWERED:
            changed = self.succeeded(ticket.dispatched_at)
        elif outcome in _FAULTS and ticket.slot not in ticket.tried:
            changed = self.failed(ticket.id, now)
        return self.withdrawn(ticket.id, now) or changed

    def reset(self) -> bool:
        """Forget all failures: the backend came back."""
        changed = self.state is not State.CLOSED
        self.state = State.CLOSED
        self.failures = 0
        self.calm = True
        self.delay_s = FIRST_DELAY_S
        self.trial = 0
        return changed

    def _open(self, now: float) -> bool:
        self.state = State.OPEN
        self.opened_at = now
        self.retry_at = now + self.delay_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        self.trial = 0
        return True
