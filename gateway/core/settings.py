"""What the core is configured with: frozen values that `config` builds and the simulator fills in.

No defaults are decided here that a user could set elsewhere: `config/schema.py` documents them.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class EngineProfile:
    """Linear step-time model of one engine (results.md): priors until a backend taught its own.

    One step takes `step_s + prefill_token_s * prefill_tokens + attention_s * sum(chunk * context)
    + sequence_s * sequences + context_token_s * kv_tokens_read` seconds.
    """

    step_s: float = 6.5e-3
    prefill_token_s: float = 30e-6
    attention_s: float = 1.3e-9
    sequence_s: float = 25e-6
    context_token_s: float = 56e-9
    kv_tokens: int = 420_000
    max_sequences: int = 256


@dataclass(slots=True, frozen=True)
class BackendSpec:
    """One engine process. `name` is unique and the only identity a client ever sees."""

    name: str
    profile: EngineProfile = EngineProfile()


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """A model id clients send, and the backends (by name) that serve it."""

    name: str
    backends: tuple[str, ...]
    aliases: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class BucketSpec:
    """Refill rate and size of a token bucket, in LLM tokens.

    `borrow` = what other classes' full buckets have no room for flows into this one.
    """

    tokens_per_second: float
    burst_tokens: float
    borrow: bool = False


@dataclass(slots=True, frozen=True)
class MatchRule:
    """One line of a class's `match` list: every field that is set must hold (globs where noted)."""

    path: str | None = None
    tools: bool | None = None
    suffix: bool | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    user_agent: str | None = None  # glob, in any case
    key: str | None = None
    model: str | None = None  # glob


@dataclass(slots=True, frozen=True)
class Slo:
    """Targets a class is judged by."""

    ttft_s: float = 5.0
    tpot_s: float = 0.1


@dataclass(slots=True, frozen=True)
class ClassSpec:
    """A traffic class. Rules of all classes are tried in order; the first match wins."""

    name: str
    match: tuple[MatchRule, ...] = ()
    default: bool = False
    bucket: BucketSpec | None = None
    share: float = 0.5
    max_wait_s: float = 5.0
    max_waiting: int = 10_000
    max_waiting_bytes: int = 256 * 1024 * 1024
    kv_reserve: float = 0.15
    slo: Slo = Slo()
    engine_priority: int | None = None


@dataclass(slots=True, frozen=True)
class CostSpec:
    """Constants of policy `cost` (docs/routing.md has the formula and what each is worth).

    `congestion_*`: price of the prefill already dispatched, an average over `congestion_window_s`,
    never taken for more than `max_congestion` of the engine. `followers_weight`: what requests of
    the same class that come during the prefill wait for it, half of it on average; `others_weight`:
    the same of other classes, times how much tighter their TTFT target is. `eviction_*`: price of the cache space
    taken, fading with the age of what goes. `stall_weight`: running streams a prefill holds up, at least
    `stall_floor` of it however far their TPOT is from its target.
    `decode_weight`: the own answer, and what it adds to the others'. `tpot_*`: from which share of
    the class's TPOT target on streams count fully, and the price of every second beyond.
    `kv_full_ratio`, `slots_full_ratio`: where cache and sequence slots count as full. Prices within
    `tie_ratio` of the lowest are equal. `hot_ratio`: how much busier than the mean the homes of a
    popular prefix are before it gets another.
    """

    congestion_weight: float = 1.0
    congestion_window_s: float = 8.0
    max_congestion: float = 0.85
    followers_weight: float = 2.0
    others_weight: float = 0.0
    eviction_weight: float = 10.0
    eviction_age_s: float = 60.0
    stall_weight: float = 0.1
    stall_floor: float = 0.0
    decode_weight: float = 0.05
    tpot_share: float = 0.7
    tpot_weight: float = 0.1
    kv_full_ratio: float = 0.95
    slots_full_ratio: float = 0.9
    tie_ratio: float = 0.01
    hot_ratio: float = 1.2


