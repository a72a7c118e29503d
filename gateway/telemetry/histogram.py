"""A histogram cheap enough to observe once per streamed chunk.

Counts live in a flat list that only the scrape accumulates. Must never allocate in `observe`: it
runs tens of thousands of times a second on the event loop.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import inf

# Prometheus draws a straight line within a bucket, so a percentile is off by at most the bucket it
# falls into. Neighbours are therefore close (at most 1.7 times) where an answer is judged, and wide
# where it is only "much too late"; every bound costs a series per class and model.

SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds for waits and whole requests: the usual `max_wait_s` 5 and 30, and on to the longest answers."""

FIRST_TOKENS = (
    0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 30.0,
    60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds for TTFT: a cached prompt takes 0.03 to 0.15 s, a cold coding prompt of 40,000 tokens 2 to 5;
1 and 5 s, the targets people set for chat and for agents, are bounds, so shares of them are exact."""

GAPS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25,
    0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Bounds for ITL: a decode step takes 5 to 50 ms, and the usual TPOT targets 0.05 and 0.1 s are bounds.
Below: chunks that came together. Above: stalls behind another request's prefill, a second and more."""

DECISIONS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Bounds for decisions: 0.1 ms for a short chat, 0.5 for 100,000 tokens known; over 0.01 is trouble."""


class Histogram:
    """Counts per bucket and their sum. `counts[i]` belongs to `(bounds[i-1], bounds[i]]`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must rise")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count `value`; a value on a bound belongs to the bucket below it, as Prometheus has it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values at once."""
        counts, bounds = self.counts, self.bounds
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    @property
    def count(self) -> int:
        """Return how many values were observed."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield (upper bound, values at or below it), ending with infinity."""
        running = 0
        for bound, count in zip(self._all_bounds(), self.counts, strict=True):
            running += count
            yield bound, running

    def _all_bounds(self) -> Iterable[float]:
        yield from self.bounds
        yield inf


def quantiles(histograms: Sequence[Histogram], shares: Sequence[float]) -> list[float | None]:
    """Return the values below which `shares` of all observations lie; None without any.

    Linear within a bucket, and at most the last bound, as Prometheus's histogram_quantile has it.
    All histograms must have the same bounds.
    """
    counts = [sum(column) for column in zip(*(one.counts for one in histograms), strict=True)]
    total = sum(counts)
    if not total:
        return [None] * len(shares)
    bounds = histograms[0].bounds
    return [_quantile(bounds, counts, share * total) for share in shares]


def _quantile(bounds: Sequence[float], counts: Sequence[int], rank: float) -> float:
    below = 0.0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):  # what is beyond the last has no bound
        if count and below + count >= rank:
            return lower + (bound - lower) * max(0.0, rank - below) / count
        below += count
        lower = bound
    return bounds[-1]
