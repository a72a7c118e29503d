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
    """Refill rate and size of a token bucket, in LLM tokens."""

    tokens_per_second: float
    burst_tokens: float


@dataclass(slots=True, frozen=True)
class MatchRule:
    """One line of a class's `match` list: every field that is set must hold (globs where noted)."""

    path: str | None = None
    tools: bool | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    user_agent: str | None = None  # glob
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
    slo: Slo = Slo()


@dataclass(slots=True, frozen=True)
class RoutingSpec:
    """Which policy, and the parameters of those that have any."""

    policy: str = "cost"
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0


@dataclass(slots=True, frozen=True)
class CoreSettings:
    """Everything the dispatcher is built from; `Dispatcher.apply` takes a new one on reload."""

    models: tuple[ModelSpec, ...]
    backends: tuple[BackendSpec, ...]
    classes: tuple[ClassSpec, ...]
    routing: RoutingSpec = RoutingSpec()
    index_bytes: int = 512 * 1024 * 1024
    stale_after_s: float = 0.75
    block_bytes: int = field(default=256)
