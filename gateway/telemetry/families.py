"""What is on the `/metrics` page: every family's name, kind, labels and meaning, in the page's order.

The page and docs/metrics.md are both made from these tables, so neither can say what the other does
not. Label values come from the configuration or from enums of the code. Must never render or count.
"""

from collections.abc import Callable
from math import inf

from gateway.core.types import ClassStatus
from gateway.telemetry.backend_families import BACKENDS, FOLLOWED
from gateway.telemetry.counters import Row
from gateway.telemetry.family import Family

_PAIR = ("class", "model")
_ROW = ("class", "model", "backend")
_CLASS = ("class",)
_KEYS = "there are `keys`"
_TLS = "`listen.tls` is set"
_SHADOW = "`routing.shadow` is set"


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
CERTIFICATE_ENDS = Family(
    "gateway_tls_certificate_expiry_timestamp_seconds",
    "gauge",
    ("side", "backend"),
    "When a certificate of ours ends, Unix time: `listener`'s or the one a `backend` is shown.",
    "`listen.tls` is set, or a backend's `tls.cert`",
)
ADMIN_REFUSALS = Family(
    "gateway_admin_refusals_total",
    "counter",
    ("result",),
    "Requests to the admin listener without its key.",
    "there were some",
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

_SOURCE = ("source", "kind")
_LISTED = "backends are found by `dns`, `srv`, `file` or `kubernetes`"
FOUND = Family(
    "gateway_discovery_backends", "gauge", _SOURCE, "Backends that a listing has found.", _LISTED
)
FINDING_FAILS = Family(
    "gateway_discovery_failing",
    "gauge",
    _SOURCE,
    "1 while a listing cannot be read and the last one is kept.",
    _LISTED,
)
FINDING_FAILED = Family(
    "gateway_discovery_failures_total",
    "counter",
    _SOURCE,
    "How often a listing could not be read.",
    _LISTED,
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
    CERTIFICATE_ENDS,
    ADMIN_REFUSALS,
    *(family for family, _ in BACKENDS),
    *(family for family, _ in FOLLOWED),
    *(family for family, _ in CLASSES),
    SLO,
    POOL,
    FOUND,
    FINDING_FAILS,
    FINDING_FAILED,
    INDEX_BYTES,
    LOOP_LAG,
    COLLECTOR_PAUSE,
    LOSSES,
    BUILD_INFO,
    SHADOW_DECISIONS,
    SHADOW_SECONDS,
)
"""All of them, in the page's order."""
