"""The price of a request on each backend, in seconds (results.md, second version of "cost").

A price is the request's own time to first token plus what it costs everybody else: the queue it
lengthens, the cache it displaces, the streams it stalls. Must never allocate per candidate more
than its terms, draw randomness or change anything but the candidates' scratch fields.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from gateway.core.ledger import RATE_WINDOW_S, Account

TERMS = (
    "queue_s",
    "prefill_s",
    "congestion_s",
    "eviction_s",
    "stall_s",
    "decode_s",
    "tpot_guard_s",
    "kv_guard_s",
    "slot_guard_s",
)

# Constants of the formula that won in simulation (results.md); the ablation there says which matter.
MAX_CONGESTION = 0.85
EVICTION_WEIGHT = 10.0
EVICTION_AGE_S = 60.0
STALL_WEIGHT = 0.1
DECODE_WEIGHT = 0.05
TPOT_SHARE = 0.7
TPOT_WEIGHT = 0.1
KV_FULL = 0.95
SLOTS_FULL = 0.9


class Demand:
    """The request being decided, and the pool's state: reused, filled anew for each decision.

    `hit_share` is H: hit tokens / prompt tokens of late. `cursor` is round robin's position.
    `weights` are (prefix, queue, kv).
    """

    __slots__ = (
        "cursor",
        "hit_share",
        "now",
        "output_tokens",
        "prompt_tokens",
        "tpot_slo_s",
        "weights",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self.prompt_tokens = 1
        self.output_tokens = 0
        self.tpot_slo_s = 0.1
        self.hit_share = 0.0
        self.cursor = 0
        self.weights = (3.0, 2.0, 2.0)


def score(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    """Write each candidate's price to `cost` and its parts to `terms` (order of `TERMS`)."""
    now = demand.now
    prompt = float(demand.prompt_tokens)  # the interpreter is slow only where ints meet floats
    output = float(demand.output_tokens)
    limit = TPOT_SHARE * demand.tpot_slo_s
    displaced = EVICTION_WEIGHT * demand.hit_share * demand.hit_share
    decode_weight = DECODE_WEIGHT * output
    for row in rows:
        engine = row.engine
        prefill = row.prefill_s
        sequences = float(row.sequences)
        step = row.step_s
        rho = row.rate
        if rho:
            rho *= exp((row.rate_at - now) / RATE_WINDOW_S)
            rho = MAX_CONGESTION if rho > MAX_CONGESTION else rho  # noqa: FURB136 - twice as fast
        stretch = 1.0 / (1.0 - rho)
        add = engine.sequence_s + engine.context_token_s * prompt
        loaded = (step + add) * stretch
        phi = loaded / limit if loaded < limit else 1.0

        queue = row.queue_s
        congestion = prefill * rho * stretch
        eviction = tpot = kv = slots = 0.0
        if row.oldest_use is not None:
            eviction = prefill * displaced * exp((row.oldest_use - now) / EVICTION_AGE_S)
        stall = prefill * STALL_WEIGHT * phi * sequences
        decode = decode_weight * phi * stretch * (step + sequences * add)
        if loaded > limit:
            tpot = TPOT_WEIGHT * output * (loaded - limit)
        excess = row.uncached_tokens + output - row.kv_room
        if excess > 0.0:
            kv = output * step * stretch * excess / engine.kv_tokens
        if row.slots_over > 0.0:
            slots = output * step * stretch * row.slots_over / engine.max_sequences
        row.cost = queue + prefill + congestion + eviction + stall + decode + (tpot + kv + slots)
        row.terms = (queue, prefill, congestion, eviction, stall, decode, tpot, kv, slots)


def refresh(row: Account) -> None:
    """Recompute what prices read, after anything in the row's books or engine model changed.

    `kv_room` is what a request may add before the cache counts as full, `slots_over` by how much
    one more sequence is too many. `load` is roughly what a small prefix-less request pays beyond its own prefill: it orders the
    backends of a big pool, so that only the best of it need a full price.
    """
    engine = row.engine
    sequences = row.in_flight + row.other_in_flight
    context = row.context_tokens + row.other_context_tokens
    row.sequences = sequences
    row.queue_s = queue = row.owed_ns * 1e-9 + row.other_owed_s
    row.kv_room = KV_FULL * engine.kv_tokens - row.kv_tokens - row.other_context_tokens
    row.slots_over = sequences + 1 - SLOTS_FULL * engine.max_sequences
    row.step_s = engine.step_s + engine.sequence_s * sequences + engine.context_token_s * context
    row.load = queue + 1e-3 * engine.slow * sequences + row.jitter
    row.stale = False
