"""One decision: which backends are looked at, what they hold, what each costs, who wins and why.

The last decision's candidates stay readable (`rows`, `reason`, `used`) until the next. Must never enter
anything in the books or the index: whoever asked does, or does not.
"""

from array import array
from collections.abc import Sequence
from random import Random

from gateway.core import explain
from gateway.core.cost import Demand
from gateway.core.fleet import Fleet
from gateway.core.hot import deserves_home
from gateway.core.ledger import Account
from gateway.core.policies import POLICIES, Policy, pick
from gateway.core.pool import SHORTLIST_ABOVE, Pool, fill
from gateway.core.settings import Slo
from gateway.core.types import BackendId, Chain, Query

# What a request that runs no prefill asks of a backend's cache.
_NOTHING = Chain(array("Q"), 1.0, 0)


class Chooser:
    """Runs the policy in force over a pool's candidates."""

    def __init__(self, fleet: Fleet, policy: Policy, rng: Random) -> None:
        self.rows: list[Account] = []
        self.reason = explain.NOBODY
        self.known: int | None = None  # last block of the longest prefix any backend holds
        self._fleet = fleet
        self._rng = rng
        self._demand = Demand()
        self.configure(policy)

    def configure(self, policy: Policy) -> None:
        """Use `policy`, and the weights in the fleet's settings."""
        self.policy = self.used = policy
        routing = self._fleet.settings.routing
        self._demand.weights = (routing.prefix_weight, routing.queue_weight, routing.kv_weight)

    def choose(
        self, pool: Pool, query: Query, slo: Slo, now: float, tried: Sequence[BackendId] = ()
    ) -> Account | None:
        """Return the backend for `query`, or None when none is eligible and untried."""
        fleet = self._fleet
        if not query.prefills:
            return self._choose_idlest(pool, query, now, tried)
        policy = self.used = self.policy
        chain = query.chain
        held = fleet.trie.lookup(chain.hashes)
        fresh = pool.epoch == fleet.epoch and now < pool.until
        rows = pool.candidates if fresh else pool.eligible(now, fleet.epoch)
        if tried:
            rows = [row for row in rows if row.slot not in tried]
        elif len(rows) > SHORTLIST_ABOVE and policy.shortlist:
            rows = pool.shortlist(held, fleet.by_slot, now)
        self.rows = rows
        self.known = None
        if not rows:
            self.reason = explain.NOBODY
            return None
        fill(rows, held, chain, now)
        invest = False
        if held:
            depth, mask = held[-1]
            self.known = known = chain.hashes[depth - 1]
            if policy.invest and deserves_home(pool.hot, rows, known, mask, len(pool.rows)):
                # price all as if they held the known prefix
                invest = True
                fill(rows, [(depth, -1)], chain, now)
        demand = self._demand
        demand.now = now
        demand.prompt_tokens = chain.tokens or 1
        demand.output_tokens = query.expected_output_tokens
        demand.tpot_slo_s = slo.tpot_s
        demand.hit_share = pool.hit_tokens / (pool.prompt_tokens or 1.0)
        demand.cursor = pool.cursor
        policy.score(rows, demand, self._rng)
        winner = pick(rows, policy.near, self._rng)
        if invest:
            fill(rows, held, chain, now)
            home = winner.depth == held[-1][0]
            self.reason = explain.HOME if home else explain.INVEST
        elif held and len(rows) > 1 and winner.depth == held[-1][0]:
            self.reason = explain.HOME
        else:
            self.reason = explain.reason_for(rows, winner)
        return winner

    def measure(self, rows: Sequence[Account], query: Query, now: float) -> None:
        """Write to `rows`, candidates or not, what of `query` each holds and would prefill."""
        if query.prefills:
            fill(rows, self._fleet.trie.lookup(query.chain.hashes), query.chain, now)
            return
        fill(rows, (), _NOTHING, now)
        for row in rows:
            row.uncached_tokens = 0
            row.prefill_s = 0.0

    def _choose_idlest(
        self, pool: Pool, query: Query, now: float, tried: Sequence[BackendId]
    ) -> Account | None:
        """Choose for a request that no cache and no prefill price says anything about."""
        eligible = pool.eligible(now, self._fleet.epoch)
        self.rows = rows = [row for row in eligible if row.slot not in tried]
        self.known = None
        self.used = policy = POLICIES["least_requests"]
        if not rows:
            self.reason = explain.NOBODY
            return None
        self.measure(rows, query, now)
        policy.score(rows, self._demand, self._rng)
        self.reason = explain.NO_PREFILL if len(rows) > 1 else explain.ONLY
        return pick(rows, policy.near, self._rng)
