"""Policies that add up tokens: what is owed, what is missing, what is being decoded (prior-art.md)."""

from random import Random

from gateway.core.cost import Demand, Held
from gateway.core.policies.base import Policy, Rows, cheapest, holders, requests, scored


def lmetric(rows: Rows, _demand: Demand, _rng: Random) -> None:
    """(owed prefill + uncached tokens) x (in-flight + 1)."""
    for row in rows:
        tokens = float(row.owed_tokens + row.uncached_tokens)
        in_flight = requests(row) + 1
        row.cost = tokens * in_flight
        row.terms = (tokens, float(in_flight))


def lmetric_narrow(rows: Rows, held: Held, demand: Demand, _rng: Random) -> Rows:
    """Keep the holders and the cheapest of those that hold nothing."""
    tokens = demand.prompt_tokens
    prices = [
        (row.owed_tokens + tokens) * (row.in_flight + row.other_in_flight + 1) for row in rows
    ]
    return cheapest(rows, prices, holders(held))


def dynamo(rows: Rows, demand: Demand, _rng: Random) -> None:
    """Dynamo's KV router: max(active prefill + prompt - overlap credit, 0) + decode blocks."""
    spec = demand.routing.dynamo
    prompt = demand.prompt_tokens
    for row in rows:
        left = row.owed_tokens + prompt - spec.overlap_weight * row.hit_tokens
        prefill = max(left, 0.0) / spec.block_tokens
        decode = row.kv_tokens / spec.block_tokens
        row.cost = prefill + decode
        row.terms = (prefill, decode)


def dynamo_narrow(rows: Rows, held: Held, _demand: Demand, _rng: Random) -> Rows:
    """Keep the holders and the cheapest of those that hold nothing."""
    return cheapest(rows, [row.owed_tokens + row.kv_tokens for row in rows], holders(held))


LMETRIC = Policy("lmetric", scored(lmetric), ("prefill_tokens", "in_flight_after"), lmetric_narrow)
DYNAMO = Policy("dynamo", scored(dynamo), ("prefill_blocks", "decode_blocks"), dynamo_narrow)
