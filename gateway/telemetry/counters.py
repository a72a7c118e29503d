"""Flat counters whose label values come from the configuration, everything else folded to `other`.

Must never let a client add a series. Event loop only, so nothing here locks.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from gateway.core.types import Outcome
from gateway.telemetry.histogram import DECISIONS, FIRST_TOKENS, GAPS, SECONDS, Histogram
from gateway.telemetry.record import (
    AdmissionResult,
    AttemptResult,
    HandshakeResult,
    RequestRecord,
)

OTHER = "other"
"""The label value of everything that is not in the configuration."""

_OK = Outcome.OK  # a member costs a look-up in its class each time
_ROW_LABELS = ("class", "model", "backend")
_MAX_MODELS = 256
# Rows shown: 4 classes on 64 backends with 16 models each. Of more the models fold to `other`, so
# that the page of a fleet of LoRA ids stays one that Prometheus reads within its timeout.
_MAX_ROWS = 4096
_EAGER_PAIRS = 64  # histograms shown from zero; of more pairs only those that are used
_MAX_WORDS = 32  # distinct results or reasons per counter; the code uses fewer than ten of each


class Words:
    """A counter per (owner, word) whose words the code chooses; more than a few fold to `other`."""

    __slots__ = ("_known", "counts")

    def __init__(self, words: Iterable[str] = ()) -> None:
        # A set that keeps its order, and so the page's; plain text: a member is slow to print.
        self._known = dict.fromkeys(map(str, words))
        self.counts: dict[tuple[str, str], int] = {}

    def start(self, owners: Iterable[str]) -> None:
        """Show every known word of `owners` from zero, and forget all other owners."""
        kept = dict.fromkeys(owners)
        self.counts = {key: n for key, n in self.counts.items() if key[0] in kept}
        for owner in kept:
            for word in self._known:
                self.counts.setdefault((owner, word), 0)

    def add(self, owner: str, word: str) -> None:
        """Count `word` for `owner`."""
        if word not in self._known:
            if len(self._known) >= _MAX_WORDS:
                word = OTHER
            self._known[word] = None
        key = (owner, word)
        self.counts[key] = self.counts.get(key, 0) + 1


class Row:
    """The counters of one (class, model, backend); `tags` is its label set as the page shows it."""

    __slots__ = ("cached", "completion", "in_time", "outcomes", "predicted", "prompt", "tags")

    def __init__(self, key: tuple[str, str, str]) -> None:
        self.tags = labels(_ROW_LABELS, key)
        self.outcomes: dict[Outcome, int] = {}
        self.in_time = 0
        self.prompt = 0
        self.completion = 0
        self.predicted = 0
        self.cached = 0


class KeyRow:
    """What one API key used, and how its requests ended."""

    __slots__ = ("outcomes", "tokens")

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.tokens = dict.fromkeys(("prompt", "cached", "completion"), 0)

    def count(self, record: RequestRecord) -> None:
        """Add a finished request; one that never ran used nothing."""
        outcomes, tokens = self.outcomes, self.tokens
        outcomes[record.outcome] = outcomes.get(record.outcome, 0) + 1
        if record.ran:
            tokens["prompt"] += record.prompt_tokens or 0
            tokens["cached"] += record.cached_tokens or 0
            tokens["completion"] += record.used_completion_tokens


Names = tuple[str | None, str | None, str | None]
"""A request's class, model and backend, as it came."""

Target = tuple[float, float]
"""What a class is judged by: seconds to the first token, seconds per further token."""

Book = tuple[Row, Histogram, Histogram, Histogram, Target | None]
"""Where it is counted: row, then the histograms of whole requests, waits and first tokens."""

# Codes of errors that are refusals: shown from zero, so that the first one counts as an increase.
_REFUSALS = (
    "rate_limited",
    "insufficient_quota",
    "queue_full",
    "queue_timeout",
    "no_backend",
    "overloaded",
    "draining",
)


