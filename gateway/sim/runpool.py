"""The paged KV cache of one simulated engine, kept as runs of blocks: equal to `kvcache.BlockPool`.

A 40k-token prompt is 2,500 blocks but a dozen runs, and a simulation touches it at every turn. The
same rules hold block by block: ref counts, idle blocks keep their content until memory is needed,
tails go before heads. Hashes are chained, so a block's hash fixes its position and all before it:
a run is found by the hash of its first block alone. Never reads a clock.
"""

from collections import OrderedDict
from collections.abc import Sequence

Span = tuple[int, int]
"""Blocks [first, second) of a chain."""


class Run:
    """Blocks [start, end) of the chain `src`, all held by the same sequences."""

    __slots__ = ("end", "refs", "src", "start")

    def __init__(self, src: Sequence[int], start: int, end: int, refs: int) -> None:
        self.src = src
        self.start = start
        self.end = end
        self.refs = refs


class Match:
    """The leading blocks of a chain that are cached: `depth`, how many of them `idle`, the runs."""

    __slots__ = ("depth", "idle", "runs")

    def __init__(self) -> None:
        self.depth = 0
        self.idle = 0
        self.runs: list[tuple[Run, int]] = []  # and up to which block each is matched


class RunPool:
    """`total` blocks, each blank, idle (cached, unreferenced), shared (cached, held) or private.

    A chain that is handed in must keep its content for as long as the pool exists; it may be
    longer than what is asked about.
    """

    __slots__ = ("_heads", "_idle", "blank", "idle", "private", "shared", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.blank = total
        self.private = 0
        self.shared = 0
        self.idle = 0
        self._heads: dict[int, Run] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Return how many blocks could be taken now; idle cached ones count."""
        return self.blank + self.idle

    @property
    def utilization(self) -> float:
        """Return the share of blocks in use, 0..1."""
        return 1.0 - (self.blank + self.idle) / self.total

    def match(self, hashes: Sequence[int], limit: int) -> Match:
        """Return what is cached of the first `limit` blocks."""
        found = Match()
        limit = min(limit, len(hashes))
        heads = self._heads
        at = 0
        while at < limit:
            run = heads.get(hashes[at])
            if run is None:
                break
            start, at = at, _common(run, hashes, limit)
            found.runs.append((run, at))
            if not run.refs:
                found.idle += at - start
        found.depth = at
        return found

    def hold(self, found: Match) -> None:
        """Reference what `match` found; nothing may have been taken or published since."""
        for run, upto in found.runs:
            held = run if upto == run.end else self._split(run, upto)
            size = held.end - held.start
            if not held.refs:
                self._idle.pop(held, None)
                self.idle -= size
                self.shared += size
            held.refs += 1

    def take(self, count: int) -> None:
        """Turn `count` free blocks into private ones: blank ones first, then the oldest idle."""
        self.private += count
        evict = count - self.blank
        if evict <= 0:
            self.blank -= count
            return
        self.blank = 0
        self.idle -= evict
        idle = self._idle
        while evict:
            run = next(iter(idle))
            size = run.end - run.start
            if size > evict:
                run.end -= evict
                return
            evict -= size
            del idle[run]
            del self._heads[run.src[run.start]]

    def publish(self, hashes: Sequence[int], book: "Holding", upto: int) -> None:
        """Cache the blocks of `book` up to `upto` that no one has cached; they become shared."""
        heads = self._heads
        at = book.published
        while at < upto:
            twin = self._twin(hashes, book, at)
            if twin is not None:
                if book.twin_from < 0:
                    book.twin_from = at
                at = _common(twin, hashes, upto)
                continue
            end = at + 1
            if heads.keys().isdisjoint(hashes[end:upto]):
                end = upto
            else:
                while hashes[end] not in heads:
                    end += 1
            self._add(hashes, book, at, end)
            at = end
        book.published = at

    def release(self, hashes: Sequence[int], book: "Holding") -> None:
        """Give back all that `book` holds; its tail is evicted first."""
        heads, idle = self._heads, self._idle
        for start, end in reversed(book.spans):
            runs = []
            at = start
            while at < end:
                run = heads[hashes[at]]
                runs.append(run)
                at = run.end
            for run in reversed(runs):
                run.refs -= 1
                if not run.refs:
                    idle[run] = None
                    size = run.end - run.start
                    self.idle += size
                    self.shared -= size
        self.private -= book.private
        self.blank += book.private
        book.clear()

    def _add(self, hashes: Sequence[int], book: "Holding", start: int, end: int) -> None:
        """Make the private blocks [start, end) of `book` a run of its own, or part of its last."""
        book.twin_from = -1
        book.private -= end - start
        self.private -= end - start
        self.shared += end - start
        spans = book.spans
        joins = bool(spans) and spans[-1][1] == start
        last = book.last
        if joins and last is not None and last.end == start and last.refs == 1:
            last.end = end
        else:
            book.last = self._heads[hashes[start]] = Run(hashes, start, end, 1)
        if joins:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))

    def _twin(self, hashes: Sequence[int], book: "Holding", at: int) -> Run | None:
        """Return the run that caches block `at` for somebody else.

        It begins there, unless the blocks before were cached by somebody else as well and its
        owner has gone on: then the runs since the first of those are walked.
        """
        heads = self._heads
        run = heads.get(hashes[at])
        start = book.twin_from
        if run is not None or start < 0:
            return run
        while start < at:
            run = heads.get(hashes[start])
            if run is None:
                start += 1
                continue
            start = _common(run, hashes, at + 1)
            if start > at:
                return run
        return None

    def _split(self, run: Run, at: int) -> Run:
        """Cut the blocks before `at` off the front of `run`; return the new run of them.

        `run` keeps its place in the order of eviction; the new one is about to be held.
        """
        top = Run(run.src, run.start, at, run.refs)
        self._heads[run.src[run.start]] = top
        run.start = at
        self._heads[run.src[at]] = run
        return top


class Holding:
    """What one sequence has of the pool: cached `spans` of its chain, and `private` blocks.

    `published` = how far its chain has been offered to the cache. `twin_from` >= 0: since that
    block, somebody else's copies are the cached ones. `last` = the run it made last.
    """

    __slots__ = ("last", "private", "published", "spans", "twin_from")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.spans: list[Span] = []
        self.private = 0
        self.published = 0
        self.twin_from = -1
        self.last: Run | None = None


def _common(run: Run, hashes: Sequence[int], limit: int) -> int:
    """Return up to which block `run` agrees with the chain; at most `limit`, at least one block."""
    src = run.src
    end = run.end if run.end < limit else limit  # noqa: FURB136 - the inner loop of a simulation
    if src is hashes or src[end - 1] == hashes[end - 1]:
        return end
    low = run.start + 1
    high = end - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if src[middle - 1] == hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
