"""The families of the `/metrics` page that have a series per backend, and where their values come from.

A part of `families`. Must never render or count.
"""

from collections.abc import Callable
from math import inf, nan

from gateway.core.types import BackendStatus, EventStatus
from gateway.telemetry.family import Family, Kind

_STATES = {"closed": 0, "half_open": 1, "open": 2}
_BACKEND = ("backend",)
_EVENTS = "a backend has `kv_events`"


def _backend(
    name: str, text: str, read: Callable[[BackendStatus], float], kind: Kind = "gauge"
) -> tuple[Family, Callable[[BackendStatus], float]]:
    return Family(name, kind, _BACKEND, text), read


def _followed(
    name: str, text: str, read: Callable[[EventStatus], float], kind: Kind = "counter"
) -> tuple[Family, Callable[[EventStatus], float]]:
    return Family(name, kind, _BACKEND, text, _EVENTS), read


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
    _backend(
        "gateway_backend_breaker_opens_total",
        "How often its breaker opened.",
        lambda b: b.breaker_opens,
        "counter",
    ),
    _backend(
        "gateway_backend_warming",
        "1 while it came up a few seconds ago and gets requests little by little.",
        lambda b: int(b.warming),
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
