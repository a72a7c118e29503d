"""Per-class books: the spec, the token bucket, and how many were admitted and refused.

Reservations live as long as their ticket and are settled in the bucket they were taken from, even
when a reload has replaced it meanwhile.
"""

from typing import Protocol

from gateway.core.classify import Classifier
from gateway.core.lending import ClassBucket, connect
from gateway.core.settings import ClassSpec
from gateway.core.types import Finish, Outcome, Ticket


class Reservable(Protocol):
    """A token bucket or a quota."""

    def reserve(self, tokens: float, now: float) -> float:
        """Take `tokens` and return 0, or take nothing and return the seconds to wait."""
        ...

    def settle(self, reserved: float, used: float, now: float) -> None:
        """Replace an earlier reservation by what was used."""
        ...

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until `tokens` could be reserved; 0 = at once."""
        ...


class ClassBooks:
    """One traffic class."""

    __slots__ = ("admitted", "bucket", "rejected", "spec")

    def __init__(self, spec: ClassSpec, bucket: ClassBucket | None) -> None:
        self.spec = spec
        self.bucket = bucket
        self.admitted = 0
        self.rejected = 0


class Classes:
    """All classes, their buckets and the reservations of live tickets."""

    def __init__(self, specs: tuple[ClassSpec, ...], now: float) -> None:
        self._reserved: dict[int, tuple[Reservable, ...]] = {}
        self._books: dict[str, ClassBooks] = {}
        self.classifier = Classifier(specs)
        self.apply(specs, now)

    def apply(self, specs: tuple[ClassSpec, ...], now: float) -> None:
        """Take new classes; a bucket that stays keeps what was spent from it."""
        self.classifier = Classifier(specs)
        old = self._books
        self._books = {}
        for spec in specs:
            before = old.get(spec.name)
            self._books[spec.name] = entry = ClassBooks(spec, _bucket(spec, before, now))
            if before is not None:
                entry.admitted = before.admitted
                entry.rejected = before.rejected
        connect(books.bucket for books in self._books.values() if books.bucket is not None)

    @property
    def specs(self) -> tuple[ClassSpec, ...]:
        """The classes' settings in configured order."""
        return tuple([books.spec for books in self._books.values()])

    def all(self) -> list[ClassBooks]:
        """Return every class in configured order."""
        return list(self._books.values())

    def named(self, name: str) -> ClassBooks:
        """Return the class called `name`, or the default one if a reload has removed it."""
        books = self._books.get(name)
        return self._books[self.classifier.default] if books is None else books

    def reserved(self) -> int:
        """Return how many live tickets hold a reservation."""
        return len(self._reserved)

    def hold(self, ticket: Ticket, taken: tuple[Reservable, ...]) -> None:
        """Remember where `ticket` took its reservation from."""
        self._reserved[ticket.id] = taken

    def give_back(self, ticket: Ticket, now: float) -> None:
        """Return a reservation whole: its ticket was refused after all."""
        for bucket in self._reserved.pop(ticket.id, ()):
            bucket.settle(ticket.reserved_tokens, 0.0, now)

    def settle(self, ticket: Ticket, finish: Finish, now: float) -> None:
        """Replace the ticket's reservation, if it has one, by what it used."""
        taken = self._reserved.pop(ticket.id, None)
        if taken is not None:
            used = used_tokens(ticket, finish)
            for bucket in taken:
                bucket.settle(ticket.reserved_tokens, used, now)


def used_tokens(ticket: Ticket, finish: Finish) -> float:
    """Return the uncached prompt tokens and output tokens an ended request really cost.

    One that failed, or was refused after all, before anything came back cost nothing; one whose
    client left then has cost the prompt.
    """
    if not finish.prefilled and ticket.first_token_at is None:
        # a client that leaves early does not stop the prefill in time: it would compute for free
        left = finish.outcome is Outcome.CLIENT_CLOSED and finish.sent
        return float(ticket.uncached_tokens) if left else 0.0
    usage = finish.usage
    uncached = float(ticket.uncached_tokens)
    if usage.prompt_tokens is not None:
        cached = ticket.hit_tokens if usage.cached_tokens is None else usage.cached_tokens
        uncached = float(max(0, usage.prompt_tokens - cached))
    output = finish.chunks if usage.completion_tokens is None else usage.completion_tokens
    return uncached + output


def _bucket(spec: ClassSpec, before: ClassBooks | None, now: float) -> ClassBucket | None:
    if spec.bucket is None:
        return None
    if before is None or before.bucket is None:
        return ClassBucket(spec.bucket, now)
    before.bucket.resize(spec.bucket, now)
    return before.bucket
