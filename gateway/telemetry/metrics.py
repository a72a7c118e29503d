"""Telemetry: what the edge calls when something happened to a request, and the `/metrics` page.

Cheap where requests pass (`finished`, `attempt`, `itl(...).observe`); the page is made in turns with
them (`scrape`). Must never see a prompt or a key.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from gateway.telemetry.counters import OTHER, Counters, Target, histogram
from gateway.telemetry.histogram import FIRST_TOKENS, GAPS, SECONDS, Histogram, quantiles
from gateway.telemetry.lag import LagWindow
from gateway.telemetry.page import Page, Source
from gateway.telemetry.record import AdmissionResult, AttemptResult, RequestRecord

__all__ = [
    "OTHER",
    "AdmissionResult",
    "AttemptResult",
    "Histogram",
    "RequestRecord",
    "Source",
    "Telemetry",
]

# A scrape's share of the loop at a time: as a few requests take, and a tenth of what is felt.
_TURN_S = 0.001


class Telemetry:
    """Every counter of the contract's section 6, and the request line of the log.

    `source` is the dispatcher; `clock` gives monotonic seconds; `log` takes each finished record,
    or is None while request lines are off (it may be replaced at any time, see `logs.Logs`);
    `usage_log` likewise (`usage_log.UsageLog.note`), and `watcher`, which is there only while someone
    looks at the live page. `page` is told where else it finds figures.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float],
        version: str,
        log: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.log = log
        self.usage_log: Callable[[RequestRecord], None] | None = None
        self.watcher: Callable[[RequestRecord], None] | None = None
        self.lag = LagWindow(clock)
        self.pauses = LagWindow(clock)
        self._counters = counters = Counters()
        self._attempts, self._admissions = counters.attempts, counters.admissions
        self._decisions = counters.decisions
        self.page = Page(
            self._counters, self.lag, self.pauses, source, clock=clock, version=version
        )
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def set_labels(
        self,
        classes: Iterable[str],
        models: Iterable[str],
        backends: Iterable[str],
        keys: Iterable[str] = (),
        targets: Mapping[str, Target] | None = None,
    ) -> None:
        """Take the configured names: series of names that left disappear, the rest go on.

        `targets` are what each class is judged by (its `slo`); one without has no goodput.
        """
        self._counters.set_labels(classes, models, backends, keys, targets)

    def itl(self, cls: str | None, model: str | None) -> Histogram:
        """Return the histogram of gaps between chunks: fetch it once per stream."""
        return histogram(self._counters.itls, self._counters.pair(cls, model), GAPS)

    def ttft(self, cls: str | None, model: str | None) -> Histogram:
        """Return the histogram of times to the first content byte; `finished` feeds it."""
        return histogram(self._counters.ttfts, self._counters.pair(cls, model), FIRST_TOKENS)

    def ttft_quantiles(self, cls: str, shares: Sequence[float]) -> list[float | None]:
        """Return a class's times to first token over all models since the start, as `quantiles`."""
        ttfts = self._counters.ttfts.items()
        return quantiles([one for (name, _), one in ttfts if name == cls], shares)

    def queue(self, cls: str | None, model: str | None) -> Histogram:
        """Return the histogram of waits at the gateway; `finished` feeds it."""
        return histogram(self._counters.queues, self._counters.pair(cls, model), SECONDS)

    def request(self, cls: str | None, model: str | None) -> Histogram:
        """Return the histogram of whole requests; `finished` feeds it."""
        return histogram(self._counters.requests, self._counters.pair(cls, model), SECONDS)

    def finished(self, record: RequestRecord) -> None:
        """Count and log a request that has ended, whatever its end; exactly once per request.

        Durations are observed only for requests that reached a backend: a refusal's microseconds
        would hide them.
        """
        self._counters.count(record)
        if self.log is not None:
            self.log(record)
        if self.usage_log is not None:
            self.usage_log(record)
        if self.watcher is not None:
            self.watcher(record)

    def attempt(self, backend: str, result: str) -> None:
        """Count one upstream attempt; `result` is an `AttemptResult`."""
        try:
            self._attempts.counts[backend, result] += 1
        except KeyError:  # not a configured name: those are there from the start
            self._attempts.add(self._counters.backend(backend), result)

    def fallback(self, reason: str) -> None:
        """Count a request routed on less than the whole truth; `reason` is a literal of the code."""
        self._counters.fallbacks.add("", reason)

    def admission(self, cls: str | None, result: str) -> None:
        """Count what admission said to a request; `result` is an `AdmissionResult`."""
        try:
            self._admissions.counts[cls, result] += 1  # type: ignore[index] # None: a KeyError
        except KeyError:  # not a configured name: those are there from the start
            self._admissions.add(self._counters.cls(cls), result)

    def refused(self, cls: str | None, code: str) -> None:
        """Count an error the gateway answers with itself; `code` is a `GatewayError`'s."""
        self._counters.errors.add(self._counters.cls(cls), code)

    def decided(self, seconds: float) -> None:
        """Note how long a request took from its last byte to its backend or its place in the queue."""
        self._decisions.observe(seconds)

    def reload(self, result: str) -> None:
        """Count a configuration reload: `ok` or `failed`."""
        self._counters.reloads.add("", result)

    def expect_handshakes(self) -> None:
        """Show every way in which a client's TLS handshake can end, from zero."""
        self._counters.handshakes.start([""])

    def handshake(self, result: str) -> None:
        """Count a client's TLS handshake; `result` is a `HandshakeResult`."""
        self._counters.handshakes.add("", result)

    def certificate(self, result: str) -> None:
        """Count changed certificate files: `ok` or `failed`."""
        self._counters.certificates.add("", result)

    def admin_refused(self, result: str) -> None:
        """Count a request to the admin listener without its key: `missing` or `wrong`."""
        self._counters.admin_refusals.add("", result)

    def loop_lag(self, seconds: float) -> None:
        """Note how late the event loop ran a timer."""
        self.lag.note(seconds)

    def collector_pause(self, seconds: float) -> None:
        """Note how long a run of the cycle collector took."""
        self.pauses.note(seconds)

    def render(self) -> bytes:
        """Return the Prometheus text page (format 0.0.4), the dispatcher's gauges read now."""
        return "".join(self.page.pieces()).encode() + self._process()

    async def scrape(self) -> bytes:
        """Return the same, without keeping the loop from its requests for more than about a millisecond.

        Each figure is the one of its own turn: two of them may be of moments some milliseconds apart.
        """
        done: list[bytes] = []
        pieces: list[str] = []
        turn_over = perf_counter() + _TURN_S
        for piece in self.page.pieces():
            pieces.append(piece)
            if perf_counter() >= turn_over:
                done.append("".join(pieces).encode())
                pieces.clear()
                await asyncio.sleep(0)
                turn_over = perf_counter() + _TURN_S
        done.append("".join(pieces).encode())
        # It lists /proc/self/fd: 10 ms for 15,000 descriptors.
        done.append(await asyncio.to_thread(self._process))
        return b"".join(done)

    def _process(self) -> bytes:
        """Return memory, CPU, files and garbage collection of the process."""
        return bytes(generate_latest(self._registry))
