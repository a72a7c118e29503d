"""Writes the `/metrics` page: the flat counters and the dispatcher's state, read at scrape time.

Every family of the contract's section 6 is here under its exact name. The text is written directly
because a scrape runs on the event loop: prometheus_client's writer takes 18 ms for 64 backends and
4 classes, this one about 2. Must never cost a request anything: nothing is kept between scrapes.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, isnan, nan
from typing import Protocol

from gateway.core.shadow import Tally
from gateway.core.types import BackendStatus, ClassStatus, EventStatus
from gateway.telemetry.counters import Counters, Row, Words
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.lag import LagWindow


class Source(Protocol):
    """What a scrape reads from the dispatcher."""

    @property
    def index_bytes(self) -> int:
        """Return the estimated memory of the prefix index."""

    @property
    def shadow(self) -> Tally | None:
        """Return what the shadow policy would have done; None without one."""

    def backends(self, now: float) -> Iterable[BackendStatus]:
        """Return every configured backend's figures."""

    def classes(self, now: float) -> Iterable[ClassStatus]:
        """Return every configured class's figures."""

    def pools(self) -> Iterable[tuple[str, float]]:
        """Return each model with how full its backends are; 1 = the next request waits."""


_BACKEND_GAUGES: tuple[tuple[str, str, Callable[[BackendStatus], float]], ...] = (
    ("gateway_inflight_requests", "Requests sent and unfinished.", lambda b: b.in_flight),
    (
        "gateway_inflight_prefill_tokens",
        "Uncached prompt tokens sent whose first token has not come.",
        lambda b: b.in_flight_prefill_tokens,
    ),
    ("gateway_backend_up", "1 while the backend takes requests.", lambda b: int(b.up)),
    (
        "gateway_backend_kv_utilization",
        "Share of the KV cache in use, 0..1; NaN when the engine does not say.",
        lambda b: nan if b.kv_utilization is None else b.kv_utilization,
    ),
    ("gateway_backend_queue_depth", "Requests waiting in the engine.", lambda b: b.queue_depth),
    ("gateway_backend_running", "Requests running in the engine.", lambda b: b.running),
    (
        "gateway_backend_snapshot_age_seconds",
        "Age of the last metrics read; +Inf before the first.",
        lambda b: inf if b.snapshot_age_s is None else b.snapshot_age_s,
    ),
    (
        "gateway_backend_prefill_tokens_per_second",
        "Learnt prefill rate.",
        lambda b: b.prefill_tokens_per_s,
    ),
    (
        "gateway_backend_saturation_ratio",
        "Fullest of prefill owed, KV and sequences against their limits; 1 = the next waits.",
        lambda b: b.saturation,
    ),
    (
        "gateway_backend_owed_limit_seconds",
        "Prefill seconds it may owe before requests wait at the gateway (W).",
        lambda b: b.owed_limit_s,
    ),
    ("gateway_index_blocks", "Prompt blocks believed resident.", lambda b: b.index_blocks),
    (
        "gateway_index_capacity_blocks",
        "Prompt blocks its cache is believed to have room for.",
        lambda b: b.index_capacity_blocks,
    ),
    (
        "gateway_backend_prefix_trust_ratio",
        "Share of an indexed hit that is believed, 0..1.",
        lambda b: b.prefix_trust_ratio,
    ),
    (
        "gateway_backend_prefix_error_ratio",
        "How far recent predicted hits were off in sum, 0..1; NaN before the first hit.",
        lambda b: nan if b.prefix_error_ratio is None else b.prefix_error_ratio,
    ),
)

_FOLLOWED_GAUGES: tuple[tuple[str, str, Callable[[EventStatus], float]], ...] = (
    (
        "gateway_backend_index_exact",
        "1 while the prefix index holds what the engine's KV events say, 0 = what was sent.",
        lambda e: int(e.mode == "exact"),
    ),
    ("gateway_kv_events_blocks", "Blocks the engine says it holds.", lambda e: e.blocks),
)

