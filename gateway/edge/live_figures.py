"""What the requests that end while someone looks say of their classes: rates, waits, goodput.

Fed by `Telemetry.watcher`, read once per tick. Every table here has a cap; nothing is kept of a
request but its line. Must never hold a record beyond the tick that read it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from gateway.core.settings import Slo
from gateway.core.types import Decided, Outcome
from gateway.telemetry.record import RequestRecord

POINTS = 120  # of a sparkline: two minutes at one per second
WINDOW = 30  # ticks that the figures beside it cover
ROWS = 50  # recent requests shown
# Ended requests kept for one tick: more than a process ends in a second; 2.5 MB at the most.
_ENDED_MAX = 8192
# Waits kept per class and tick, evenly taken from more: 30 ticks of them sort in a millisecond.
_WAITS_MAX = 128

Point = tuple[float | None, float | None, float, float]
"""A tick of a class: mean TTFT in seconds, hit ratio, goodput and ended requests per second."""


@dataclass(slots=True)
class _Tally:
    """One tick of one class."""

    ended: int = 0
    good: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)

    def count(self, record: RequestRecord, slo: Slo) -> None:
        self.ended += 1
        self.good += within(record, slo)
        if record.ttft_s is not None:
            self.waits_s.append(record.ttft_s)
        if record.prompt_tokens and record.predicted_tokens is not None:
            hit = record.predicted_tokens if record.cached_tokens is None else record.cached_tokens
            self.prompt_tokens += record.prompt_tokens
            self.hit_tokens += hit

    def point(self, seconds: float) -> Point:
        waits = self.waits_s
        ttft = round(sum(waits) / len(waits), 4) if waits else None
        return (
            ttft,
            _ratio(self.hit_tokens, self.prompt_tokens),
            round(self.good / seconds, 2),
            round(self.ended / seconds, 2),
        )


@dataclass(slots=True)
class _Series:
    """A class's last ticks. `seconds` and `tallies` cover the window, `points` the sparkline."""

    points: deque[Point | None] = field(default_factory=lambda: deque(maxlen=POINTS))
    tallies: deque[tuple[float, _Tally]] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Figures:
    """The requests that ended since the watch began, by class and the last few one by one."""

    def __init__(self) -> None:
        self._ended: deque[RequestRecord] = deque(maxlen=_ENDED_MAX)
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self._series: dict[str, _Series] = {}
        self._since = self._ticked = 0.0
        self.note = self._ended.append  # the whole price of being watched, per request

    def begin(self, now: float) -> None:
        """Start a watch at `now`; what was seen by an earlier one stays, with a gap after it."""
        self._since = self._ticked = now
        self._ended.clear()
        for series in self._series.values():
            series.tallies.clear()
            series.points.append(None)

    def end(self) -> None:
        """Let go of what ended since the last tick: nobody will read it."""
        self._ended.clear()

    def tick(self, slos: Mapping[str, Slo], now: float) -> None:
        """Take in what ended since the last tick. `slos` names the classes there are."""
        seconds = max(1e-3, now - self._ticked)
        self._ticked = now
        self._series = {name: self._series.get(name) or _Series() for name in slos}
        tallies = {name: _Tally() for name in slos}
        ended, self._ended = self._ended, deque(maxlen=_ENDED_MAX)
        self.note = self._ended.append
        for record in ended:
            tally = tallies.get(record.cls or "")
            if tally is not None:
                tally.count(record, slos[record.cls or ""])
        classified = [record for record in ended if record.cls is not None]
        self._rows.extend(map(_ended_row, classified[-ROWS:]))
        for name, tally in tallies.items():
            series = self._series[name]
            series.points.append(tally.point(seconds))
            tally.waits_s = tally.waits_s[:: ceil(len(tally.waits_s) / _WAITS_MAX) or 1]
            series.tallies.append((seconds, tally))

    def points(self) -> dict[str, list[Point | None]]:
        """Return every class's sparkline; None = nobody looked."""
        return {name: list(series.points) for name, series in self._series.items()}

    def point(self, cls: str) -> Point | None:
        """Return a class's last point."""
        series = self._series.get(cls)
        return series.points[-1] if series is not None and series.points else None

    def recent(self, cls: str) -> dict[str, float | None]:
        """Return a class's figures over the window."""
        series = self._series.get(cls)
        window = [] if series is None else list(series.tallies)
        seconds = sum(part for part, _ in window)
        waits = sorted(wait for _, tally in window for wait in tally.waits_s)
        return {
            "ended_per_s": _rate(sum(tally.ended for _, tally in window), seconds),
            "goodput_per_s": _rate(sum(tally.good for _, tally in window), seconds),
            "hit_ratio": _ratio(
                sum(tally.hit_tokens for _, tally in window),
                sum(tally.prompt_tokens for _, tally in window),
            ),
            "ttft_p50_s": _rank(waits, 0.5),
            "ttft_p95_s": _rank(waits, 0.95),
        }

    def rows(self, latest: list[Decided]) -> list[dict[str, Any]]:
        """Return the last requests, the newest first: those that ended and those under way.

        `latest` are the last decisions. One made before the watch began may have ended since then
        unseen: its outcome is None, as is that of one under way, told apart by `running`.
        """
        ended = {row["id"]: row for row in self._rows}
        under_way = [
            _open_row(decided, running=decided.dispatched_at >= self._since)
            for decided in latest
            if (row := ended.get(decided.request_id)) is None
            or decided.dispatched_at > row["until"]
        ]
        # Where requests come fast the newest are all under way: half the rows tell how one ended.
        under_way = under_way[: max(ROWS // 2, ROWS - len(ended))]
        rows = under_way + list(ended.values())[len(under_way) - ROWS :]
        rows.sort(key=_received, reverse=True)
        return rows


def within(record: RequestRecord, slo: Slo) -> bool:
    """Return whether a request was served inside its class's targets."""
    if record.outcome is not Outcome.OK:
        return False
    if record.ttft_s is None:
        return True  # an answer without tokens: there is no first one to wait for
    if record.ttft_s > slo.ttft_s:
        return False
    gaps = record.used_completion_tokens - 1
    return not record.stream or gaps < 1 or (record.total_s - record.ttft_s) / gaps <= slo.tpot_s


def _ended_row(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "received": record.received_at,
        "until": record.received_at + record.total_s,
        "class": record.cls,
        "model": record.model,
        "backend": record.backend,
        "hit_tokens": record.predicted_tokens,
        "cached_tokens": record.cached_tokens,
        "prompt_tokens": record.prompt_tokens,
        "queue_s": record.queue_s,
        "ttft_s": record.ttft_s,
        "total_s": record.total_s,
        "outcome": record.outcome.value,
        "running": False,
    }


def _open_row(decided: Decided, *, running: bool) -> dict[str, Any]:
    return {
        "id": decided.request_id,
        "received": decided.dispatched_at,
        "class": decided.cls,
        "backend": decided.backend,
        "hit_tokens": decided.hit_tokens,
        "prompt_tokens": decided.prompt_tokens,
        "outcome": None,
        "running": running,
    }


def _received(row: dict[str, Any]) -> float:
    at: float = row["received"]
    return at


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds else None


def _ratio(part: int, whole: int) -> float | None:
    return round(min(1.0, part / whole), 4) if whole else None


def _rank(values: list[float], share: float) -> float | None:
    """Return the value of that rank (nearest) of rising values."""
    return round(values[max(0, ceil(share * len(values)) - 1)], 4) if values else None
