"""The selectable policies: each one small pure function that prices a list of candidates.

A scorer writes `cost` (lowest wins) and `terms` of every candidate and touches nothing else; `pick`
alone chooses, and spreads ties by `rng`, so no policy sends a quiet pool's traffic to one backend.
Formulas: design section 8 and prior-art.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from gateway.core import cost
from gateway.core.cost import Demand
from gateway.core.ledger import Account

Scorer = Callable[[Sequence[Account], Demand, Random], None]

# llm-d's baseline: a backend holding four fifths of the prompt is home, unless it answers later
# than the best other by more than this.
_HOME_HIT = 0.8
_HOME_PENALTY_S = 18.0
# SGLang's cache_aware defaults: match threshold, absolute and relative imbalance. The absolute one
# is taken relative to the mean on small pools (routing case R08).
_SMG_MATCH, _SMG_ABSOLUTE, _SMG_RELATIVE = 0.5, 32, 1.1


@dataclass(slots=True, frozen=True)
class Policy:
    """A named scorer. `terms` names what it leaves in `Account.terms`.

    Costs within `near` of the lowest (a share of it) are a tie. `seconds` = its cost is a time;
    `shortlist` = it may be asked about only the best of a big pool; `invest` = it lets popular
    prefixes take further homes.
    """

    name: str
    score: Scorer
    terms: tuple[str, ...]
    near: float = 0.0
    seconds: bool = False
    shortlist: bool = False
    invest: bool = False


def pick(rows: Sequence[Account], near: float, rng: Random) -> Account:
    """Return the cheapest candidate, any of them when several are as cheap."""
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


def queue_length(row: Account) -> int:
    """Requests that wait there: what the engine says, or our own without a first token if more."""
    return max(row.unprefilled, row.reported_waiting)


def _weights(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    """GKE Inference Gateway: weighted sum of prefix share, min-max queue and free KV cache."""
    prefix_weight, queue_weight, kv_weight = demand.weights
    queues = [queue_length(row) for row in rows]
    longest, shortest = max(queues), min(queues)
    for row, length in zip(rows, queues, strict=True):
        prefix = min(1.0, row.hit_tokens / demand.prompt_tokens)
        queue = (longest - length) / (longest - shortest) if longest > shortest else 1.0
        kv = 1.0 - utilization(row)
        row.cost = -(prefix_weight * prefix + queue_weight * queue + kv_weight * kv)
        row.terms = (prefix, queue, kv)


def utilization(row: Account) -> float:
    """Share of the KV cache in use: the engine's word, or our books when it says nothing."""
    if row.kv_utilization is not None:
        return min(1.0, max(0.0, row.kv_utilization))
    return min(1.0, row.kv_tokens / max(1, row.engine.kv_tokens))


def _affinity(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    """llm-d's baseline: among the prefix's homes, fewest uncached tokens in flight."""
    home = _HOME_HIT * demand.prompt_tokens
    others = min((r.queue_s + r.prefill_s for r in rows if r.hit_tokens < home), default=inf)
    homes = [
        row
        for row in rows
        if row.hit_tokens >= home and row.queue_s + row.prefill_s <= others + _HOME_PENALTY_S
    ]
    for row in rows:
        row.cost = float(row.owed_tokens) if not homes or row in homes else inf
        row.terms = (row.hit_tokens / demand.prompt_tokens, float(row.owed_tokens))


def _lmetric(rows: Sequence[Account], _demand: Demand, _rng: Random) -> None:
    """(owed prefill + uncached tokens) x (in-flight + 1)."""
    for row in rows:
        tokens = float(row.owed_tokens + row.uncached_tokens)
        in_flight = row.sequences + 1
        row.cost = tokens * in_flight
        row.terms = (tokens, float(in_flight))


def _dynamo(rows: Sequence[Account], _demand: Demand, _rng: Random) -> None:
    """Dynamo's KV router: prefill tokens after this request plus the context being decoded."""
    for row in rows:
        prefill = float(row.owed_tokens + row.uncached_tokens)
        decode = float(row.kv_tokens)
        row.cost = prefill + decode
        row.terms = (prefill, decode)


def _cache_aware(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    """SGLang router: best match, unless loads differ too much; then the least loaded."""
    loads = [row.sequences for row in rows]
    least, most = min(loads), max(loads)
    mean = sum(loads) / len(loads)
    imbalanced = most - least > min(_SMG_ABSOLUTE, 2 + mean) and most > _SMG_RELATIVE * least
    longest = max(row.hit_tokens for row in rows)
    match = not imbalanced and longest > _SMG_MATCH * demand.prompt_tokens
    for row, in_flight in zip(rows, loads, strict=True):
        row.cost = float(-row.hit_tokens if match else in_flight)
        row.terms = (row.hit_tokens / demand.prompt_tokens, float(in_flight))


def _least_requests(rows: Sequence[Account], _demand: Demand, _rng: Random) -> None:
    for row in rows:
        row.cost = float(row.sequences)
        row.terms = (row.cost,)


def _power_of_two(rows: Sequence[Account], _demand: Demand, rng: Random) -> None:
    """The less busy of two drawn at random."""
    count = len(rows)
    first = int(rng.random() * count)
    second = (first + 1 + int(rng.random() * (count - 1))) % count if count > 1 else first
    for index, row in enumerate(rows):
        in_flight = float(row.sequences)
        row.cost = in_flight if index in (first, second) else inf
        row.terms = (in_flight,)


def _round_robin(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    for index, row in enumerate(rows):
        row.cost = float((index - demand.cursor) % len(rows))
        row.terms = (row.cost,)


def _random(rows: Sequence[Account], _demand: Demand, _rng: Random) -> None:
    for row in rows:
        row.cost = 0.0
        row.terms = ()


POLICIES = {
    policy.name: policy
    for policy in (
        # 1 % of a price is far below what the model can tell apart.
        Policy(
            "cost", cost.score, cost.TERMS, near=0.01, seconds=True, shortlist=True, invest=True
        ),
        Policy("weights", _weights, ("prefix", "queue", "kv")),
        Policy("affinity", _affinity, ("hit_ratio", "owed_tokens")),
        Policy("lmetric", _lmetric, ("prefill_tokens", "in_flight_after")),
        Policy("dynamo", _dynamo, ("prefill_tokens", "decode_tokens")),
        Policy("cache_aware", _cache_aware, ("hit_ratio", "in_flight")),
        Policy("least_requests", _least_requests, ("in_flight",)),
        Policy("power_of_two", _power_of_two, ("in_flight",)),
        Policy("round_robin", _round_robin, ("turns_away",)),
        Policy("random", _random, ()),
    )
}


def policy_named(name: str) -> Policy:
    """Return the policy called `name`; ValueError lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}: one of {', '.join(POLICIES)}") from None