_FOLLOWED_COUNTERS: tuple[tuple[str, str, Callable[[EventStatus], float]], ...] = (
    ("gateway_kv_events_total", "KV events applied.", lambda e: e.events),
    ("gateway_kv_event_gaps_total", "Gaps in the KV events.", lambda e: e.gaps),
    (
        "gateway_kv_event_losses_total",
        "Gaps that no replay filled, and batches unreadable: all known was forgotten.",
        lambda e: e.losses,
    ),
    ("gateway_kv_event_restarts_total", "Restarts the KV events showed.", lambda e: e.restarts),
)

_CLASS_GAUGES: tuple[tuple[str, str, Callable[[ClassStatus], float]], ...] = (
    (
        "gateway_bucket_tokens",
        "Tokens left in the bucket; +Inf = unlimited.",
        lambda c: inf if c.bucket_tokens is None else c.bucket_tokens,
    ),
    ("gateway_queue_depth", "Requests waiting at the gateway.", lambda c: c.waiting),
)

_ROW_COUNTERS: tuple[tuple[str, str, Callable[[Row], int]], ...] = (
    ("gateway_prompt_tokens_total", "Prompt tokens the engines reported.", lambda r: r.prompt),
    ("gateway_completion_tokens_total", "Completion tokens reported.", lambda r: r.completion),
    (
        "gateway_prefix_predicted_tokens_total",
        "Prompt tokens predicted to be cached.",
        lambda r: r.predicted,
    ),
    ("gateway_prefix_cached_tokens_total", "Prompt tokens reported as cached.", lambda r: r.cached),
)

_PAIR = ("class", "model")
_ROW = ("class", "model", "backend")


class Page:
    """Renders what it was handed; `clock` gives monotonic seconds."""

    def __init__(
        self,
        counters: Counters,
        lag: LagWindow,
        pauses: LagWindow,
        source: Source,
        *,
        clock: Callable[[], float],
        version: str,
    ) -> None:
        self._counters = counters
        self._lag = lag
        self._pauses = pauses
        self._source = source
        self._clock = clock
        self._info = labels(("version", "python"), (version, platform.python_version()))

    def render(self) -> str:
        """Return the families as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from self._rows()
        if self._counters.keys:
            yield from self._keys()
        yield from self._histograms()
        yield from self._words()
        yield from self._gauges()
        if (tally := self._source.shadow) is not None:
            yield from _shadow(tally)

    def _rows(self) -> Iterator[str]:
        rows = [(labels(_ROW, key), row) for key, row in self._counters.rows.items()]
        yield from _head("gateway_requests_total", "counter", "Requests by how they ended.")
        for tags, row in rows:
            for outcome, count in row.outcomes.items():
                yield f'gateway_requests_total{tags[:-1]},outcome="{outcome}"}} {count}'
        for name, text, read in _ROW_COUNTERS:
            yield from _head(name, "counter", text)
            for tags, row in rows:
                yield f"{name}{tags} {read(row)}"

    def _keys(self) -> Iterator[str]:
        """Write what each configured key used; absent without keys."""
        rows = [(_escape(name), row) for name, row in self._counters.keys.items()]
        name = "gateway_key_tokens_total"
        yield from _head(name, "counter", "Tokens of requests that ran; prompt includes cached.")
        for key, row in rows:
            for kind, count in row.tokens.items():
                yield f'{name}{{key="{key}",kind="{kind}"}} {count}'
        name = "gateway_key_requests_total"
        yield from _head(name, "counter", "Requests of a key by how they ended.")
        for key, row in rows:
            for outcome, count in row.outcomes.items():
                yield f'{name}{{key="{key}",outcome="{outcome}"}} {count}'

    def _histograms(self) -> Iterator[str]:
        had = self._counters
        yield from _histogram(
            "gateway_request_seconds", "Received to last byte, if sent on.", had.requests
        )
        yield from _histogram("gateway_ttft_seconds", "Received to first content byte.", had.ttfts)
        yield from _histogram("gateway_itl_seconds", "Gap between chunks.", had.itls)
        yield from _histogram("gateway_queue_seconds", "Wait at the gateway.", had.queues)

    def _words(self) -> Iterator[str]:
        had = self._counters
        yield from _words(
            "gateway_admission_total",
            "What admission said.",
            ("class", "result"),
            had.admissions,
        )
        yield from _words(
            "gateway_upstream_attempts_total",
            "Sends to backends by how they ended.",
            ("backend", "result"),
            had.attempts,
        )
        yield from _words(
            "gateway_fallback_total",
            "Requests routed on part of the truth.",
            ("reason",),
            had.fallbacks,
        )
        yield from _words(
            "gateway_reloads_total", "Configuration reloads.", ("result",), had.reloads
        )

    def _gauges(self) -> Iterator[str]:
        now = self._clock()
        backends = [(labels(("backend",), (b.name,)), b) for b in self._source.backends(now)]
        for name, text, read in _BACKEND_GAUGES:
            yield from _head(name, "gauge", text)
            for tags, backend in backends:
                yield f"{name}{tags} {number(read(backend))}"
        followed = [(tags, b.kv_events) for tags, b in backends if b.kv_events.mode != "off"]
        for kind, families in (("gauge", _FOLLOWED_GAUGES), ("counter", _FOLLOWED_COUNTERS)):
            for name, text, read_events in families if followed else ():
                yield from _head(name, kind, text)
                for tags, events in followed:
                    yield f"{name}{tags} {number(read_events(events))}"
        classes = [(labels(("class",), (c.name,)), c) for c in self._source.classes(now)]
        for name, text, read_class in _CLASS_GAUGES:
            yield from _head(name, "gauge", text)
            for tags, status in classes:
                yield f"{name}{tags} {number(read_class(status))}"
        name = "gateway_pool_saturation_ratio"
        yield from _head(name, "gauge", "Mean of a model's backends; +Inf = none is up.")
        for model, value in self._source.pools():
            if self._counters.pair(None, model)[1] == model:
                yield f"{name}{labels(('model',), (model,))} {number(value)}"
        yield from _gauge(
            "gateway_index_bytes", "Memory of the prefix index.", self._source.index_bytes
        )
        yield from _gauge(
            "gateway_loop_lag_seconds",
            "Worst delay of an event loop timer in the last 15 to 30 s.",
            self._lag.worst_s,
        )
        yield from _gauge(
            "gateway_collector_pause_seconds",
            "Longest run of Python's cycle collector in the last 15 to 30 s.",
            self._pauses.worst_s,
        )
        yield from _head("gateway_build_info", "gauge", "What is running.")
        yield f"gateway_build_info{self._info} 1"


def labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return `{name="value",...}`, escaped."""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def number(value: float) -> str:
    """Return a sample value as Prometheus reads it."""
    if isnan(value):
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, "gauge", text)
    yield f"{name} {number(value)}"


