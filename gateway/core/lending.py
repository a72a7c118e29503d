"""Class buckets that lend each other what would be lost: the refill of a full bucket.

What a full bucket has no room for flows into the borrowing classes' buckets, up to their own burst.
So a class that is idle lends all its refill, one that is busy lends nothing, and nobody has to give
anything back: an owner's bucket is never emptier than it would be alone. Must never add a token
that no class was configured to get.
"""

from collections.abc import Iterable

from gateway.core.bucket import Bucket
from gateway.core.settings import BucketSpec

# Less than this is lost in rounding rather than handed round once more.
_CRUMB_TOKENS = 1e-6


class ClassBucket(Bucket):
    """A class's bucket. `common` is where its overflow goes; None = it is lost."""

    __slots__ = ("common",)

    def __init__(self, spec: BucketSpec, now: float) -> None:
        super().__init__(spec, now)
        self.common: Common | None = None

    def available(self, now: float) -> float:
        """Return the level at `now`, what others lend included."""
        if self.common is None:
            return super().available(now)
        self.common.pour(now)
        return self.level

    def fill(self, now: float) -> float:
        """Take the own refill up to `now`; return what found no room."""
        level = super().available(now)
        earned = max(0.0, now - self.at) * self.spec.tokens_per_second
        over = max(0.0, self.level + earned - level)
        self.level = level
        self.at = max(self.at, now)
        return over

    @property
    def room(self) -> float:
        """Tokens it may still borrow."""
        return self.spec.burst_tokens - self.level if self.spec.borrow else 0.0


class Common:
    """The buckets that lend to each other."""

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Iterable[ClassBucket]) -> None:
        self._buckets = tuple(buckets)

    def pour(self, now: float) -> None:
        """Fill every bucket up to `now`, and the borrowers' with what is over, in equal parts."""
        over = 0.0
        for bucket in self._buckets:
            over += bucket.fill(now)
        while over > _CRUMB_TOKENS:
            takers = [bucket for bucket in self._buckets if bucket.room > _CRUMB_TOKENS]
            if not takers:
                return
            part = over / len(takers)
            for bucket in takers:
                taken = min(part, bucket.room)
                bucket.level += taken
                over -= taken


def connect(buckets: Iterable[ClassBucket]) -> None:
    """Let `buckets` lend to each other if any of them borrows; else let each stand alone."""
    all_of_them = list(buckets)
    common = Common(all_of_them) if any(b.spec.borrow for b in all_of_them) else None
    for bucket in all_of_them:
        bucket.common = common
