"""Which backend is believed to hold which prompt prefix: one radix trie of chained block hashes.

Edges are runs of hashes; a node carries the set of backends that hold its whole run (a bit mask)
and, for each, the visit that last used it. A block's hash is chained with everything before it,
so equal last hashes prove equal runs: one comparison per node.

Eviction is exactly least recently used, a prompt's tail before its head, per backend. The order is
kept per visit (one insert), not per node: the blocks whose last use is visit v are always the
lower end of v's path, so a list of visits in time order, each with its lowest node, is the whole
LRU. A split copies stamps and moves nothing. The list is linked: a dict used as a queue walks over
the gap its deleted head leaves, and that cost 0.8 s stalls at 100,000 prompts.

An insert is on a request's path, so it leaves a little more than fits: a share of the capacity, and
more only where a long prompt follows thousands of one-block ones, whose eviction takes longer than
the insert. `settle` evicts it when a request has ended, `sweep` at the latest. The byte cap is never
passed: `sweep` keeps a little room below it, and an insert that finds none loses its own tail.

No call works off more than a slice of what is to be forgotten. A dropped backend changes its bit, so
that no lookup sees the old one; memory is given back by later calls and by `sweep`.

Invariants: a child's mask is a subset of its parent's; a parent's stamp is never older than its
child's; no node but the root has an empty mask. Must never look at a clock: `now` is an argument.
"""

from array import array
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from gateway.core.lanes import Lanes
from gateway.core.paths import Paths
from gateway.core.runs import (
    BLOCK_BYTES,
    HOLDER_BYTES,
    NOBODY,
    NODE_BYTES,
    VISIT_BYTES,
    Node,
    Share,
    Visit,
    common,
    depth_of,
    slots_of,
)

__all__ = ["DEFAULT_MAX_BYTES", "MAX_SLOTS", "RadixTrie", "Visit"]

MAX_SLOTS: Final = 256
DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024

# Nodes that one call takes from a backend: some 2 us each. What an insert evicts, or `settle` after
# it, is the smaller slice, and still more than the two nodes it can add, so that a backlog always shrinks;
# an insert that is far over takes one more for every eight blocks, up to so many.
SLICE: Final = 256
INSERT_SLICE: Final = 64
MOST_EXTRA: Final = 512

# What is kept free below the byte cap: 1.5 %.
ROOM_SHIFT: Final = 6


