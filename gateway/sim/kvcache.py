"""The paged KV cache of one simulated engine: who holds which block, and what is evicted next.

Follows vLLM's block pool: ref-counted blocks, only full blocks are shared, an idle block keeps its
content until its memory is needed, tails of a sequence go before heads. A cached block is known by
its chained hash alone; memory without a reusable content is only counted. Never reads a clock.
"""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.sim.journal import Journal


class BlockPool:
    """`total` blocks, each blank, idle (cached, unreferenced), shared (cached, held) or private.

    Private blocks hold an unfinished tail, or a second copy of a block somebody else published.
    """

    __slots__ = ("_idle", "_journal", "_refs", "blank", "private", "total")

    def __init__(self, total: int, journal: Journal | None = None) -> None:
        self.total = total
        self._journal = journal
        self.blank = total
        self.private = 0
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Return how many blocks could be taken now; idle cached ones count."""
        return self.blank + len(self._idle)

    @property
    def idle(self) -> int:
        """Return the cached blocks nobody holds."""
        return len(self._idle)

    @property
    def shared(self) -> int:
        """Return the cached blocks somebody holds."""
        return len(self._refs) - len(self._idle)

    @property
    def utilization(self) -> float:
        """Return the share of blocks in use, 0..1, as `vllm:kv_cache_usage_perc` counts it."""
        return 1.0 - self.free / self.total

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """Return how many leading blocks (at most `limit`) are cached, and how many of them idle."""
        refs = self._refs
        depth = idle = 0
        for block in hashes[:limit]:
            count = refs.get(block)
            if count is None:
                break
            depth += 1
            if not count:
                idle += 1
        return depth, idle

    def hold(self, hashes: Sequence[int]) -> None:
        """Reference cached blocks, as `match` found them."""
        refs, idle = self._refs, self._idle
        for block in hashes:
            count = refs[block]
            if not count:
                del idle[block]
            refs[block] = count + 1

    def take(self, count: int) -> None:
        """Turn `count` free blocks into private ones: blank ones first, then the oldest idle."""
        self.private += count
        evict = count - self.blank
        if evict <= 0:
            self.blank -= count
            return
        self.blank = 0
        for _ in range(evict):
            block = self._idle.popitem(last=False)[0]
            del self._refs[block]
            if self._journal is not None:
                self._journal.evicted(block)

    def publish(self, block: int) -> bool:
        """Make one private block of the caller shared under its hash; False = it exists already."""
        if block in self._refs:
            return False
        self._refs[block] = 1
        self.private -= 1
        return True

    def release(self, held: Sequence[int], private: int) -> None:
        """Give back a sequence's blocks (`held` in prefix order); its tail is evicted first."""
        refs, idle = self._refs, self._idle
        for block in reversed(held):
            count = refs[block] - 1
            refs[block] = count
            if not count:
                idle[block] = None
        self.private -= private
        self.blank += private

    def forget_idle(self) -> None:
        """Drop every cached block nobody holds (`/reset_prefix_cache`)."""
        for block in self._idle:
            del self._refs[block]
            if self._journal is not None and self._refs:
                self._journal.evicted(block)
        if self._journal is not None and not self._refs:
            self._journal.cleared()
        self.blank += len(self._idle)
        self._idle.clear()

    def counts(self) -> dict[int, int]:
        """Return a copy of the reference count of every cached block, for checks."""
        return dict(self._refs)
