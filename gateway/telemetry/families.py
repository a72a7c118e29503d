"""What is on the `/metrics` page: every family's name, kind, labels and meaning, in the page's order.

The page and docs/metrics.md are both made from these tables, so neither can say what the other does
not. Label values come from the configuration or from enums of the code. Must never render or count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Literal

from gateway.core.types import BackendStatus, ClassStatus, EventStatus
from gateway.telemetry.counters import Row

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(slots=True, frozen=True)
class Family:
    """One metric. `when` says what must be configured for it to be there at all."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    when: str = ""

    @property
    def head(self) -> str:
        """Return its HELP and TYPE lines."""
        return f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"


_STATES = {"closed": 0, "half_open": 1, "open": 2}
_PAIR = ("class", "model")
_ROW = ("class", "model", "backend")
_BACKEND = ("backend",)
_CLASS = ("class",)
_EVENTS = "a backend has `kv_events`"
_KEYS = "there are `keys`"
_TLS = "`listen.tls` is set"
_SHADOW = "`routing.shadow` is set"


def _backend(
    name: str, text: str, read: Callable[[BackendStatus], float], kind: Kind = "gauge"
) -> tuple[Family, Callable[[BackendStatus], float]]:
    return Family(name, kind, _BACKEND, text), read


def _followed(
    name: str, text: str, read: Callable[[EventStatus], float], kind: Kind = "counter"
) -> tuple[Family, Callable[[EventStatus], float]]:
    return Family(name, kind, _BACKEND, text, _EVENTS), read


def _class(
    name: str, text: str, read: Callable[[ClassStatus], float]
) -> tuple[Family, Callable[[ClassStatus], float]]:
    return Family(name, "gauge", _CLASS, text), read


def _row(name: str, text: str, read: Callable[[Row], int]) -> tuple[Family, Callable[[Row], int]]:
    return Family(name, "counter", _ROW, text), read


REQUESTS = Family(
    "gateway_requests_total", "counter", (*_ROW, "outcome"), "Requests by how they ended."
)
ROWS = (
    _row(
        "gateway_slo_met_requests_total",
        "Answers inside their class's `slo`: goodput.",
        lambda r: r.in_time,
    ),
    _row(
        "gateway_prompt_tokens_total",
        "Prompt tokens of what was sent: the engine's count, else ours.",
        lambda r: r.prompt,
    ),
    _row("gateway_completion_tokens_total", "Completion tokens reported.", lambda r: r.completion),
    _row(
        "gateway_prefix_predicted_tokens_total",
        "Prompt tokens predicted to be cached.",
        lambda r: r.predicted,
    ),
    _row(
        "gateway_prefix_cached_tokens_total",
        "Prompt tokens reported as cached: prefill that was saved.",
        lambda r: r.cached,
    ),
)

KEY_TOKENS = Family(
    "gateway_key_tokens_total",
    "counter",
    ("key", "kind"),
    "Tokens of requests that ran; prompt includes cached.",
    _KEYS,
)
KEY_REQUESTS = Family(
    "gateway_key_requests_total",
    "counter",
    ("key", "outcome"),
    "Requests of a key by how they ended.",
    _KEYS,
)

REQUEST_SECONDS = Family(
    "gateway_request_seconds", "histogram", _PAIR, "Received to last byte, if sent on."
)
TTFT_SECONDS = Family("gateway_ttft_seconds", "histogram", _PAIR, "Received to first content byte.")
ITL_SECONDS = Family("gateway_itl_seconds", "histogram", _PAIR, "Gap between chunks.")
QUEUE_SECONDS = Family("gateway_queue_seconds", "histogram", _PAIR, "Wait at the gateway.")
DECISION_SECONDS = Family(
    "gateway_decision_seconds",
    "histogram",
    (),
    "Last byte of a request to its backend or its place in the queue: all that routing costs it.",
)

