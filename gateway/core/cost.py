"""The price of a request on each backend, in seconds (docs/routing.md has the formula).

A price is the request's own time to first token plus what it costs everybody else: the queue it
lengthens, the cache it displaces, the streams it stalls. Must never allocate per candidate more
than its terms, draw randomness or change anything but the candidates' scratch fields.
"""

from array import array
from collections.abc import Sequence
from math import exp, inf
from random import Random

from gateway.core.ledger import Account
from gateway.core.ring import Ring
from gateway.core.settings import RoutingSpec
from gateway.core.types import Chain

TERMS = (
    "queue_s",
    "prefill_s",
    "congestion_s",
    "followers_s",
    "eviction_s",
    "stall_s",
    "decode_s",
    "tpot_guard_s",
    "kv_guard_s",
    "slot_guard_s",
)
# Congestion is what it was at the last mark of this grid: it falls by 0.2 % in between. A grid, so
# that a price depends on when it is asked for and never on who asked before; binary, so exact.
CONGESTION_GRAIN_S = 1 / 64

Held = Sequence[tuple[int, int]]
"""The prefix index's answer: (blocks, mask of the backends that hold so many), shortest first."""

NOTHING = Chain(array("Q"), 1.0, 0)


class Demand:
    """The request being decided, and the pool's state: reused, filled anew for each decision.

    `hit_share` is H: hit tokens / prompt tokens of late. `cursor` is round robin's position, `ring`
    the pool's, for policies that ask for one. `prompt_tokens` are the chain's, or 1 if it has none.
    """

    __slots__ = (
        "chain",
        "cls",
        "cursor",
        "hit_share",
        "now",
        "output_tokens",
        "prompt_tokens",
        "ring",
        "routing",
        "tpot_slo_s",
        "ttft_slo_s",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self.chain = NOTHING
        self.prompt_tokens = 1
        self.output_tokens = 0
        self.cls = ""
        self.tpot_slo_s = 0.1
        self.ttft_slo_s = 1.0
        self.hit_share = 0.0
        self.cursor = 0
        self.ring: Ring | None = None
        self.routing = RoutingSpec()


def score(rows: Sequence[Account], demand: Demand, _rng: Random) -> None:
    """Write each candidate's price to `cost` and its parts to `terms` (order of `TERMS`).

    What does not depend on the request is in the rows already, see `refresh`.
    """
    constants = demand.routing.cost
    now = demand.now
    prompt = float(demand.prompt_tokens)  # the interpreter is slow where ints meet floats
    output = float(demand.output_tokens)
    limit = constants.tpot_share * demand.tpot_slo_s
    decode_weight = constants.decode_weight * output
    cls = demand.cls
    own_weight = constants.followers_weight - constants.others_weight
    others_weight = constants.others_weight * demand.ttft_slo_s
    least_phi = constants.stall_floor
    displaced = constants.eviction_weight * demand.hit_share * demand.hit_share
    for row in rows:
        prefill = row.prefill_s
        step = row.step_s
        add = row.sequence_s + row.context_token_s * prompt
        loaded = step + add
        phi = loaded / limit if loaded < limit else 1.0
        queue = row.queue_s
        if row.backlog is not None:
            # with all that waits, if memory is what it waits for; with the shorter of the two
            # prefills of each, if it is the engine
            queue += 0.5 * (row.held_s + row.backlog.price_s(prefill))
        congestion = prefill * row.crowding
        stall = prefill * row.stalled * (phi if phi > least_phi else least_phi)  # noqa: FURB136 - faster
        decode = decode_weight * phi * (step + row.sequences * add)
        price = queue + prefill + congestion + stall + decode
        followers = 0.0
        if row.followed:
            arrivals = row.arrivals
            rate = others_weight * arrivals.urgent
            if cls in arrivals.rates:
                rate += own_weight * arrivals.rates[cls]
            followers = prefill * prefill * row.followed * rate
            price += followers
        eviction = tpot = kv = slots = 0.0
        if row.oldest_use is not None:
            age = now - row.oldest_use
            eviction = prefill * displaced * exp(-age / constants.eviction_age_s)
            price += eviction
        if loaded > limit:
            tpot = constants.tpot_weight * output * (loaded - limit)
            price += tpot
        excess = row.uncached_tokens + output - row.kv_room
        if excess > 0.0:
            kv = output * step * excess / row.engine.kv_tokens
            price += kv
        if row.slots_over > 0.0:
            slots = output * step * row.slots_over / row.engine.max_sequences
            price += slots
        row.cost = price
        row.terms = (
            queue,
            prefill,
            congestion,
            followers,
            eviction,
            stall,
            decode,
            tpot,
            kv,
            slots,
        )


def refresh(row: Account, now: float) -> None:
    """Recompute what prices read, after the row's books or engine model changed or time passed.

    `queue_s` is without what waits at the gateway. `crowding` is rho / (1 - rho); the step time and
    its growth per sequence and context token are stretched by 1 / (1 - rho). `followed` times a rate
    of arrivals and the square of a prefill is what those that come during it wait together: half of
    it each. `stalled` weighs the streams a prefill holds up. `kv_room` is what a request may add
    before the cache counts as full, `slots_over` by how much one more sequence is too many. `load`
    is roughly what a small prefix-less request pays beyond its own prefill: it orders the backends of
    a big pool, so that only the best of it need a full price.
    """
    engine = row.engine
    constants = row.constants
    rho = 0.0
    row.fresh_until = inf
    row.followed = 0.0
    if row.rate:
        mark = now // CONGESTION_GRAIN_S * CONGESTION_GRAIN_S
        left = exp((row.rate_at - mark) / constants.congestion_window_s)
        rho = row.rate * left
        row.followed = 0.5 * left
        highest = constants.max_congestion
        rho = highest if rho > highest else rho  # noqa: FURB136 - twice as fast
        row.fresh_until = mark + CONGESTION_GRAIN_S
    stretch = 1.0 / (1.0 - rho)
    sequences = float(row.in_flight + row.other_in_flight)
    others = row.other_context_tokens
    context = float(row.context_tokens + others)
    step = engine.step_s + engine.sequence_s * sequences + engine.context_token_s * context
    row.sequences = sequences
    row.queue_s = queue = row.owed_ns * 1e-9 + row.other_owed_s
    row.crowding = constants.congestion_weight * rho * stretch
    row.stalled = constants.stall_weight * sequences
    row.step_s = step * stretch
    row.sequence_s = engine.sequence_s * stretch
    row.context_token_s = engine.context_token_s * stretch
    row.kv_room = constants.kv_full_ratio * engine.kv_tokens - row.kv_tokens - others
    row.slots_over = sequences + 1.0 - constants.slots_full_ratio * engine.max_sequences
    row.load = queue + row.held_s + 1e-3 * engine.slow * sequences + row.jitter
