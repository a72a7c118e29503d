"""Policy `cost`: the lowest price in predicted seconds (`core/cost.py` has the formula)."""

from random import Random

from gateway.core import cost
from gateway.core.cost import Demand, Held
from gateway.core.ledger import Account
from gateway.core.policies.base import Policy, Rows, pick
from gateway.core.pool import fill


def choose(rows: Rows, held: Held, demand: Demand, rng: Random) -> Account:
    """Take the cheapest in seconds; differences far below what the model can tell are ties."""
    fill(rows, held, demand)
    cost.score(rows, demand, rng)
    return pick(rows, demand.routing.cost.tie_ratio, rng)


COST = Policy("cost", choose, cost.TERMS, seconds=True, shortlist=True, invest=True)
