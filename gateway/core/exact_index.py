"""Which engines say that they hold which blocks: stretches of our hashes with the same holders.

A hash is chained with everything before it, so blocks that follow each other and have the same
holders are one entry, found by any of its blocks: a lookup takes one step for each change of holders
on its way, not for each block, and what an event changes is moved over the border of two stretches. It
answers for backends whose word is complete (`set_live`); the prefix trie answers for the others.

A cleared backend changes its bit, as in the trie: no lookup sees the old one, and its memory is
given back in slices. Must never read a clock, and never walk a whole backend in one call.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeGuard

from gateway.core.kv_events import EngineHash
from gateway.core.lanes import Lanes
from gateway.core.runs import common
from gateway.core.trie import MAX_SLOTS

OWN_BLOCK_BYTES: Final = 65  # a table entry and a place in a stretch; loadtest/bench_events.py
ENGINE_BLOCK_BYTES: Final = 140  # a table entry with the engine's hash and its meaning

MOST_BLOCKS: Final = 256
"""In one stretch: a block lost in the middle of it takes 15 us, and a step of events has 64."""

Uneven = tuple[int, bytes, tuple[int, ...]]
"""Where block sizes differ: the hash before our next block, the ids in none yet, ours ended here."""

Meaning = int | Uneven | None
"""What an engine's hash stands for: one hash of ours, or `Uneven`.

