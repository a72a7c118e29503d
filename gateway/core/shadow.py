"""A second policy scored on live traffic: how often it would choose otherwise, and for how much.

Wraps the chooser in force while `routing.shadow` names a policy; without one nothing here is called.
It draws from a random state of its own, so live decisions are the same with it and without. Must
never change a decision, a book or the index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gateway.core.chooser import Chooser
from gateway.core.fleet import Fleet
from gateway.core.ledger import Account
from gateway.core.policies import Policy
from gateway.core.pool import Pool
from gateway.core.settings import Slo
from gateway.core.types import BackendId, Query

_SEED = 1


@dataclass(slots=True)
class Tally:
    """What a shadow policy would have done so far.

    Seconds are differences between the prices (policy `cost`) of the two choices, when they differ:
    `saved_s` where the shadow's was the lower, `lost_s` where it was the higher.
    """

    policy: str
    same: int = 0
    different: int = 0
    saved_s: float = 0.0
    lost_s: float = 0.0


class Shadow:
    """Decides as the live chooser does, and asks the shadow policy what it would have done."""

    def __init__(self, live: Chooser, fleet: Fleet, policy: Policy) -> None:
        self.tally = Tally(policy.name)
        self._live = live
        self._second = Chooser(fleet, policy, Random(_SEED))  # noqa: S311 - breaks ties, guards nothing

    def choose(
        self, pool: Pool, query: Query, slo: Slo, now: float, tried: Sequence[BackendId] = ()
    ) -> Account | None:
        """Return the live decision. Requests without a prefill are no policy's choice: not counted.

        The shadow goes first, because candidates keep what the last policy wrote on them.
        """
        if not query.prefills:
            return self._live.choose(pool, query, slo, now, tried)
        other = self._second.choose(pool, query, slo, now, tried)
        winner = self._live.choose(pool, query, slo, now, tried)
        if winner is not None and other is not None:
            if other is winner:
                self.tally.same += 1
            else:
                self._count(self._saved_s((winner, other), pool, query, slo, now))
        return winner

    def _count(self, saved_s: float) -> None:
        tally = self.tally
        tally.different += 1
        if saved_s > 0.0:
            tally.saved_s += saved_s
        else:
            tally.lost_s -= saved_s

    def _saved_s(
        self, pair: tuple[Account, Account], pool: Pool, query: Query, slo: Slo, now: float
    ) -> float:
        """Return how much more the first costs than the second; what is written on them stays."""
        kept = [
            (row.depth, row.hit_tokens, row.uncached_tokens, row.prefill_s, row.cost, row.terms)
            for row in pair
        ]
        self._second.price(pair, pool, query, slo, now)
        saved_s = pair[0].cost - pair[1].cost
        for row, values in zip(pair, kept, strict=True):
            row.depth, row.hit_tokens, row.uncached_tokens = values[:3]
            row.prefill_s, row.cost, row.terms = values[3:]
        return saved_s