class Counters:
    """Every counter that requests move; the collector reads the public fields at scrape time.

    Histograms are keyed (class, model), rows (class, model, backend), words (owner, word).
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.keys: dict[str, KeyRow] = {}
        self.requests: dict[tuple[str, str], Histogram] = {}
        self.ttfts: dict[tuple[str, str], Histogram] = {}
        self.itls: dict[tuple[str, str], Histogram] = {}
        self.queues: dict[tuple[str, str], Histogram] = {}
        self.attempts = Words(AttemptResult)
        self.admissions = Words(AdmissionResult)
        self.errors = Words(_REFUSALS)
        self.fallbacks = Words()
        self.reloads = Words(("ok", "failed"))
        self.reloads.start([""])
        self.handshakes = Words(HandshakeResult)
        self.certificates, self.admin_refusals = Words(), Words()
        self.decisions = Histogram(DECISIONS)
        self.targets: dict[str, Target] = {}
        self._books: dict[Names, Book] = {}
        self._classes: frozenset[str] = frozenset()
        self._models: frozenset[str] = frozenset()
        self._backends: frozenset[str] = frozenset()

    def set_labels(
        self,
        classes: Iterable[str],
        models: Iterable[str],
        backends: Iterable[str],
        keys: Iterable[str] = (),
        targets: Mapping[str, Target] | None = None,
    ) -> None:
        """Take the configured names: series of names that left disappear, the rest go on.

        `targets` are what each class is judged by. Of very many models (a fleet's LoRA ids) the
        first 256 have a label of their own.
        """
        self._books.clear()
        self.keys = {name: self.keys.get(name) or KeyRow() for name in keys}
        self._classes = frozenset(classes)
        self._models = frozenset(islice(dict.fromkeys(models), _MAX_MODELS))
        self._backends = frozenset(backends)
        self.attempts.start(self._backends)
        self.admissions.start(self._classes)
        self.errors.start((*self._classes, OTHER))
        self.targets = dict(targets or {})
        self.rows = {key: row for key, row in self.rows.items() if self._known_row(*key)}
        for family in (self.requests, self.ttfts, self.itls, self.queues):
            for key in [key for key in family if not self._known_pair(*key)]:
                del family[key]
        if len(self._classes) * len(self._models) <= _EAGER_PAIRS:
            for cls in self._classes:
                for model in self._models:
                    self._start((cls, model))

    def pair(self, cls: str | None, model: str | None) -> tuple[str, str]:
        """Return the label values of a class and a model."""
        return (
            cls if cls is not None and cls in self._classes else OTHER,
            model if model is not None and model in self._models else OTHER,
        )

    def cls(self, name: str | None) -> str:
        """Return the label value of a class."""
        return name if name is not None and name in self._classes else OTHER

    def backend(self, name: str | None) -> str:
        """Return the label value of a backend."""
        return name if name is not None and name in self._backends else OTHER

    def count(self, record: RequestRecord) -> None:
        """Add a finished request to its row and, if it reached a backend, to the histograms."""
        backend, outcome = record.backend, record.outcome
        if record.key is not None and (used := self.keys.get(record.key)) is not None:
            used.count(record)
        names = (record.cls, record.model, backend)
        row, requests, queues, ttfts, target = self._books.get(names) or self._book(names)
        try:
            row.outcomes[outcome] += 1
        except KeyError:
            row.outcomes[outcome] = 1
        if backend is None:  # what never left is no prompt of anybody's
            return
        row.prompt += record.prompt_tokens or 0
        row.completion += record.completion_tokens or 0
        row.predicted += record.predicted_tokens or 0
        row.cached += record.cached_tokens or 0
        if target is not None and outcome is _OK and in_time(record, target):
            row.in_time += 1
        requests.observe(record.total_s)
        if record.queue_s:
            queues.observe(record.queue_s)
        else:
            queues.counts[0] += 1  # no wait
        if record.ttft_s is not None:
            ttfts.observe(record.ttft_s)

    def _book(self, names: Names) -> Book:
        """Return where requests of these names are counted, noted for the next one.

        Only configured names are noted: a client's inventions must not grow a table.
        """
        cls, model, backend = names
        pair = self.pair(cls, model)
        book = (
            self._row((*pair, self.backend(backend))),
            histogram(self.requests, pair, SECONDS),
            histogram(self.queues, pair, SECONDS),
            histogram(self.ttfts, pair, FIRST_TOKENS),
            self.targets.get(pair[0]),
        )
        if pair == (cls, model) and backend in self._backends:
            self._books[names] = book
        return book

    def _row(self, key: tuple[str, str, str]) -> Row:
        rows = self.rows
        row = rows.get(key)
        if row is None and len(rows) >= _MAX_ROWS:
            key = (key[0], OTHER, key[2])
            row = rows.get(key)
        if row is None:
            row = rows[key] = Row(key)
        return row

    def _known_pair(self, cls: str, model: str) -> bool:
        return (cls in self._classes or cls == OTHER) and (model in self._models or model == OTHER)

    def _known_row(self, cls: str, model: str, backend: str) -> bool:
        return self._known_pair(cls, model) and (backend in self._backends or backend == OTHER)

    def _start(self, pair: tuple[str, str]) -> None:
        for family in (self.requests, self.queues):
            histogram(family, pair, SECONDS)
        histogram(self.ttfts, pair, FIRST_TOKENS)
        histogram(self.itls, pair, GAPS)


def in_time(record: RequestRecord, target: Target) -> bool:
    """Return whether a good answer kept to `target`.

    One that came whole has no first token to look at: all of it must be there when its last was due.
    """
    ttft_s, tpot_s = target
    tokens, first_s = record.used_completion_tokens, record.ttft_s
    if first_s is None or not record.stream:
        return record.total_s <= ttft_s + tpot_s * tokens
    return first_s <= ttft_s and (tokens < 2 or record.total_s - first_s <= tpot_s * (tokens - 1))


def histogram(
    family: dict[tuple[str, str], Histogram], pair: tuple[str, str], bounds: tuple[float, ...]
) -> Histogram:
    """Return `family[pair]`, made on first use."""
    found = family.get(pair)
    if found is None:
        found = family[pair] = Histogram(bounds)
    return found


def labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return `{name="value",...}`, escaped."""
    pairs = [f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
