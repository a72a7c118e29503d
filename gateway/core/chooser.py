"""One decision: which backends are looked at, what they hold, what each costs, who wins and why.

The last decision's candidates stay readable (`rows`, `reason`, `used`) until the next. Must never enter
anything in the books or the index: whoever asked does, or does not.
"""

from collections.abc import Sequence
from random import Random

from gateway.core import cost, explain
from gateway.core.cost import NOTHING, Demand, Held
from gateway.core.fleet import Fleet
from gateway.core.hot import homes_busy
from gateway.core.ledger import Account
from gateway.core.policies import POLICIES, Policy
from gateway.core.pool import SHORTLIST_ABOVE, Pool, fill
from gateway.core.settings import Slo
from gateway.core.types import BackendId, Query


class Chooser:
    """Runs the policy in force over a pool's candidates."""

    def __init__(self, fleet: Fleet, policy: Policy, rng: Random) -> None:
        self.rows: Sequence[Account] = []
        self.reason = explain.NOBODY
        self.known: int | None = None  # last block of the longest prefix any backend holds
        self.where = (0, 0)  # its depth, and who holds it
        self._fleet = fleet
        self._rng = rng
        self._demand = Demand()
        self.configure(policy)

    def configure(self, policy: Policy) -> None:
        """Use `policy`, with the parameters in the fleet's settings."""
        self.policy = self.used = policy
        self._demand.routing = self._fleet.settings.routing

    def choose(
        self, pool: Pool, query: Query, slo: Slo, now: float, tried: Sequence[BackendId] = ()
    ) -> Account | None:
        """Return the backend for `query`, or None when none is eligible and untried."""
        fleet = self._fleet
        if not query.prefills:
            return self._choose_idlest(pool, query, now, tried)
        policy = self.used = self.policy
        chain = query.chain
        if chain.exact:
            held = fleet.exactness.lookup(query.model, chain, now)
        else:  # engines tell nothing of such blocks: one call less
            held = fleet.trie.lookup(chain.hashes)
        demand = self._demand
        demand.now = now
        demand.chain = chain
        demand.prompt_tokens = chain.tokens or 1
        demand.output_tokens = query.expected_output_tokens
        demand.tpot_slo_s = slo.tpot_s
        demand.ttft_slo_s = slo.ttft_s
        demand.cls = query.cls
        demand.hit_share = pool.hit_tokens / (pool.prompt_tokens or 1.0)
        demand.cursor = pool.cursor
        fresh = pool.epoch == fleet.epoch and now < pool.until
        rows: Sequence[Account] = pool.candidates if fresh else pool.eligible(now, fleet.epoch)
        if tried or pool.warming or len(rows) > SHORTLIST_ABOVE:
            rows = self._fewer(rows, pool, held, tried)
        self.rows = rows
        self.known = None
        if not rows:
            self.reason = explain.NOBODY
            return None
        if policy.ring:
            demand.ring = pool.ring(demand.routing.chwbl.virtual_nodes)
        if not held:
            winner = policy.choose(rows, held, demand, self._rng)
            self.reason = explain.NO_HIT if len(rows) > 1 else explain.ONLY
            return winner
        depth, mask = held[-1]
        self.known = known = chain.hashes[depth - 1]
        self.where = held[-1]
        if (
            policy.invest
            and pool.hot.deserves_more(known, mask.bit_count(), len(pool.rows))
            and homes_busy(rows, mask, demand.routing.cost.hot_ratio, demand.prompt_tokens)
        ):
            # price all as if they held the known prefix
            winner = policy.choose(rows, [(depth, -1)], demand, self._rng)
            fill(rows, held, demand)
            self.reason = explain.HOME if winner.depth == depth else explain.INVEST
            return winner
        winner = policy.choose(rows, held, demand, self._rng)
        if winner.depth == depth and len(rows) > 1:
            self.reason = explain.HOME
        else:
            self.reason = explain.reason_for(rows, winner)
        return winner

    def _fewer(
        self, rows: Sequence[Account], pool: Pool, held: Held, tried: Sequence[BackendId]
    ) -> Sequence[Account]:
        """Return the candidates that need a look: untried, of a big pool some, none that is full."""
        policy, demand = self.policy, self._demand
        if tried:
            rows = [row for row in rows if row.slot not in tried]
        elif len(rows) <= SHORTLIST_ABOVE:
            pass
        elif policy.shortlist:
            rows = pool.shortlist(held, self._fleet.by_slot, demand.now)
        elif policy.narrow is not None:
            rows = policy.narrow(rows, held, demand, self._rng)
        return _spare(rows, pool, demand.now, tried) if pool.warming else rows

    def price(
        self, rows: Sequence[Account], pool: Pool, query: Query, slo: Slo, now: float
    ) -> None:
        """Write to `rows`, candidates or not, what `query` would cost in seconds on each."""
        demand = self._demand
        demand.now = now
        demand.chain = chain = query.chain
        demand.prompt_tokens = chain.tokens or 1
        demand.output_tokens = query.expected_output_tokens
        demand.tpot_slo_s = slo.tpot_s
        demand.ttft_slo_s = slo.ttft_s
        demand.cls = query.cls
        demand.hit_share = pool.hit_share
        fill(rows, self._fleet.exactness.lookup(query.model, chain, now), demand)
        cost.score(rows, demand, self._rng)

    def measure(self, rows: Sequence[Account], query: Query, now: float) -> None:
        """Write to `rows`, candidates or not, what of `query` each holds and would prefill."""
        demand = self._demand
        demand.now = now
        demand.chain = query.chain if query.prefills else NOTHING
        demand.prompt_tokens = demand.chain.tokens or 1
        fill(rows, self._fleet.exactness.lookup(query.model, demand.chain, now), demand)
        if not query.prefills:
            for row in rows:
                row.uncached_tokens = 0
                row.prefill_s = 0.0

    def _choose_idlest(
        self, pool: Pool, query: Query, now: float, tried: Sequence[BackendId]
    ) -> Account | None:
        """Choose for a request that no cache and no prefill price says anything about."""
        eligible = pool.eligible(now, self._fleet.epoch)
        rows: Sequence[Account] = [row for row in eligible if row.slot not in tried]
        if pool.warming:
            rows = _spare(rows, pool, now, tried)
        self.rows = rows
        self.known = None
        self.used = POLICIES["least_requests"]
        if not rows:
            self.reason = explain.NOBODY
            return None
        self._demand.now = now
        self._demand.chain = NOTHING
        self._demand.prompt_tokens = 1
        self.reason = explain.NO_PREFILL if len(rows) > 1 else explain.ONLY
        winner = self.used.choose(rows, (), self._demand, self._rng)
        self.measure(rows, query, now)
        return winner


def _spare(
    rows: Sequence[Account], pool: Pool, now: float, tried: Sequence[BackendId]
) -> Sequence[Account]:
    """Leave out the backends that are being let in and have enough for now, if others are left."""
    full = pool.full(now)
    if not full:
        return rows
    left = [row for row in rows if row not in full]
    if not left:  # a shortlist, by load, may hold nothing else
        left = [row for row in pool.candidates if row not in full and row.slot not in tried]
    return left or rows
