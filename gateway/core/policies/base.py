"""What a policy is, and how its prices become a choice.

A scorer writes `cost` (lowest wins) and `terms` of every candidate and touches nothing else; `pick`
alone chooses, and spreads ties by `rng`, so no policy sends a quiet pool's traffic to one backend.
Must never know any particular policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from gateway.core.cost import Demand, Held
from gateway.core.ledger import Account
from gateway.core.pool import fill

Rows = Sequence[Account]
Scorer = Callable[[Rows, Demand, Random], None]
Chooses = Callable[[Rows, Held, Demand, Random], Account]
Narrows = Callable[[Rows, Held, Demand, Random], Rows]


@dataclass(slots=True, frozen=True)
class Policy:
    """A named way to choose. `terms` names what it leaves in `Account.terms`.

    `narrow` picks from a big pool the candidates among which the winner surely is, so that only
    they are scored. `seconds` = its cost is a time; `shortlist` = of a big pool it may be asked
    about the best only; `invest` = it lets popular prefixes take further homes; `ring` = it wants
    the pool's hash ring.
    """

    name: str
    choose: Chooses
    terms: tuple[str, ...]
    narrow: Narrows | None = None
    seconds: bool = False
    shortlist: bool = False
    invest: bool = False
    ring: bool = False


def scored(score: Scorer) -> Chooses:
    """Make a choice of a scorer: find out what each candidate holds, score all, take the cheapest."""

    def choose(rows: Rows, held: Held, demand: Demand, rng: Random) -> Account:
        fill(rows, held, demand)
        score(rows, demand, rng)
        return pick(rows, 0.0, rng)

    return choose


def pick(rows: Rows, near: float, rng: Random) -> Account:
    """Return the cheapest candidate, any of them when several are as cheap.

    Costs within `near` of the lowest (a share of it) are a tie.
    """
    best = rows[0]
    low = second = inf
    for row in rows:
        price = row.cost
        if price < low:
            second = low
            low = price
            best = row
        elif price < second:
            second = price
    limit = low + near * abs(low) + 1e-12
    if second > limit:
        return best
    ties = [row for row in rows if row.cost <= limit]
    return ties[int(rng.random() * len(ties))]


def requests(row: Account) -> int:
    """Return the requests in flight there, others' included."""
    return row.in_flight + row.other_in_flight


def holders(held: Held) -> int:
    """Return the mask of the backends that hold anything of the prompt."""
    mask = 0
    for _, some in held:
        mask |= some
    return mask


def cheapest(rows: Rows, keys: Sequence[float], mask: int) -> Rows:
    """Return the rows with the lowest key, and those in `mask`, in their order."""
    low = min(keys)
    return [row for row, key in zip(rows, keys, strict=True) if key <= low or mask & row.bit]
