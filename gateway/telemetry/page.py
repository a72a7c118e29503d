"""Writes the `/metrics` page: the flat counters and the dispatcher's state, read at scrape time.

The text is written directly because a scrape runs on the event loop: prometheus_client's writer takes
18 ms for 64 backends and 4 classes. It comes in pieces, between which the loop may serve requests
(`metrics.Telemetry.scrape`); a table that changes meanwhile is read as it was when its turn began.
Must never cost a request anything.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from gateway.core.shadow import Tally
from gateway.core.types import BackendStatus, ClassStatus, Outcome
from gateway.telemetry import families as f
from gateway.telemetry.backend_families import BACKENDS, FOLLOWED
from gateway.telemetry.counters import Counters, Words, labels
from gateway.telemetry.family import Family
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.lag import LagWindow

_ROWS_PER_PIECE = 64
_ODD = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_OUTCOME_TAGS = {outcome: f',outcome="{outcome.value}"}} ' for outcome in Outcome}


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


class SourceStatus(Protocol):
    """How a listing of backends does."""

    @property
    def name(self) -> str:
        """Return the listing's configured name."""

    @property
    def kind(self) -> str:
        """Return how it is read: dns, srv, file or kubernetes."""

    @property
    def backends(self) -> int:
        """Return how many it has."""

    @property
    def failing(self) -> bool:
        """Return whether the last look failed."""

    @property
    def failures(self) -> int:
        """Return how many looks failed."""


class Page:
    """Renders what it was handed; `clock` gives monotonic seconds.

    `losses` returns what each file of the gateway's could not take, for those that are written;
    `sources` how each listing of backends does, for those that are not fixed; `certificates` side,
    backend and Unix time of the end of each that is shown to others.
    """

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
        self.losses: Callable[[], Mapping[str, int]] = dict
        self.sources: Callable[[], Iterable[SourceStatus]] = tuple
        self.certificates: Callable[[], Iterable[tuple[str, str, float]]] = tuple
        self._info = labels(("version", "python"), (version, platform.python_version()))

    def pieces(self) -> Iterator[str]:
        """Yield the page in pieces of whole lines, each well under a millisecond's work.

        All but one: the figures of the backends, 1.5 ms for 64.
        """
        yield from self._rows()
        if self._counters.keys:
            yield from self._keys()
        yield from self._histograms()
        yield from self._words()
        yield from self._gauges()
        if (tally := self._source.shadow) is not None:
            yield _shadow(tally)

    def _rows(self) -> Iterator[str]:
        rows = list(self._counters.rows.values())
        slices = [rows[i : i + _ROWS_PER_PIECE] for i in range(0, len(rows), _ROWS_PER_PIECE)]
        name = f.REQUESTS.name
        yield f.REQUESTS.head
        for some in slices:
            yield "".join(
                [
                    f"{name}{row.tags[:-1]}{_OUTCOME_TAGS[outcome]}{count}\n"
                    for row in some
                    for outcome, count in row.outcomes.items()
                ]
            )
        for family, read in f.ROWS:
            yield family.head
            for some in slices:
                yield "".join([f"{family.name}{row.tags} {read(row)}\n" for row in some])

    def _keys(self) -> Iterator[str]:
        """Write what each configured key used; absent without keys."""
        rows = [(labels(("key",), (name,))[:-1], row) for name, row in self._counters.keys.items()]
        name = f.KEY_TOKENS.name
        yield f.KEY_TOKENS.head
        for tags, row in rows:
            yield "".join([f'{name}{tags},kind="{k}"}} {n}\n' for k, n in row.tokens.items()])
        name = f.KEY_REQUESTS.name
        yield f.KEY_REQUESTS.head
        for tags, row in rows:
            yield "".join([f"{name}{tags}{_OUTCOME_TAGS[o]}{n}\n" for o, n in row.outcomes.items()])

    def _histograms(self) -> Iterator[str]:
        had = self._counters
        for family, found in (
            (f.REQUEST_SECONDS, had.requests),
            (f.TTFT_SECONDS, had.ttfts),
            (f.ITL_SECONDS, had.itls),
            (f.QUEUE_SECONDS, had.queues),
        ):
            yield family.head
            for pair, histogram in list(found.items()):
                yield _histogram(family.name, labels(family.labels, pair), histogram)
        yield f.DECISION_SECONDS.head + _histogram(f.DECISION_SECONDS.name, "", had.decisions)

    def _words(self) -> Iterator[str]:
        had = self._counters
        for family, words in (
            (f.ADMISSIONS, had.admissions),
            (f.ERRORS, had.errors),
            (f.ATTEMPTS, had.attempts),
            (f.FALLBACKS, had.fallbacks),
            (f.RELOADS, had.reloads),
        ):
            yield _words(family, words)
        for family, words in (
            (f.HANDSHAKES, had.handshakes),
            (f.CERTIFICATES, had.certificates),
        ):
            if words.counts:
                yield _words(family, words)
        if ends := [
            (labels(f.CERTIFICATE_ENDS.labels, key), at) for *key, at in self.certificates()
        ]:
            yield _table(f.CERTIFICATE_ENDS, ends)
        if had.admin_refusals.counts:
            yield _words(f.ADMIN_REFUSALS, had.admin_refusals)

    def _gauges(self) -> Iterator[str]:
        now, source = self._clock(), self._source
        backends = [(labels(("backend",), (b.name,)), b) for b in source.backends(now)]
        yield ""  # that took the longest
        for family, read in BACKENDS:
            yield _table(family, [(tags, read(backend)) for tags, backend in backends])
        followed = [(tags, b.kv_events) for tags, b in backends if b.kv_events.mode != "off"]
        for family, read_events in FOLLOWED if followed else ():
            yield _table(family, [(tags, read_events(events)) for tags, events in followed])
        classes = [(labels(("class",), (c.name,)), c) for c in source.classes(now)]
        for family, read_class in f.CLASSES:
            yield _table(family, [(tags, read_class(status)) for tags, status in classes])
        yield _table(f.SLO, self._targets())
        yield _table(f.POOL, [(labels(("model",), (name,)), full) for name, full in self._pools()])
        yield self._found()
        yield _table(f.INDEX_BYTES, [("", source.index_bytes)])
        yield _table(f.LOOP_LAG, [("", self._lag.worst_s)])
        yield _table(f.COLLECTOR_PAUSE, [("", self._pauses.worst_s)])
        if losses := self.losses():
            yield _table(f.LOSSES, [(labels(("file",), (k,)), n) for k, n in losses.items()])
        yield _table(f.BUILD_INFO, [(self._info, 1)])

    def _found(self) -> str:
        """Write how listings do; those of one name are one series, or the page would be invalid."""
        rows: dict[tuple[str, str], list[int]] = {}
        for one in self.sources():
            row = rows.setdefault((one.name, one.kind), [0, 0, 0])
            row[0] += one.backends
            row[1] |= one.failing
            row[2] += one.failures
        tagged = [(labels(f.FOUND.labels, key), row) for key, row in rows.items()]
        families = (f.FOUND, f.FINDING_FAILS, f.FINDING_FAILED) if rows else ()
        return "".join(
            _table(family, [(tags, row[i]) for tags, row in tagged])
            for i, family in enumerate(families)
        )

    def _targets(self) -> list[tuple[str, float]]:
        return [
            (labels(f.SLO.labels, (cls, target)), seconds)
            for cls, both in self._counters.targets.items()
            for target, seconds in zip(("ttft", "tpot"), both, strict=True)
        ]

    def _pools(self) -> Iterator[tuple[str, float]]:
        """Yield the models that have a label of their own."""
        for model, value in self._source.pools():
            if self._counters.pair(None, model)[1] == model:
                yield model, value


