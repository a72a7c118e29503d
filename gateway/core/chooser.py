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
        self.rows: list[Account] = []
        self.reason = explain.NOBODY
        self.known: int | None = None  # last block of the longest prefix any backend holds
        self._fleet = fleet
        self._rng = rng
        self._demand = Demand()
        self.configure(policy)

    def configure(self, policy: Policy) -> None:
        """Use `policy`, and the weights in the fleet's settings."""
        self.policy = policy
        routing = self._fleet.settings.routing
        self._demand.weights = (routing.prefix_weight, routing.queue_weight, routing.kv_weight)

    def choose(
        self, pool: Pool, query: Query, slo: Slo, now: float, tried: Sequence[BackendId] = ()
    ) -> Account | None:
        """Return the backend for `query`, or None when none is eligible and untried."""
        fleet = self._fleet
        policy = self.policy
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