ADMISSIONS = Family(
    "gateway_admission_total", "counter", ("class", "result"), "What admission said."
)
ERRORS = Family(
    "gateway_errors_total",
    "counter",
    ("class", "code"),
    "Errors the gateway answered with itself, refusals included, by the code clients see.",
)
ATTEMPTS = Family(
    "gateway_upstream_attempts_total",
    "counter",
    ("backend", "result"),
    "Sends to backends by how they ended.",
)
FALLBACKS = Family(
    "gateway_fallback_total",
    "counter",
    ("reason",),
    "Requests routed on part of the truth.",
    "one was",
)
RELOADS = Family("gateway_reloads_total", "counter", ("result",), "Configuration reloads.")
HANDSHAKES = Family(
    "gateway_tls_handshakes_total",
    "counter",
    ("result",),
    "TLS handshakes of clients by how they ended.",
    _TLS,
)
CERTIFICATES = Family(
    "gateway_tls_certificate_loads_total",
    "counter",
    ("result",),
    "Changed certificate files, taken or found unusable.",
    "some changed",
)
ADMIN_REFUSALS = Family(
    "gateway_admin_refusals_total",
    "counter",
    ("result",),
    "Requests to the admin listener without its key.",
    "there were some",
)

BACKENDS = (
    _backend("gateway_backend_up", "1 while the backend takes requests.", lambda b: int(b.up)),
    _backend(
        "gateway_backend_draining",
        "1 while it is sent nothing new because somebody said so.",
        lambda b: int(b.draining),
    ),
    _backend(
        "gateway_backend_breaker_state",
        "0 closed, 1 half-open (one trial is out), 2 open (none are sent).",
        lambda b: _STATES.get(b.breaker, 2),
    ),
    _backend("gateway_inflight_requests", "Requests sent and unfinished.", lambda b: b.in_flight),
    _backend(
        "gateway_inflight_prefill_tokens",
        "Uncached prompt tokens sent whose first token has not come.",
        lambda b: b.in_flight_prefill_tokens,
    ),
    _backend(
        "gateway_backend_owed_prefill_seconds",
        "Those tokens in seconds of prefill, at the learnt rate.",
        lambda b: b.owed_prefill_s,
    ),
    _backend(
        "gateway_backend_waiting_requests",
        "Requests held at the gateway for this backend.",
        lambda b: b.waiting,
    ),
    _backend(
        "gateway_backend_kv_utilization",
        "Share of the KV cache in use, 0..1; NaN when the engine does not say.",
        lambda b: nan if b.kv_utilization is None else b.kv_utilization,
    ),
    _backend(
        "gateway_backend_queue_depth", "Requests waiting in the engine.", lambda b: b.queue_depth
    ),
    _backend("gateway_backend_running", "Requests running in the engine.", lambda b: b.running),
    _backend(
        "gateway_backend_snapshot_age_seconds",
        "Age of the last metrics read; +Inf before the first.",
        lambda b: inf if b.snapshot_age_s is None else b.snapshot_age_s,
    ),
    _backend(
        "gateway_backend_prefill_tokens_per_second",
        "Learnt prefill rate.",
        lambda b: b.prefill_tokens_per_s,
    ),
    _backend(
        "gateway_backend_saturation_ratio",
        "Fullest of prefill owed, KV and sequences against their limits; 1 = the next waits.",
        lambda b: b.saturation,
    ),
    _backend(
        "gateway_backend_owed_limit_seconds",
        "Prefill seconds it may owe before requests wait at the gateway (W).",
        lambda b: b.owed_limit_s,
    ),
    _backend("gateway_index_blocks", "Prompt blocks believed resident.", lambda b: b.index_blocks),
    _backend(
        "gateway_index_capacity_blocks",
        "Prompt blocks its cache is believed to have room for.",
        lambda b: b.index_capacity_blocks,
    ),
    _backend(
        "gateway_backend_prefix_trust_ratio",
        "Share of an indexed hit that is believed, 0..1.",
        lambda b: b.prefix_trust_ratio,
    ),
    _backend(
        "gateway_backend_prefix_error_ratio",
        "How far recent predicted hits were off in sum, 0..1; NaN before the first hit.",
        lambda b: nan if b.prefix_error_ratio is None else b.prefix_error_ratio,
    ),
    _backend(
        "gateway_backend_hits_predicted_tokens_total",
        "Predicted hit tokens of the answers whose engine reported its own.",
        lambda b: b.hit_tokens_predicted,
        "counter",
    ),
    _backend(
        "gateway_backend_hits_reported_tokens_total",
        "The hit tokens that it reported for those.",
        lambda b: b.hit_tokens_reported,
        "counter",
    ),
    _backend(
        "gateway_prefill_saved_seconds_total",
        "Engine seconds that hits saved against computing every prompt whole, at the learnt rate.",
        lambda b: b.saved_prefill_s,
        "counter",
    ),
)
FOLLOWED = (
    _followed(
        "gateway_backend_index_exact",
        "1 while the prefix index holds what the engine's KV events say, 0 = what was sent.",
        lambda e: int(e.mode == "exact"),
        "gauge",
    ),
    _followed(
        "gateway_kv_events_blocks", "Blocks the engine says it holds.", lambda e: e.blocks, "gauge"
    ),
    _followed("gateway_kv_events_total", "KV events applied.", lambda e: e.events),
    _followed("gateway_kv_event_gaps_total", "Gaps in the KV events.", lambda e: e.gaps),
    _followed(
        "gateway_kv_event_losses_total",
        "Gaps that no replay filled, and batches unreadable: all known was forgotten.",
        lambda e: e.losses,
    ),
    _followed(
        "gateway_kv_event_restarts_total", "Restarts the KV events showed.", lambda e: e.restarts
    ),
)
CLASSES = (
    _class(
        "gateway_bucket_tokens",
        "Tokens left in the bucket; +Inf = unlimited.",
        lambda c: inf if c.bucket_tokens is None else c.bucket_tokens,
    ),
    _class("gateway_queue_depth", "Requests waiting at the gateway.", lambda c: c.waiting),
    _class(
        "gateway_queue_bytes",
        "What those keep in memory of their bodies.",
        lambda c: c.waiting_bytes,
    ),
)
SLO = Family(
    "gateway_slo_seconds",
    "gauge",
    ("class", "target"),
    "What a class is judged by: `ttft` to the first token, `tpot` per further token.",
)
POOL = Family(
    "gateway_pool_saturation_ratio",
    "gauge",
    ("model",),
    "Mean of a model's backends; +Inf = none is up.",
)