class RadixTrie(Paths):
    """Prefix residency of up to 256 backends, each with its own capacity, under one byte cap."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        super().__init__()
        self._max_bytes = self._ceiling = max_bytes
        self._now = float("-inf")
        self._shares: dict[int, Share] = {}
        self._dying: list[Share] = []
        self._ages: list[tuple[float, int]] = []  # heap of (lower bound of oldest use, slot)
        self._lanes = Lanes(MAX_SLOTS)

    @property
    def max_bytes(self) -> int:
        """The byte cap. Lowered, it is met by `sweep` and later calls, a slice each."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ceiling = max(max_bytes, self.bytes)  # what is met meanwhile

    # -- backends ---------------------------------------------------------------------------

    def add_backend(self, slot: int, capacity_blocks: int) -> None:
        """Let `slot` hold blocks. On a known slot this is `set_capacity`."""
        if not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"slot {slot} is not in 0..{MAX_SLOTS - 1}")
        if slot in self._shares:
            self.set_capacity(slot, capacity_blocks)
        else:
            self._shares[slot] = Share(max(0, capacity_blocks), self._lanes.take(slot))

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Change how much `slot` can hold; what no longer fits is evicted now and by `sweep`."""
        share = self._shares[slot]
        share.resize(max(0, capacity_blocks))
        if share.blocks > share.capacity:
            self._evict(share, share.blocks - share.capacity, SLICE)
            self._shrink(SLICE)

    def drop(self, slot: int) -> None:
        """Forget everything `slot` holds (it restarted), at once. The slot stays usable.

        Memory is given back at once only if it is little, else by `sweep` and later calls.
        """
        old = self._shares[slot]
        self._evict(old, old.blocks, SLICE)
        if old.blocks:
            self._lanes.retire(old.lane)
            self._dying.append(old)
            share = self._shares[slot] = Share(old.capacity, self._lanes.take(slot))
            share.aged = old.aged  # time never runs back, so the bound in the heap still holds

    def forget(self, slot: int, until: float) -> int:
        """Forget what `slot` last used at `until` or before; return the blocks gone at once.

        A slice goes at once, the rest by `sweep`.
        """
        share = self._shares[slot]
        before = share.blocks
        share.until = max(share.until, until)
        self._expire(share, SLICE)
        return before - share.blocks

    def remove_backend(self, slot: int) -> None:
        """Drop `slot` and free it for another backend."""
        self.drop(slot)
        self._lanes.free(self._shares.pop(slot).lane)
        self._ages = [age for age in self._ages if age[1] != slot]
        heapify(self._ages)

    def sweep(self, nodes: int = SLICE) -> bool:
        """Give back a slice of what was dropped or no longer fits; return whether more is left.

        Takes some 2 us for each of `nodes`. Call it when idle, and soon again while it returns True.
        """
        left = nodes
        while self._dying and left > 0:
            left = self._bury(left)
        for share in self._shares.values():
            left = self._expire(share, left)
            if share.blocks > share.capacity:
                left = self._evict(share, share.blocks - share.capacity, left)
        return self._shrink(left, self.max_bytes >> ROOM_SHIFT) <= 0

    def settle(self, slot: int) -> None:
        """Evict what inserts left over a capacity: for when a request of `slot` has ended."""
        share = self._shares[slot]
        if share.blocks > share.capacity:
            self._evict(share, share.blocks - share.capacity, INSERT_SLICE)

    # -- what is held -----------------------------------------------------------------------

    def lookup(self, hashes: "array[int]") -> list[tuple[int, int]]:
        """Return `(depth, mask)` pairs, depth rising: those in `mask` hold exactly `depth` blocks.

        Backends that hold nothing are in no mask. Looking up is no use: it changes nothing.
        """
        held: list[tuple[int, int]] = []
        lanes = self._lanes
        alive = lanes.live
        at = 0
        end = len(hashes)
        kids = self._root.kids
        while at < end:
            child = kids.get(hashes[at])
            if child is None:
                break
            if child.mask != alive:
                still = alive & child.mask
                if at and still != alive:
                    held.append((at, alive ^ still))
                alive = still
                if not still:
                    break
            run = child.run
            below = at + len(run)
            if below > end or run[-1] != hashes[below - 1]:
                at += common(run, hashes, at)
                break
            at = below
            kids = child.kids
        if at and alive:
            held.append((at, alive))
        return lanes.by_slot(held) if lanes.moved else held

    def depths(self, hashes: "array[int]") -> dict[int, int]:
        """Return the blocks held by each slot that holds any."""
        flat: dict[int, int] = {}
        for depth, mask in self.lookup(hashes):
            for slot in slots_of(mask):
                flat[slot] = depth
        return flat

    def blocks(self, slot: int) -> int:
        """Return how many blocks `slot` is believed to hold."""
        return self._shares[slot].blocks

    def capacity(self, slot: int) -> int:
        """Return how many blocks `slot` may hold."""
        return self._shares[slot].capacity

    def share(self, slot: int) -> Share | None:
        """Return what `slot` holds, to read; another one once it is dropped. None: no such slot."""
        return self._shares.get(slot)

    def oldest_use(self, slot: int, full_blocks: float = 0.0) -> float | None:
        """Return when the block that `slot` would evict next was last used.

        None: it has none, or holds fewer than `full_blocks` and evicts nothing soon.
        """
        share = self._shares[slot]
        if share.blocks < full_blocks:
            return None
        oldest = share.visits.newer
        return None if oldest is share.visits else oldest.at

    def last_use(self, slot: int, hashes: "array[int]", depth: int) -> tuple[float, int] | None:
        """Return when `slot` last used the deepest of this chain's first `depth` blocks it holds.

        With it, how many of the blocks above were last used then; None: it holds none of them.
        """
        lane = self._shares[slot].lane
        used: Visit | None = None
        own = at = 0
        kids = self._root.kids
        while at < depth:
            child = kids.get(hashes[at])
            visit = None if child is None else child.use(lane)
            if child is None or visit is None:
                break
            if visit is not used:
                used = visit
                own = 0
            length = len(child.run)
            own += length if at + length <= depth else depth - at
            at += length
            kids = child.kids
        return None if used is None else (used.at, own)

    def used_between(self, slot: int, after: float, before: float, visits: int) -> int | None:
        """Return how many of `slot`'s blocks were last used after one time and before another.

        None: it would take a look at more than so many `visits`.
        """
        share = self._shares[slot]
        lane = share.lane
        visit = share.visits.older
        blocks = 0
        while visit.at > after:
            if visits <= 0:
                return None
            visits -= 1
            if visit.at < before:
                node: Node | None = visit.leaf
                while node is not None and node.use(lane) is visit:
                    blocks += len(node.run)
                    node = node.parent
            visit = visit.older
        return blocks

    # -- changes ----------------------------------------------------------------------------

    def insert(self, slot: int, hashes: "array[int]", now: float) -> Visit | None:
        """Note that `slot` holds (or will hold) this chain and used all of it at `now`.

        Returns the visit, by which `trim` can undo exactly this; None for an empty chain.
        """
        share = self._shares[slot]
        if not hashes:
            return None
        if now > self._now:  # noqa: PLR1730 - a third of the price of max
            self._now = now
        visit = Visit(self._now, self._root)
        if not share.aged:
            share.aged = True
            heappush(self._ages, (self._now, slot))
        visit.leaf = self._walk_in(share, hashes, visit)
        head = share.visits
        visit.older = last = head.older
        visit.newer = head
        last.newer = head.older = visit
        self._visits += 1
        over = share.blocks - share.most
        if over > 0:
            self._evict(share, over, INSERT_SLICE + min(over >> 3, MOST_EXTRA))
        cells = self.total_blocks * BLOCK_BYTES + self._holders * HOLDER_BYTES
        if cells + self.nodes * NODE_BYTES + self._visits * VISIT_BYTES > self._max_bytes:
            self._shrink(INSERT_SLICE)
            self._shorten(share, visit)
        return visit

    def restore(self, slot: int, hashes: "array[int]", at: float) -> bool:
        """Note that `slot` used this chain at `at`, before all that it holds: the youngest first.

        False: there is no room for it, nor for anything older.
        """
        share = self._shares[slot]
        if share.blocks >= share.capacity or self.bytes >= self.max_bytes:
            return False
        visit = Visit(min(at, share.visits.newer.at) if share.blocks else at, self._root)
        leaf = self._walk_below(share, hashes, visit)
        if leaf is not None:
            visit.leaf = leaf
            visit.lead(share.visits)
            self._visits += 1
            self._age(share, slot, visit.at)
            if share.blocks > share.capacity:
                self._evict(share, share.blocks - share.capacity, SLICE)
            self._shrink(SLICE)
        return True

    def trim(self, slot: int, hashes: "array[int]", depth: int, visit: Visit | None = None) -> int:
        """Take back what `slot` holds of this chain beyond `depth` blocks; return how many.

        Blocks under which `slot` holds another prompt stay. With `visit`, so do those that a later
        insert has used: give the visit of a failed dispatch and nothing of anyone else is lost.
        """
        share = self._shares[slot]
        bit = share.bit
        node = self._end_of(bit, hashes)
        gone = 0
        end = depth_of(node)
        while node.parent is not None and end > depth:
            if any(kid.mask & bit for kid in node.kids.values()):
                break
            if visit is not None and node.use(share.lane) is not visit:
                break
            parent = node.parent
            end -= len(node.run)
            keep = max(0, depth - end)
            gone += len(node.run) - keep
            self._cut(share, node, keep)
            if keep:
                break
            node = parent
        self._shrink(SLICE)
        return gone

    # -- inside -----------------------------------------------------------------------------

    def _age(self, share: Share, slot: int, at: float) -> None:
        """Keep the heap's bound of a share's oldest use a lower one."""
        ages = self._ages
        if not share.aged:
            share.aged = True
            heappush(ages, (at, slot))
            return
        for index, (bound, other) in enumerate(ages):
            if other == slot:
                if bound > at:
                    ages[index] = (float("-inf"), slot)
                    heapify(ages)
                return

    def _bury(self, nodes: int) -> int:
        """Take from the share dropped last, and free its lane when nothing is left; as `_evict`."""
        share = self._dying[-1]
        nodes = self._evict(share, share.blocks, nodes)
        if not share.blocks:
            self._dying.pop()
            self._lanes.free(share.lane)
        return nodes

    def _shorten(self, share: Share, visit: Visit) -> None:
        """Take a new visit's tail back, as far as there are no bytes for it."""
        most = self._ceiling
        while self.bytes > most and visit.newer is not NOBODY:
            self._cut(share, visit.leaf, self._kept(share, visit.leaf, most))

    def _shrink(self, nodes: int, room: int = 0) -> int:
        """Evict until there is `room` below `max_bytes`: what was dropped, then the least used.

        Stops after `nodes` nodes; returns how many of those are left.
        """
        ages = self._ages
        most = self.max_bytes - room
        while self.bytes > most and nodes > 0:
            if self._dying:
                nodes = self._bury(nodes)
                continue
            if not ages:
                break
            at, slot = ages[0]
            share = self._shares[slot]
            visit = share.oldest()
            if visit is None:
                heappop(ages)
                share.aged = False
                continue
            if visit.at > at:  # the bound was low: a slot's oldest use only ever moves forward
                heapreplace(ages, (visit.at, slot))
                continue
            nodes -= 1
            self._cut(share, visit.leaf, self._kept(share, visit.leaf, most))
        self._ceiling = max(self.max_bytes, min(self._ceiling, self.bytes))
        return nodes
