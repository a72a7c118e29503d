"""When to stop sending to a backend that fails, and when to try it again.

Counts only what is the backend's fault: refused or reset connections, 5xx, timeouts; against them,
answers. A client's mistake (4xx) proves the backend healthy; a client's cancel proves nothing. Must
never quarantine for ever: an open breaker lets one trial request through after a jittered delay.
"""

from collections.abc import Callable
from enum import Enum, unique
from random import Random

from gateway.core.types import Outcome, Ticket

# Three in a row (the plan's figure): one reset is bad luck, three are a state.
TRIP_AFTER = 3
# Half of the last twenty: what fails every other request never fails three in a row. Of a backend
# that fails one in ten, twenty such are a matter of one in 100,000.
LAST_ENDS, TRIP_FAULTS = 20, 10
# What a good trial is worth: the next four faults among fourteen open it again, for twice as long.
_ON_PROBATION = (1 << 6) - 1
_ENDS = (1 << LAST_ENDS) - 1
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
    TRIAL = "half_open"


Tell = Callable[[State, str], None]
"""Takes each new state, and why."""


class Breaker:
    """One backend's record of failures. Methods return whether eligibility changed.

    `failures` = faults since anything was answered; `ends` = how the last twenty requests ended, the
    newest lowest, 1 = a fault. `calm` = closed and none of both: nothing but `failed` changes
    anything then. `opens` counts how often it opened. `tell` is called inside the change.
    """

    __slots__ = (
        "_rng",
        "calm",
        "delay_s",
        "ends",
        "failures",
        "opened_at",
        "opens",
        "retry_at",
        "state",
        "tell",
        "trial",
    )

    def __init__(self, rng: Random, tell: Tell | None = None) -> None:
        self._rng = rng
        self.tell = tell
        self.state = State.CLOSED
        self.failures = self.ends = self.opens = 0
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

    def shown(self, now: float) -> str:
        """Return the state in words: an open breaker whose delay is over is half open."""
        due = self.state is State.OPEN and now >= self.retry_at
        return State.TRIAL.value if due else self.state.value

    def sent(self, ticket_id: int, now: float) -> bool:
        """Note that a request was sent; after an open delay it becomes the one trial."""
        if self.state is not State.OPEN or now < self.retry_at:
            return False
        self.trial = ticket_id
        return self._become(State.TRIAL, "a request is sent as a trial")

    def failed(self, ticket_id: int, now: float, why: str = "") -> bool:
        """Count a failure that is the backend's fault; `why` is told if it opens the breaker."""
        self.failures += 1
        self.ends = (self.ends << 1 | 1) & _ENDS
        self.calm = False
        if self.state is State.TRIAL and self.trial == ticket_id:
            self.delay_s = min(LAST_DELAY_S, 2 * self.delay_s)
            return self._open(now, "the trial failed" + (f": {why}" if why else ""))
        if self.state is not State.CLOSED:
            return False
        last = f", the last: {why}" if why else ""
        if self.failures >= TRIP_AFTER:
            return self._open(now, f"{self.failures} failures in a row{last}")
        if self.ends.bit_count() >= TRIP_FAULTS:
            return self._open(now, f"half of the last {LAST_ENDS} requests failed{last}")
        return False

    def succeeded(self, sent_at: float) -> bool:
        """Note that an answer began; one to a request sent before it opened proves nothing."""
        if self.state is State.CLOSED:
            self.failures = 0
            self.calm = not self.ends
            return False
        if sent_at < self.opened_at:
            return False
        delay_s = min(LAST_DELAY_S, 2 * self.delay_s)  # should it open again before it is calm
        self.reset("it answered")
        self.delay_s = delay_s
        self.ends = _ON_PROBATION
        self.calm = False
        return True

    def withdrawn(self, ticket_id: int, now: float) -> bool:
        """The request ended without telling anything: another may be the trial, at once."""
        if self.state is not State.TRIAL or self.trial != ticket_id:
            return False
        self.retry_at = now
        return self._become(State.OPEN, "the trial told nothing")

    def judge(self, ticket: Ticket, outcome: Outcome, now: float) -> bool:
        """Take in how a request ended; a failure counted when its attempt failed counts once."""
        if self.calm and outcome not in _FAULTS:
            return False
        changed = False
        if outcome in _ANSWERED:
            changed = self._answered(ticket.dispatched_at)
        elif outcome in _FAULTS and ticket.slot not in ticket.tried:
            changed = self.failed(ticket.id, now, outcome.value)
        return self.withdrawn(ticket.id, now) or changed

    def reset(self, why: str = "its health checks succeed again") -> bool:
        """Forget all failures: the backend came back."""
        self.failures = self.ends = 0
        self.calm = True
        self.delay_s = FIRST_DELAY_S
        self.trial = 0
        return self.state is not State.CLOSED and self._become(State.CLOSED, why)

    def _answered(self, sent_at: float) -> bool:
        """Count an answer that came to its end."""
        if self.state is State.CLOSED:
            self.ends = self.ends << 1 & _ENDS
            if not self.ends:
                self.delay_s = FIRST_DELAY_S
        return self.succeeded(sent_at)

    def _open(self, now: float, why: str) -> bool:
        self.opens += 1
        self.opened_at = now
        self.retry_at = now + self.delay_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        self.trial = 0
        return self._become(State.OPEN, why)

    def _become(self, state: State, why: str) -> bool:
        self.state = state
        if self.tell is not None:
            self.tell(state, why)
        return True