@dataclass(slots=True, frozen=True)
class WeightsSpec:
    """Policy `weights`: the weights, and how many leading tokens its prefix index sees (0 = all)."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0
    index_tokens: int = 0


@dataclass(slots=True, frozen=True)
class AffinitySpec:
    """Policy `affinity`: the hit that makes a home, and how much later than others it may answer."""

    hit_ratio: float = 0.8
    penalty_s: float = 18.0


@dataclass(slots=True, frozen=True)
class SmgSpec:
    """Policy `smg`: the least match, and when loads differ too much to follow it.

    `guard` pool: the difference and ratio of the most and least loaded; backend: the matched one
    against the pool's mean (SMG 1.13).
    """

    match_ratio: float = 0.5
    imbalance_requests: int = 32
    imbalance_ratio: float = 1.1
    guard: str = "pool"


@dataclass(slots=True, frozen=True)
class DynamoSpec:
    """Policy `dynamo`: what a cached block is credited with against the prefill, and a block's size."""

    overlap_weight: float = 1.0
    block_tokens: int = 16


@dataclass(slots=True, frozen=True)
class PrebleSpec:
    """Policy `preble`: how many times the least load a prefix's home may carry."""

    redirect_ratio: float = 2.0


@dataclass(slots=True, frozen=True)
class ChwblSpec:
    """Policy `chwbl`: points of each backend on the ring, and the load a backend may carry."""

    virtual_nodes: int = 256
    load_ratio: float = 1.25


@dataclass(slots=True, frozen=True)
class RoutingSpec:
    """Which policy, which second one is scored beside it (None = none), and their parameters."""

    policy: str = "cost"
    shadow: str | None = None
    cost: CostSpec = CostSpec()
    weights: WeightsSpec = WeightsSpec()
    affinity: AffinitySpec = AffinitySpec()
    smg: SmgSpec = SmgSpec()
    dynamo: DynamoSpec = DynamoSpec()
    preble: PrebleSpec = PrebleSpec()
    chwbl: ChwblSpec = ChwblSpec()


@dataclass(slots=True, frozen=True)
class KeySpec:
    """Limits of an API key, known here by its name alone; None = no limit of that kind."""

    name: str
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    streams: int | None = None

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        limits = (self.tokens_per_minute, self.requests_per_minute, self.tokens_per_day)
        return self.streams is not None or any(limit is not None for limit in limits)


@dataclass(slots=True, frozen=True)
class QueueSpec:
    """When a request waits at the gateway instead of inside its engine (results.md, "Queue").

    `owed_s` = W: prefill seconds a backend may owe before the next request is held; `adaptive` = W
    follows what is observed (`core/owed_limit.py`), starting there; `steal_s` = one
    that owes less takes over what waits for another; `kv_share` = part of the KV cache that
    requests may fill, `overload_kv_share` the same under overload for a class whose mean prompt has
    `long_prompt_tokens` or more.
    """

    enabled: bool = True
    owed_s: float = 0.5
    adaptive: bool = False
    steal_s: float = 0.125
    kv_share: float = 0.97
    overload_kv_share: float = 0.7
    long_prompt_tokens: float = 8000.0


@dataclass(slots=True, frozen=True)
class CoreSettings:
    """Everything the dispatcher is built from; `Dispatcher.apply` takes a new one on reload."""

    models: tuple[ModelSpec, ...]
    backends: tuple[BackendSpec, ...]
    classes: tuple[ClassSpec, ...]
    routing: RoutingSpec = RoutingSpec()
    queue: QueueSpec = QueueSpec(enabled=False)
    keys: tuple[KeySpec, ...] = ()
    index_bytes: int = 512 * 1024 * 1024
    stale_after_s: float = 0.75
    warm_up_s: float = 5.0
    block_bytes: int = field(default=256)
