"""Which engines say that they hold which blocks: our hash -> the set of backends, as a bit mask.

A hash is chained with everything before it, and engines evict a sequence's tail before its head, so
how much of a prompt a backend holds is found by bisection: no tree, one table for all backends. It
answers for backends whose word is complete (`set_live`); the prefix trie answers for the others.

A cleared backend changes its bit, as in the trie: no lookup sees the old one, and its memory is
given back in slices. Must never read a clock, and never walk a whole backend in one call.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.core.kv_events import EngineHash
from gateway.core.lanes import Lanes
from gateway.core.trie import MAX_SLOTS

OWN_BLOCK_BYTES: Final = 110  # a table entry with its hash and mask; loadtest/bench_events.py
ENGINE_BLOCK_BYTES: Final = 130  # a table entry with the engine's hash and its meaning

Uneven = tuple[int, bytes, tuple[int, ...]]
"""Where block sizes differ: the hash before our next block, the ids in none yet, ours ended here."""

Meaning = int | Uneven | None
"""What an engine's hash stands for: one hash of ours, or `Uneven`.

None = it depends on more than tokens (media), so no prompt of ours can ever match it.
"""

Table = dict[EngineHash, Meaning]


class ExactIndex:
    """`live[model]` = (lanes, slots) of the backends that are exact for a model, as bit masks."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.live: dict[str, tuple[int, int]] = {}
        self._lanes = Lanes(MAX_SLOTS)
        self._lane_of: dict[int, int] = {}
        self._models: dict[int, frozenset[str]] = {}
        self._dying: list[tuple[int, list[Table]]] = []

    @property
    def bytes(self) -> int:
        """Estimated memory of the table, and of what was cleared and is not given back yet."""
        dying = sum(len(table) for _, tables in self._dying for table in tables)
        return len(self.masks) * OWN_BLOCK_BYTES + dying * ENGINE_BLOCK_BYTES

    # -- backends ---------------------------------------------------------------------------

    def take(self, slot: int) -> int:
        """Return a lane, the bit that stands for `slot` until it is given to `bury`."""
        lane = self._lane_of[slot] = self._lanes.take(slot)
        self._set_live()
        return lane

    def bury(self, slot: int, tables: Iterable[Table]) -> None:
        """Forget all that `slot` holds, at once; `tables` are what its engine told, ours now."""
        lane = self._lane_of.pop(slot)
        full = [table for table in tables if table]
        if full:
            self._lanes.retire(lane)
            self._dying.append((lane, full))
        else:
            self._lanes.free(lane)
        self._set_live()

    def set_live(self, slot: int, models: frozenset[str]) -> None:
        """Say for which models what `slot` tells is all it holds; for none, it is not looked up."""
        self._models[slot] = models
        if not models:
            del self._models[slot]
        self._set_live()

    def sweep(self, blocks: int) -> bool:
        """Give back up to `blocks` of what was buried; return whether more is left."""
        while self._dying and blocks > 0:
            lane, tables = self._dying[-1]
            table = tables[-1]
            gone: list[int] = []
            for _ in range(min(blocks, len(table))):
                gone.extend(ours(table.popitem()[1]))
                blocks -= 1
            self.shrink(lane, gone)
            if not table:
                tables.pop()
            if not tables:
                self._dying.pop()
                self._lanes.free(lane)
        return bool(self._dying)

    # -- blocks -----------------------------------------------------------------------------

    def extend(self, lane: int, hashes: Sequence[int]) -> None:
        """Note that a lane's backend holds these blocks."""
        masks = self.masks
        get = masks.get
        bit = 1 << lane
        for own in hashes:
            mask = get(own)
            masks[own] = bit if mask is None else mask | bit

    def shrink(self, lane: int, hashes: Iterable[int]) -> None:
        """Note that it no longer does."""
        masks = self.masks
        get = masks.get
        bit = 1 << lane
        for own in hashes:
            mask = get(own, 0)
            if mask == bit:
                del masks[own]
            elif mask & bit:
                masks[own] = mask ^ bit

    def lookup(self, hashes: "array[int]", lanes: int, most: int) -> list[tuple[int, int]]:
        """Return `(depth, mask)` pairs, depth rising: the slots in `mask` hold that many blocks.

        Of the first `most` blocks, and of the backends in `lanes`; those that hold none are in no
        mask.
        """
        end = min(most, len(hashes))
        get = self.masks.get
        first = get(hashes[0], 0) & lanes if end > 0 else 0
        if not first:
            return []
        held: list[tuple[int, int]] = []
        over = 0  # those whose depth is known
        last = get(hashes[end - 1], 0) & first
        # stretches still to be looked into: from a block, who holds it, to a block, who holds that
        open_ = [(1, first, end, last)] if last != first else []
        while open_:
            low, above, high, below = open_.pop()
            if high - low == 1:
                gone = above & ~(below | over)
                if gone:
                    over |= gone
                    held.append((low, gone))
                continue
            middle = (low + high) >> 1
            mask = get(hashes[middle - 1], 0) & above
            if mask != below:
                open_.append((middle, mask, high, below))
            if mask != above:
                open_.append((low, above, middle, mask))
        if last & ~over:
            held.append((end, last & ~over))
        return self._lanes.by_slot(held) if self._lanes.moved else held

    # -- inside -----------------------------------------------------------------------------

    def _set_live(self) -> None:
        live: dict[str, tuple[int, int]] = {}
        for slot, models in self._models.items():
            lane = self._lane_of.get(slot)
            if lane is None:
                continue
            for model in models:
                lanes, slots = live.get(model, (0, 0))
                live[model] = lanes | 1 << lane, slots | 1 << slot
        self.live = live


def ours(meaning: Meaning) -> tuple[int, ...]:
    """Return our blocks that an engine's block stands for."""
    if isinstance(meaning, int):
        return (meaning,)
    return () if meaning is None else meaning[2]


def covered(told: Sequence[tuple[int, int]], depth: int) -> int:
    """Return the slots that a lookup found to hold at least `depth` blocks."""
    slots = 0
    for deep, mask in told:
        if deep >= depth:
            slots |= mask
    return slots


def merge(
    trie: Sequence[tuple[int, int]],
    told: Sequence[tuple[int, int]],
    exact: int,
    recent: Sequence[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Return one lookup out of several: of slots in `exact` what was told, of others the trie's.

    `recent` overrules both for the slots in its masks (prompts under way). No slot is in two masks.
    """
    by_depth: dict[int, int] = {}
    ahead = 0
    for depth, mask in recent:
        ahead |= mask
        by_depth[depth] = by_depth.get(depth, 0) | mask
    for rows, keep in ((trie, ~(exact | ahead)), (told, exact & ~ahead)):
        for depth, mask in rows:
            if mask & keep:
                by_depth[depth] = by_depth.get(depth, 0) | mask & keep
    return sorted(by_depth.items())
