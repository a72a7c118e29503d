"""Policy `weights`: GKE Inference Gateway's and llm-d's weighted sum of scores (prior-art.md)."""

from random import Random

from gateway.core.cost import Demand
from gateway.core.ledger import Account
from gateway.core.policies.base import Policy, Rows, scored


def score(rows: Rows, demand: Demand, _rng: Random) -> None:
    """Add up: matched blocks / blocks of the request, min-max normalised queue, 1 - KV use.

    With `index_tokens` the index sees only so much of a request's beginning, as the original's
    did: what lies beyond neither counts as matched nor as missing. Its blocks are ours, not
    corrected by what engines report.
    """
    weights = demand.routing.weights
    seen = len(demand.chain.hashes)
    if weights.index_tokens:
        seen = min(seen, int(weights.index_tokens / demand.chain.tokens_per_block))
    queues = [queue_length(row) for row in rows]
    longest, shortest = max(queues), min(queues)
    for row, length in zip(rows, queues, strict=True):
        prefix = min(row.depth, seen) / seen if seen else 0.0
        queue = (longest - length) / (longest - shortest) if longest > shortest else 1.0
        kv = 1.0 - utilization(row)
        row.cost = -(weights.prefix * prefix + weights.queue * queue + weights.kv * kv)
        row.terms = (prefix, queue, kv)


def queue_length(row: Account) -> int:
    """Requests that wait there: what the engine says, or our own without a first token if more.

    Kinder than the original, which sees the engine's word alone and so sends a burst to one backend.
    """
    return max(row.unprefilled, row.reported_waiting)


def utilization(row: Account) -> float:
    """Share of the KV cache in use: the engine's word, or our books when it says nothing."""
    if row.kv_utilization is not None:
        return min(1.0, max(0.0, row.kv_utilization))
    return min(1.0, row.kv_tokens / max(1, row.engine.kv_tokens))


WEIGHTS = Policy("weights", scored(score), ("prefix", "queue", "kv"))