def _shadow(tally: Tally) -> Iterator[str]:
    """Write how a second policy would have decided; absent without `routing.shadow`."""
    policy = f'policy="{_escape(tally.policy)}"'
    name = "gateway_shadow_decisions_total"
    yield from _head(name, "counter", "Decisions, by whether the shadow policy's is the same.")
    yield f'{name}{{{policy},result="same"}} {tally.same}'
    yield f'{name}{{{policy},result="different"}} {tally.different}'
    name = "gateway_shadow_predicted_seconds_total"
    yield from _head(name, "counter", "Predicted seconds that its other choices save or lose.")
    yield f'{name}{{{policy},result="saved"}} {number(tally.saved_s)}'
    yield f'{name}{{{policy},result="lost"}} {number(tally.lost_s)}'


def _words(name: str, text: str, names: tuple[str, ...], words: Words) -> Iterator[str]:
    yield from _head(name, "counter", text)
    for key, count in words.counts.items():
        yield f"{name}{labels(names, key[-len(names) :])} {count}"


def _histogram(name: str, text: str, family: dict[tuple[str, str], Histogram]) -> Iterator[str]:
    yield from _head(name, "histogram", text)
    for pair, histogram in family.items():
        tags = labels(_PAIR, pair)
        count = 0
        for bound, count in histogram.cumulative():
            yield f'{name}_bucket{tags[:-1]},le="{number(bound)}"}} {count}'
        yield f"{name}_count{tags} {count}"
        yield f"{name}_sum{tags} {number(histogram.total)}"
