"""What an API key may use: tokens and requests per minute, tokens per day, streams at once.

Keys are known by their configured name only. A key without limits has no entry here and costs
nothing. Must never hold a secret, or refuse for ever what waiting would allow.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gateway.core.bucket import Bucket
from gateway.core.settings import BucketSpec, KeySpec

_MINUTE_S = 60.0
DAY_S = 86_400.0


class Level(NamedTuple):
    """How much of a minute's limit is left, and the seconds until all of it is back."""

    limit: int
    left: int
    reset_s: float


class Standing(NamedTuple):
    """What a key has left this minute; None = not limited."""

    requests: Level | None
    tokens: Level | None


class Quota:
    """Tokens of a day that do not come back before it is over; reserved and settled like a bucket's.

    A day begins with the first use after the last one ended.
    """

    __slots__ = ("ends_at", "limit", "used")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.used = 0.0
        self.ends_at = now + DAY_S

    def reserve(self, tokens: float, now: float) -> float:
        """Take `tokens` and return 0, or take nothing and return the seconds until the day ends.

        The last request of a day may go over the limit: what it will use is only an estimate.
        """
        if now >= self.ends_at:
            self.used = 0.0
            self.ends_at = now + DAY_S
        if self.used >= self.limit:
            return self.ends_at - now
        self.used += tokens
        return 0.0

    def wait_s(self, tokens: float, now: float) -> float:  # noqa: ARG002 - as Bucket's
        """Return the seconds until the day ends if nothing is left of it, else 0."""
        return 0.0 if now >= self.ends_at or self.used < self.limit else self.ends_at - now

    def settle(self, reserved: float, used: float, now: float) -> None:  # noqa: ARG002 - as Bucket's
        """Replace an earlier reservation by what was used."""
        self.used = max(0.0, self.used + used - reserved)


class KeyBooks:
    """One key's buckets, its quota and its streams; `line` is where its surplus streams wait."""

    __slots__ = ("line", "quota", "requests", "spec", "streams", "tokens")

    def __init__(self, spec: KeySpec, line: int, now: float) -> None:
        self.line = line
        self.streams = 0
        self.tokens: Bucket | None = None
        self.requests: Bucket | None = None
        self.quota: Quota | None = None
        self.apply(spec, now)

    def apply(self, spec: KeySpec, now: float) -> None:
        """Take new limits; what was spent stays spent."""
        self.spec = spec
        self.tokens = _per_minute(spec.tokens_per_minute, self.tokens, now)
        self.requests = _per_minute(spec.requests_per_minute, self.requests, now)
        if spec.tokens_per_day is None:
            self.quota = None
        elif self.quota is None:
            self.quota = Quota(spec.tokens_per_day, now)
        else:
            self.quota.limit = spec.tokens_per_day

    def begin(self, now: float) -> float:
        """Count one request and return 0, or count nothing and return the seconds to wait."""
        return 0.0 if self.requests is None else self.requests.reserve(1.0, now)

    def withdraw(self, now: float) -> None:
        """Take back what `begin` counted: the request was refused for another reason."""
        if self.requests is not None:
            self.requests.settle(1.0, 0.0, now)

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until `tokens` could be reserved from the minute's."""
        return 0.0 if self.tokens is None else self.tokens.wait_s(tokens, now)

    def standing(self, now: float) -> Standing:
        """Return what is left of the minute's limits."""
        return Standing(_level(self.requests, now), _level(self.tokens, now))

    @property
    def full(self) -> bool:
        """Whether another stream has to wait for the end of one."""
        return self.spec.streams is not None and self.streams >= self.spec.streams


class Keys:
    """The keys that have limits, by name."""

    def __init__(self, specs: Iterable[KeySpec], now: float) -> None:
        self._books: dict[str, KeyBooks] = {}
        self._lines = 1
        self.apply(specs, now)

    def apply(self, specs: Iterable[KeySpec], now: float) -> None:
        """Take new limits; keys that stay keep what they have spent."""
        old, self._books = self._books, {}
        for spec in specs:
            books = old.get(spec.name)
            if books is not None:
                books.apply(spec, now)
            elif spec.limited:
                self._lines += 1
                books = KeyBooks(spec, -self._lines, now)
            if books is not None:
                self._books[spec.name] = books
        for name, books in old.items():  # a key that is gone has its streams, and those that wait
            if name not in self._books and books.streams:
                books.apply(KeySpec(name), now)
                self._books[name] = books

    def get(self, name: str | None) -> KeyBooks | None:
        """Return the books of a key; None for one that never had a limit."""
        return None if name is None else self._books.get(name)

    def all(self) -> list[KeyBooks]:
        """Return the books of every key that has any."""
        return list(self._books.values())


def _level(bucket: Bucket | None, now: float) -> Level | None:
    if bucket is None:
        return None
    spec, available = bucket.spec, bucket.available(now)
    missing = max(0.0, spec.burst_tokens - available)
    return Level(int(spec.burst_tokens), max(0, int(available)), missing / spec.tokens_per_second)


def _per_minute(limit: int | None, before: Bucket | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    spec = BucketSpec(limit / _MINUTE_S, float(limit))
    if before is None:
        return Bucket(spec, now)
    before.resize(spec, now)
    return before
