"""Policies that keep a prefix at its home unless something is wrong there (prior-art.md)."""

from collections.abc import Iterable
from math import inf, sqrt
from random import Random

from gateway.core.cost import Demand, Held
from gateway.core.ledger import Account
from gateway.core.policies.base import Policy, Rows, cheapest, holders, requests, scored

# SMG 1.13: a matched backend is skipped only if it is busier than the mean by at least so many.
_SMG_FLOOR = 4.0


def affinity(rows: Rows, demand: Demand, _rng: Random) -> None:
    """llm-d's newer baseline: among the prefix's homes, least uncached tokens in flight.

    A home holds `hit_ratio` of the prompt; all homes are left when the quickest of them is expected
    to begin later than the quickest other by more than `penalty_s`.
    """
    spec = demand.routing.affinity
    least = spec.hit_ratio * demand.prompt_tokens
    homes = {row.slot for row in rows if row.hit_tokens >= least}
    others = min((expected_ttft(row) for row in rows if row.slot not in homes), default=inf)
    kept = {
        row.slot
        for row in rows
        if row.slot in homes and expected_ttft(row) <= others + spec.penalty_s
    }
    for row in rows:
        row.cost = float(row.owed_tokens) if not kept or row.slot in kept else inf
        row.terms = (row.hit_tokens / demand.prompt_tokens, float(row.owed_tokens))


def expected_ttft(row: Account) -> float:
    """Return the seconds until the uncached tokens in flight are done at the peak prefill rate."""
    return row.owed_tokens / row.engine.prefill_tokens_per_s


def affinity_narrow(rows: Rows, held: Held, _demand: Demand, _rng: Random) -> Rows:
    """Keep every holder, the quickest of the others, and those that owe least."""
    mask = holders(held)
    strangers = [row for row in rows if not mask & row.bit]
    if strangers:
        mask |= min(strangers, key=expected_ttft).bit
    return cheapest(rows, [row.owed_tokens for row in rows], mask)


def smg(rows: Rows, demand: Demand, _rng: Random) -> None:
    """SGLang's router and SMG, `cache_aware`: best match, unless loads differ too much.

    Otherwise, and on a match that is too short, the least loaded; of equally long matches too.
    """
    spec = demand.routing.smg
    loads = [requests(row) for row in rows]
    longest = max(row.hit_tokens for row in rows)
    matched = longest > spec.match_ratio * demand.prompt_tokens
    if spec.guard == "pool":
        least, most = min(loads), max(loads)
        apart = most - least > spec.imbalance_requests and most > spec.imbalance_ratio * least
        follow = {row.slot for row in rows if matched and not apart and row.hit_tokens == longest}
    else:
        limit = smg_limit(loads, spec.imbalance_requests, spec.imbalance_ratio)
        follow = {
            row.slot
            for row, load in zip(rows, loads, strict=True)
            if matched and row.hit_tokens == longest and load <= limit
        }
    for row, load in zip(rows, loads, strict=True):
        row.cost = float(load) if not follow or row.slot in follow else inf
        row.terms = (row.hit_tokens / demand.prompt_tokens, float(load))


def smg_narrow(rows: Rows, held: Held, demand: Demand, _rng: Random) -> Rows:
    """Keep the holders, the least and one of the most loaded: what its older guard looks at."""
    if demand.routing.smg.guard != "pool":
        return rows
    loads = [row.in_flight + row.other_in_flight for row in rows]
    return cheapest(rows, loads, holders(held) | rows[loads.index(max(loads))].bit)


def smg_limit(loads: list[int], absolute: float, relative: float) -> float:
    """Return the load up to which SMG 1.13 follows a match: both bounds must be passed to skip."""
    mean = sum(loads) / len(loads)
    sigma = sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
    return max(mean * relative, mean + max(_SMG_FLOOR, min(absolute, 2.0 * sigma)))


def preble(rows: Rows, demand: Demand, _rng: Random) -> None:
    """Preble's E2: exploit a match longer than what is missing, else explore.

    Explore = least windowed cost, here the prefill seconds dispatched of late (an average over
    `cost.congestion_window_s`), plus the request's own. Exploit = the least loaded longest match;
    one that carries more than `redirect_ratio` times the least load gives the request to that one.
    """
    window_s = demand.routing.cost.congestion_window_s
    loads = [window_s * row.congestion(demand.now) for row in rows]
    longest = max(row.hit_tokens for row in rows)
    exploit = longest > demand.prompt_tokens - longest
    home = min(load for row, load in zip(rows, loads, strict=True) if row.hit_tokens == longest)
    redirect = exploit and home > demand.routing.preble.redirect_ratio * min(loads)
    for row, load in zip(rows, loads, strict=True):
        row.terms = (row.hit_tokens / demand.prompt_tokens, load, row.prefill_s)
        if redirect:
            row.cost = load
        elif exploit:
            row.cost = load if row.hit_tokens == longest else inf
        else:
            row.cost = load + row.prefill_s


def chwbl(rows: Rows, demand: Demand, _rng: Random) -> None:
    """KubeAI: consistent hashing with bounded loads, of the prompt's first block.

    (The original hashes adapter and first 100 characters; the first block has the adapter in it.)
    The next backend on the ring whose load with this request is at most `load_ratio` of the mean
    with it; the key's own when there is none. A prompt shorter than a block has no key: the least
    loaded.
    """
    loads = [requests(row) for row in rows]
    bound = demand.routing.chwbl.load_ratio * (sum(loads) + 1) / len(rows)
    hashes = demand.chain.hashes
    chosen = None
    if hashes and demand.ring is not None:
        chosen = _on_ring(rows, loads, bound, demand.ring.walk(hashes[0]))
    for row, load in zip(rows, loads, strict=True):
        row.terms = (float(load), bound)
        row.cost = float(load) if chosen is None else float(row.name != chosen)


def _on_ring(rows: Rows, loads: list[int], bound: float, walk: Iterable[str]) -> str | None:
    by_name = {row.name: load for row, load in zip(rows, loads, strict=True)}
    total = sum(loads)
    first = None
    passed: set[str] = set()
    for name in walk:
        load = by_name.get(name)
        if load is None or name in passed:
            continue
        if not total or load + 1 <= bound:
            return name
        passed.add(name)
        first = first or name
        if len(passed) == len(by_name):
            break
    return first


AFFINITY = Policy("affinity", scored(affinity), ("hit_ratio", "owed_tokens"), affinity_narrow)
SMG = Policy("smg", scored(smg), ("hit_ratio", "in_flight"), smg_narrow)
PREBLE = Policy("preble", scored(preble), ("hit_ratio", "windowed_s", "prefill_s"))
CHWBL = Policy("chwbl", scored(chwbl), ("in_flight", "bound"), ring=True)
