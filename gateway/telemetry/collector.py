"""Turns the flat counters and the dispatcher's state into Prometheus families, at scrape time.

Every family of the contract's section 6 is here under its exact name. Must never cost a request
anything: nothing is kept between scrapes.
"""

import platform
from collections.abc import Callable, Iterable, Iterator
from math import inf, nan
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.core.types import BackendStatus, ClassStatus
from gateway.telemetry.counters import Counters, Row, Words
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.lag import LagWindow


class Source(Protocol):
    """What a scrape reads from the dispatcher."""

    @property
    def index_bytes(self) -> int:
        """Return the estimated memory of the prefix index."""

    def backends(self, now: float) -> Iterable[BackendStatus]:
        """Return every configured backend's figures."""

    def classes(self, now: float) -> Iterable[ClassStatus]:
        """Return every configured class's figures."""


_BACKEND_GAUGES: tuple[tuple[str, str, Callable[[BackendStatus], float]], ...] = (
    ("gateway_inflight_requests", "Requests sent and unfinished.", lambda b: b.in_flight),
    (
        "gateway_inflight_prefill_tokens",
        "Uncached prompt tokens sent whose first token has not come.",
        lambda b: b.in_flight_prefill_tokens,
    ),
    ("gateway_backend_up", "1 while the backend takes requests.", lambda b: b.up),
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
    ("gateway_index_blocks", "Prompt blocks believed resident.", lambda b: b.index_blocks),
)

_ROW_COUNTERS: tuple[tuple[str, str, Callable[[Row], int]], ...] = (
    ("gateway_prompt_tokens", "Prompt tokens the engines reported.", lambda r: r.prompt),
    ("gateway_completion_tokens", "Completion tokens reported.", lambda r: r.completion),
    (
        "gateway_prefix_predicted_tokens",
        "Prompt tokens predicted to be cached.",
        lambda r: r.predicted,
    ),
    ("gateway_prefix_cached_tokens", "Prompt tokens reported as cached.", lambda r: r.cached),
)


class GatewayCollector(Collector):
    """Yields the families; what it reads is handed in and never changed."""

    def __init__(
        self,
        counters: Counters,
        lag: LagWindow,
        source: Source,
        *,
        clock: Callable[[], float],
        version: str,
    ) -> None:
        self._counters = counters
        self._lag = lag
        self._source = source
        self._clock = clock
        self._version = version

    def describe(self) -> Iterator[Metric]:
        """Return no description: registering must not read the dispatcher."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family, its samples read now."""
        yield from self._requests()
        yield from self._histograms()
        yield from self._words()
        yield from self._backends()
        yield from self._classes()
        yield _gauge("gateway_index_bytes", "Memory of the prefix index.", self._source.index_bytes)
        yield _gauge(
            "gateway_loop_lag_seconds",
            "Worst delay of an event loop timer in the last 15 to 30 s.",
            self._lag.worst_s,
        )
        info = GaugeMetricFamily(
            "gateway_build_info", "What is running.", labels=("version", "python")
        )
        info.add_metric((self._version, platform.python_version()), 1)
        yield info

    def _requests(self) -> Iterator[Metric]:
        labels = ("class", "model", "backend")
        rows = self._counters.rows.items()
        family = CounterMetricFamily(
            "gateway_requests", "Requests by how they ended.", labels=(*labels, "outcome")
        )
        for key, row in rows:
            for outcome, count in row.outcomes.items():
                family.add_metric((*key, outcome), count)
        yield family
        for name, text, read in _ROW_COUNTERS:
            tokens = CounterMetricFamily(name, text, labels=labels)
            for key, row in rows:
                tokens.add_metric(key, read(row))
            yield tokens

    def _histograms(self) -> Iterator[Metric]:
        counters = self._counters
        yield _histogram(
            "gateway_request_seconds", "Received to last byte, if sent on.", counters.requests
        )
        yield _histogram("gateway_ttft_seconds", "Received to first content byte.", counters.ttfts)
        yield _histogram("gateway_itl_seconds", "Gap between chunks.", counters.itls)
        yield _histogram("gateway_queue_seconds", "Wait at the gateway.", counters.queues)

    def _words(self) -> Iterator[Metric]:
        counters = self._counters
        yield _counter(
            "gateway_admission", "What admission said.", ("class", "result"), counters.admissions
        )
        yield _counter(
            "gateway_upstream_attempts",
            "Sends to backends by how they ended.",
            ("backend", "result"),
            counters.attempts,
        )
        yield _counter(
            "gateway_fallback",
            "Requests routed on part of the truth.",
            ("reason",),
            counters.fallbacks,
        )
        yield _counter("gateway_reloads", "Configuration reloads.", ("result",), counters.reloads)

    def _backends(self) -> Iterator[Metric]:
        statuses = tuple(self._source.backends(self._clock()))
        for name, text, read in _BACKEND_GAUGES:
            family = GaugeMetricFamily(name, text, labels=("backend",))
            for status in statuses:
                family.add_metric((status.name,), read(status))
            yield family

    def _classes(self) -> Iterator[Metric]:
        bucket = GaugeMetricFamily(
            "gateway_bucket_tokens",
            "Tokens left in the bucket; +Inf = unlimited.",
            labels=("class",),
        )
        waiting = GaugeMetricFamily(
            "gateway_queue_depth", "Requests waiting at the gateway.", labels=("class",)
        )
        for status in self._source.classes(self._clock()):
            left = status.bucket_tokens
            bucket.add_metric((status.name,), inf if left is None else left)
            waiting.add_metric((status.name,), status.waiting)
        yield bucket
        yield waiting


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, labels: tuple[str, ...], words: Words) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in words.counts.items():
        family.add_metric(key[-len(labels) :], count)
    return family


def _histogram(name: str, text: str, family: dict[tuple[str, str], Histogram]) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=("class", "model"))
    for pair, histogram in family.items():
        buckets = [(_bound(bound), count) for bound, count in histogram.cumulative()]
        metric.add_metric(pair, buckets, sum_value=histogram.total)
    return metric


def _bound(value: float) -> str:
    return "+Inf" if value == inf else repr(value)
