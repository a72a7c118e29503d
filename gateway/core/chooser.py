"""One decision: which backends are looked at, what they hold, what each costs, who wins and why.

The last decision's candidates stay readable (`rows`, `reason`) until the next. Must never enter
anything in the books or the index: whoever asked does, or does not.
"""

from collections.abc import Sequence
from random import Random

from gateway.core import explain
from gateway.core.cost import Demand
from gateway.core.fleet import Fleet
from gateway.core.hot import deserves_home
from gateway.core.ledger import Account
from gateway.core.policies import Policy, pick
from gateway.core.pool import SHORTLIST_ABOVE, Pool, fill
from gateway.core.settings import Slo
from gateway.core.types import BackendId, Query


class Chooser:
    """Runs the policy in force over a pool's candidates."""

    def __init__(self, fleet: Fleet, policy: Policy, rng: Random) -> None:
        self.policy = policy
        self.rows: list[Account] = []
        self.reason = explain.NOBODY
        self.known: int | None = None  # last block of the longest prefix any backend holds
        self._fleet = fleet
        self._rng = rng
        self._demand = Demand()

    def choose(
        self, pool: Pool, query: Query, slo: Slo, now: float, tried: Sequence[BackendId] = ()
    ) -> Account | None:
        """Return the backend for `query`, or None when none is eligible and untried."""
        rows, held = self._candidates(pool, query, now, tried)
        self.rows = rows
        self.reason = explain.NOBODY
        if not rows:
            return None
        invest = self.policy.invest and len(rows) > 1 and self._invest(pool, query, now, held)
        self._price(pool, query, slo, now)
        winner = pick(rows, self.policy.near, self._rng)
        self.reason = explain.reason_for(rows, winner)
        if invest:
            fill(rows, held, query.chain, now)
            if winner.depth < held[-1][0]:
                self.reason = explain.INVEST
        return winner

    def _candidates(
        self, pool: Pool, query: Query, now: float, tried: Sequence[BackendId]
    ) -> tuple[list[Account], list[tuple[int, int]]]:
        fleet = self._fleet
        rows = pool.eligible(now, fleet.epoch)
        if tried:
            rows = [row for row in rows if row.slot not in tried]
        hashes = query.chain.hashes
        held = fleet.trie.lookup(hashes)
        self.known = hashes[held[-1][0] - 1] if held else None
        if len(rows) > SHORTLIST_ABOVE and self.policy.shortlist and not tried:
            rows = pool.shortlist(held, fleet.by_slot)
        fill(rows, held, query.chain, now)
        return rows, held

    def _invest(self, pool: Pool, query: Query, now: float, held: list[tuple[int, int]]) -> bool:
        """Price every candidate as if it held the known prefix, if that deserves a further home."""
        if self.known is None:
            return False
        depth, mask = held[-1]
        if not deserves_home(pool.hot, self.rows, self.known, mask, len(pool.rows)):
            return False
        fill(self.rows, [(depth, -1)], query.chain, now)
        return True

    def _price(self, pool: Pool, query: Query, slo: Slo, now: float) -> None:
        demand = self._demand
        demand.now = now
        demand.prompt_tokens = query.chain.tokens or 1
        demand.output_tokens = query.expected_output_tokens
        demand.tpot_slo_s = slo.tpot_s
        demand.hit_share = pool.hit_share
        demand.cursor = pool.cursor
        routing = self._fleet.settings.routing
        demand.weights = (routing.prefix_weight, routing.queue_weight, routing.kv_weight)
        self.policy.score(self.rows, demand, self._rng)