INDEX_BYTES = Family("gateway_index_bytes", "gauge", (), "Memory of the prefix index.")
LOOP_LAG = Family(
    "gateway_loop_lag_seconds",
    "gauge",
    (),
    "Worst delay of an event loop timer in the last 15 to 30 s.",
)
COLLECTOR_PAUSE = Family(
    "gateway_collector_pause_seconds",
    "gauge",
    (),
    "Longest run of Python's cycle collector in the last 15 to 30 s.",
)
LOSSES = Family(
    "gateway_file_dropped_requests_total",
    "counter",
    ("file",),
    "Requests that a file of ours could not take: its disk is full, gone or too slow.",
    "`usage_log.path` or `record` is set",
)
BUILD_INFO = Family("gateway_build_info", "gauge", ("version", "python"), "What is running.")

SHADOW_DECISIONS = Family(
    "gateway_shadow_decisions_total",
    "counter",
    ("policy", "result"),
    "Decisions, by whether the shadow policy's is the same.",
    _SHADOW,
)
SHADOW_SECONDS = Family(
    "gateway_shadow_predicted_seconds_total",
    "counter",
    ("policy", "result"),
    "Predicted seconds that its other choices save or lose.",
    _SHADOW,
)

FAMILIES: tuple[Family, ...] = (
    REQUESTS,
    *(family for family, _ in ROWS),
    KEY_TOKENS,
    KEY_REQUESTS,
    REQUEST_SECONDS,
    TTFT_SECONDS,
    ITL_SECONDS,
    QUEUE_SECONDS,
    DECISION_SECONDS,
    ADMISSIONS,
    ERRORS,
    ATTEMPTS,
    FALLBACKS,
    RELOADS,
    HANDSHAKES,
    CERTIFICATES,
    ADMIN_REFUSALS,
    *(family for family, _ in BACKENDS),
    *(family for family, _ in FOLLOWED),
    *(family for family, _ in CLASSES),
    SLO,
    POOL,
    INDEX_BYTES,
    LOOP_LAG,
    COLLECTOR_PAUSE,
    LOSSES,
    BUILD_INFO,
    SHADOW_DECISIONS,
    SHADOW_SECONDS,
)
"""All of them, in the page's order."""