def number(value: float) -> str:
    """Return a sample value as Prometheus reads it."""
    text = repr(value)
    return _ODD.get(text, text)


def _table(family: Family, rows: Sequence[tuple[str, float]]) -> str:
    name = family.name
    return family.head + "".join([f"{name}{tags} {number(value)}\n" for tags, value in rows])


def _words(family: Family, words: Words) -> str:
    name, names = family.name, family.labels
    if len(names) == 1:
        lines = [f'{name}{{{names[0]}="{word}"}} {n}\n' for (_, word), n in words.counts.items()]
        return family.head + "".join(lines)
    owners = dict.fromkeys(owner for owner, _ in words.counts)
    tags = {owner: labels(names[:1], (owner,))[:-1] for owner in owners}
    second = names[1]
    return family.head + "".join(
        [
            f'{name}{tags[owner]},{second}="{word}"}} {count}\n'
            for (owner, word), count in words.counts.items()
        ]
    )


def _shadow(tally: Tally) -> str:
    """Write how a second policy would have decided; absent without `routing.shadow`."""

    def rows(**values: float) -> list[tuple[str, float]]:
        return [
            (labels(("policy", "result"), (tally.policy, result)), value)
            for result, value in values.items()
        ]

    decisions = rows(same=tally.same, different=tally.different)
    seconds = rows(saved=tally.saved_s, lost=tally.lost_s)
    return _table(f.SHADOW_DECISIONS, decisions) + _table(f.SHADOW_SECONDS, seconds)


def _histogram(name: str, tags: str, histogram: Histogram) -> str:
    open_tags, count = tags[:-1] + "," if tags else "{", 0
    lines = []
    for le, (_, count) in zip(_les(histogram.bounds), histogram.cumulative(), strict=True):
        lines.append(f"{name}_bucket{open_tags}{le}{count}\n")
    lines.append(f"{name}_count{tags} {count}\n{name}_sum{tags} {number(histogram.total)}\n")
    return "".join(lines)


@lru_cache(maxsize=8)
def _les(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the `le` label of each bucket, to the end of the label set."""
    return (*(f'le="{number(bound)}"}} ' for bound in bounds), 'le="+Inf"} ')