None = it depends on more than tokens (media), so no prompt of ours can ever match it.
"""

Table = dict[EngineHash, Meaning]


class Stretch:
    """Blocks that follow each other and have the same holders, the lanes in `mask`. Never empty.

    `before` = our block before the first, None = not known. `below` = the stretch that took the
    last block cut off the end: the next one belongs there too if that still follows.
    """

    __slots__ = ("before", "below", "blocks", "mask")

    def __init__(self, blocks: "array[int]", mask: int, before: int | None) -> None:
        self.blocks = blocks
        self.mask = mask
        self.before = before
        self.below: Stretch | None = None


class ExactIndex:
    """`live[model]` = (lanes, slots) of the backends that are exact for a model, as bit masks."""

    def __init__(self) -> None:
        self.stretches: dict[int, Stretch] = {}  # by each of their blocks
        self.live: dict[str, tuple[int, int]] = {}
        self._lanes = Lanes(MAX_SLOTS)
        self._lane_of: dict[int, int] = {}
        self._models: dict[int, frozenset[str]] = {}
        self._dying: list[tuple[int, list[Table]]] = []

    @property
    def bytes(self) -> int:
        """Estimated memory of the table, and of what was cleared and is not given back yet."""
        dying = sum(len(table) for _, tables in self._dying for table in tables)
        return len(self.stretches) * OWN_BLOCK_BYTES + dying * ENGINE_BLOCK_BYTES

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

    def extend(self, lane: int, hashes: Sequence[int], before: int | None = None) -> None:
        """Note that a lane's backend holds these blocks of a chain, the first after `before`."""
        stretches = self.stretches
        bit = 1 << lane
        above = None if before is None else stretches.get(before)
        at = 0
        end = len(hashes)
        while at < end:
            there = stretches.get(hashes[at])
            start = at
            at += 1
            if there is None:
                stop = min(end, start + MOST_BLOCKS)
                while at < stop and hashes[at] not in stretches:
                    at += 1
                above = self._put(hashes[start:at], bit, before, above)
            elif there.mask & bit:
                above = there
            else:
                if there.blocks[0] != hashes[start]:
                    there = self._split(there, there.blocks.index(hashes[start]))[1]
                at = start + common(there.blocks, hashes, start)
                above = self._share(there, at - start, bit, before, above)
            before = hashes[at - 1]

    def add(self, lane: int, own: int, before: int) -> None:
        """Note that a lane's backend holds one more block, after `before`; as `extend`, quicker."""
        stretches = self.stretches
        above = stretches.get(before)
        if (
            above is not None
            and above.mask == 1 << lane
            and (blocks := above.blocks)[-1] == before
            and own not in stretches
            and len(blocks) < MOST_BLOCKS
        ):
            blocks.append(own)
            stretches[own] = above
        else:
            self.extend(lane, (own,), before)

    def shrink(self, lane: int, hashes: Iterable[int]) -> None:
        """Note that it no longer does; quickest from a chain's end upwards."""
        stretches = self.stretches
        bit = 1 << lane
        for own in hashes:
            there = stretches.get(own)
            if there is None or not there.mask & bit:
                continue
            blocks = there.blocks
            if blocks[-1] != own:
                at = 0 if blocks[0] == own else blocks.index(own)
                there = self._split(there, at + 1)[0]
                blocks = there.blocks
            if there.mask == bit:
                del stretches[own]
                blocks.pop()
                if not blocks:
                    there.below = None
                continue
            self._pass_down(there, own, there.mask ^ bit)

    def holds(self, lane: int, own: int) -> bool:
        """Return whether a lane's backend holds a block."""
        there = self.stretches.get(own)
        return there is not None and bool(there.mask >> lane & 1)

    def lookup(self, hashes: "array[int]", lanes: int, most: int) -> list[tuple[int, int]]:
        """Return `(depth, mask)` pairs, depth rising: the slots in `mask` hold that many blocks.

        Of the first `most` blocks, and of the backends in `lanes`; those that hold none are in no
        mask.
        """
        held: list[tuple[int, int]] = []
        get = self.stretches.get
        end = min(most, len(hashes))
        at = 0
        while at < end:
            there = get(hashes[at])
            if there is None:
                break
            still = lanes & there.mask
            if still != lanes:
                if at:
                    held.append((at, lanes ^ still))
                lanes = still
                if not still:
                    break
            blocks = there.blocks
            below = at + len(blocks)
            if below > end or blocks[-1] != hashes[below - 1]:
                below = at + common(blocks, hashes, at)
            at = below
        if at > 0 and lanes:
            held.append((min(at, end), lanes))
        return self._lanes.by_slot(held) if self._lanes.moved else held

    # -- inside -----------------------------------------------------------------------------

    def _put(
        self, owns: Sequence[int], mask: int, before: int | None, above: Stretch | None
    ) -> Stretch:
        """Make these the blocks after `before` with these holders: part of `above` if that fits."""
        if _fits(above, mask, before, len(owns)):
            above.blocks.extend(owns)
        else:
            above = Stretch(array("Q", owns), mask, before)
        if len(owns) == 1:
            self.stretches[owns[0]] = above
        else:
            self.stretches.update(dict.fromkeys(owns, above))
        return above

    def _share(
        self, there: Stretch, count: int, bit: int, before: int | None, above: Stretch | None
    ) -> Stretch:
        """Give a stretch's first blocks one more holder; return the stretch that they are in."""
        blocks = there.blocks
        mask = there.mask | bit
        if count == len(blocks) and not _fits(above, mask, before, count):
            there.mask = mask
            return there
        owns = blocks[:count]
        if before is None:
            before = there.before
        del blocks[:count]
        there.before = owns[-1]
        if not blocks:
            there.below = None
        return self._put(owns, mask, before, above)

    def _pass_down(self, there: Stretch, own: int, mask: int) -> None:
        """Let the last block of a stretch have the holders `mask`: with those after it if it can be."""
        blocks = there.blocks
        before = blocks[-2] if len(blocks) > 1 else there.before
        below = there.below
        if (
            below is not None
            and below.before == own
            and below.mask == mask
            and 0 < len(below.blocks) < MOST_BLOCKS
        ):
            below.blocks.insert(0, own)
            below.before = before
        elif len(blocks) == 1:
            there.mask = mask
            return
        else:
            there.below = below = Stretch(array("Q", (own,)), mask, before)
        blocks.pop()
        if not blocks:
            there.below = None
        self.stretches[own] = below

    def _split(self, there: Stretch, keep: int) -> tuple[Stretch, Stretch]:
        """Cut a stretch in two after its first `keep` blocks; return both. The shorter one moves."""
        blocks = there.blocks
        if 2 * keep <= len(blocks):
            new = upper = Stretch(blocks[:keep], there.mask, there.before)
            lower = there
            del blocks[:keep]
        else:
            upper = there
            new = lower = Stretch(blocks[keep:], there.mask, None)
            lower.below = there.below
            del blocks[keep:]
        lower.before = upper.blocks[-1]
        upper.below = lower
        self.stretches.update(dict.fromkeys(new.blocks, new))
        return upper, lower

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


def _fits(above: Stretch | None, mask: int, before: int | None, count: int) -> TypeGuard[Stretch]:
    """Whether a stretch ends at `before`, has these holders, and room for so many more blocks."""
    return (
        above is not None
        and above.mask == mask
        and above.blocks[-1] == before
        and len(above.blocks) + count <= MOST_BLOCKS
    )


def beyond(
    trie: Sequence[tuple[int, int]], told: Sequence[tuple[int, int]], exact: int, most: int
) -> Iterator[tuple[int, int]]:
    """Yield what one lookup found deeper than another did, depth falling.

    Of the slots in `exact` and of the first `most` blocks.
    """
    covered = 0
    left = len(told)
    for deep, mask in reversed(trie):
        depth = min(deep, most)
        while left and told[left - 1][0] >= depth:
            left -= 1
            covered |= told[left][1]
        ahead = mask & exact & ~covered
        if ahead:
            yield depth, ahead


def merge(
    trie: Sequence[tuple[int, int]],
    told: Sequence[tuple[int, int]],
    exact: int,
    recent: Sequence[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Return one lookup out of several: of slots in `exact` what was told, of others the trie's.

    `recent` overrules both for the slots in its masks (prompts under way). No slot is in two masks.
    """
    if not recent and not any(mask & ~exact for _, mask in trie):
        return list(told)
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
