"""What happens to simulated backends in the middle of a run (W7). Values only."""

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Happening(StrEnum):
    """The kinds of events."""

    DIES = "dies"
    SLOWS = "slows"
    RESTARTS = "restarts"  # dies, and comes back with an empty cache
    JOINS = "joins"  # one more than there were


@dataclass(slots=True, frozen=True)
class Fault:
    """`what` happens to replica number `replica` at `at_s`.

    `factor` stretches a slow one's steps; `down_s` is how long a restart takes.
    """

    at_s: float
    what: Happening
    replica: int
    factor: float = 3.0
    down_s: float = 30.0
