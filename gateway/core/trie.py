"""Which backend is believed to hold which prompt prefix: one radix trie of chained block hashes.

Edges are runs of hashes; a node carries the set of backends that hold its whole run (a bit mask)
and, for each, the visit that last used it. A block's hash is chained with everything before it,
so equal last hashes prove equal runs: one comparison per node.

Eviction is exactly least recently used, a prompt's tail before its head, per backend. The order is
kept per visit (one insert), not per node: the blocks whose last use is visit v are always the
lower end of v's path, so a list of visits in time order, each with its lowest node, is the whole
LRU. A split copies stamps and moves nothing. The list is linked: a dict used as a queue walks over
the gap its deleted head leaves, and that cost 0.8 s stalls at 100,000 prompts.

No call works off more than a slice of what is to be forgotten. A dropped backend changes its bit, so
that no lookup sees the old one; memory is given back by later calls and by `sweep`.

Invariants: a child's mask is a subset of its parent's; a parent's stamp is never older than its
child's; only above blocks that an engine holds beyond a gap (core/exact_trie.py) has a node neither
mask nor `real`. Must never look at a clock: `now` is an argument.
"""

from array import array
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from gateway.core.lanes import Lanes
from gateway.core.runs import (
    BLOCK_BYTES,
    GONE,
    HOLDER_BYTES,
    NOBODY,
    NODE_BYTES,
    NOTHING,
    VISIT_BYTES,
    Node,
    Share,
    Visit,
    common,
    slots_of,
)

__all__ = ["DEFAULT_MAX_BYTES", "MAX_SLOTS", "RadixTrie", "Visit"]

MAX_SLOTS: Final = 256
DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024

# Nodes that one call takes from a backend: some 2 us each. An insert's own evictions are the smaller
# slice, and still more than the two nodes it can add, so that a backlog always shrinks.
SLICE: Final = 256
INSERT_SLICE: Final = 64


class RadixTrie:
    """Prefix residency of up to 256 backends, each with its own capacity, under one byte cap."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.nodes = 1
        self.total_blocks = 0
        self._max_bytes = self._room = max_bytes
        self._anchors = 0  # bytes outside the four terms of `bytes`; `_room` is without them
        self._holders = 0  # set bits over all masks
        self._visits = 0
        self._now = float("-inf")
        self._shares: dict[int, Share] = {}
        self._dying: list[Share] = []
        self._ages: list[tuple[float, int]] = []  # heap of (lower bound of oldest use, slot)
        self._lanes = Lanes(MAX_SLOTS)
        self._root = Node(array("Q"), -1, None, {})

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
        if share.blocks > share.limit:
            self._evict(share, share.blocks - share.limit, SLICE)
            self._shrink(SLICE)

    def drop(self, slot: int) -> None:
        """Forget everything `slot` holds (it restarted), at once. The slot stays usable.

        Memory is given back at once only if it is little, else by `sweep` and later calls.
        """
        old = self._shares[slot]
        if self._clear(old, SLICE) == 0 and not self._is_clear(old):
            self._lanes.retire(old.lane)
            self._dying.append(old)
            share = self._shares[slot] = Share(old.capacity, self._lanes.take(slot))
            share.aged = old.aged  # time never runs back, so the bound in the heap still holds
        else:
            old.pinned = False
            old.limit = old.capacity

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
            left = self._clear_dying(left)
        for share in self._shares.values():
            if share.blocks > share.limit and left > 0:
                left = self._evict(share, share.blocks - share.limit, left)
        self._shrink(left)
        return left <= 0

    @property
    def max_bytes(self) -> int:
        """The byte cap. Lowered, it is met by `sweep` and later calls, a slice each."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._max_bytes = value
        self._room = value - self._anchors

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

    def oldest_use(self, slot: int, full_blocks: float = 0.0) -> float | None:
        """Return when the block that `slot` would evict next was last used.

        None: it has none, or holds fewer than `full_blocks` and evicts nothing soon.
        """
        share = self._shares[slot]
        if share.blocks < full_blocks:
            return None
        oldest = share.visits.newer
        return None if oldest is share.visits else oldest.at

    def last_use(self, slot: int, hashes: "array[int]", depth: int) -> float | None:
        """Return when `slot` last used the deepest of this chain's first `depth` blocks it holds.

        None: it holds none of them.
        """
        used = None
        at = 0
        kids = self._root.kids
        while at < depth:
            child = kids.get(hashes[at])
            if child is None or slot not in child.stamps:
                break
            used = child.stamps[slot].at
            at += len(child.run)
            kids = child.kids
        return used

    @property
    def bytes(self) -> int:
        """Estimated memory. At most `max_bytes`, but for what the last drop left to `sweep`."""
        return (
            self.total_blocks * BLOCK_BYTES
            + self.nodes * NODE_BYTES
            + self._holders * HOLDER_BYTES
            + self._visits * VISIT_BYTES
            + self._anchors
        )

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
        if share.blocks > share.limit:
            self._evict(share, share.blocks - share.limit, INSERT_SLICE)
        cells = self.total_blocks * BLOCK_BYTES + self._holders * HOLDER_BYTES
        if cells + self.nodes * NODE_BYTES + self._visits * VISIT_BYTES > self._room:
            self._shrink(INSERT_SLICE)
        return visit

    def trim(self, slot: int, hashes: "array[int]", depth: int, visit: Visit | None = None) -> int:
        """Take back what `slot` holds of this chain beyond `depth` blocks; return how many.

        Blocks under which `slot` holds another prompt stay. With `visit`, so do those that a later
        insert has used: give the visit of a failed dispatch and nothing of anyone else is lost. What an
        engine itself reported (core/exact_trie.py) stays in any case.
        """
        share = self._shares[slot]
        bit = share.bit
        node = self._end_of(bit, hashes)
        gone = 0
        while node.parent is not None and node.end > depth:
            if (share.pinned and node.real & bit) or any(k.mask & bit for k in node.kids.values()):
                break
            if visit is not None and node.stamps[share.lane] is not visit:
                break
            parent = node.parent
            keep = max(0, depth - parent.end)
            gone += node.end - parent.end - keep
            self._cut(share, node, keep)
            if keep:
                break
            node = parent
        self._shrink(SLICE)
        return gone

    # -- inside -----------------------------------------------------------------------------

    def _walk_in(self, share: Share, hashes: "array[int]", visit: Visit) -> Node:
        """Give a backend every block of the chain, stamp its path, return the path's last node."""
        lane = share.lane
        bit = share.bit
        at = 0
        end = len(hashes)
        node = self._root
        while at < end:
            kids = node.kids
            child = kids.get(hashes[at])
            if child is None:
                if not kids and node.mask == bit and not node.real:
                    node.run.extend(hashes[at:])  # a conversation's private end: grow in place
                    node.end = end
                else:
                    kids[hashes[at]] = node = Node(hashes[at:], bit, node, {lane: visit})
                    self.nodes += 1
                    self._holders += 1
                share.blocks += end - at
                self.total_blocks += end - at
                return node
            run = child.run
            length = len(run)
            if length > end - at or run[length - 1] != hashes[at + length - 1]:
                length = common(run, hashes, at)
                child = self._split(child, length)
            stamps = child.stamps
            old = stamps.get(lane)
            if old is None:
                child.mask |= bit
                share.blocks += length
                self._holders += 1
            elif old.leaf is child:
                old.older.newer = old.newer  # as `leave`
                old.newer.older = old.older
                old.newer = old.older = NOBODY
                self._visits -= 1
            stamps[lane] = visit
            if len(kids) == 1 and node.mask == child.mask and node.stamps == child.stamps:
                self._merge(node, child)
            node = child
            at += length
        return node

    def _split(self, node: Node, keep: int) -> Node:
        """Put a new node with the first `keep` blocks above `node`, and return it."""
        parent = node.parent
        assert parent is not None  # the root has no run to split
        run = node.run
        top = Node(run[:keep], node.mask, parent, node.stamps.copy())
        top.real = node.real
        parent.kids[run[0]] = top
        top.kids[run[keep]] = node
        node.run = run[keep:]
        node.parent = top
        self.nodes += 1
        self._holders += len(top.stamps)
        return top

    def _merge(self, node: Node, only: Node) -> None:
        """Fold `node` into its only child, if also the same engines have told of both.

        Same holders, same last uses (the caller has looked), so never told apart.
        """
        parent = node.parent
        assert parent is not None  # the root's mask is no node's
        if node.real != only.real:
            return
        parent.kids[node.run[0]] = only
        only.run = node.run + only.run
        only.parent = parent
        node.run = NOTHING
        node.parent = only
        node.end = GONE
        self.nodes -= 1
        self._holders -= len(node.stamps)

    def _try_merge(self, node: Node) -> None:
        if len(node.kids) == 1 and node.parent is not None:
            (only,) = node.kids.values()
            if node.mask == only.mask and node.stamps == only.stamps:
                self._merge(node, only)

    def _evict(self, share: Share, count: int, nodes: int) -> int:
        """Take `count` blocks from a backend, those longest unused first, tails before heads.

        Stops after `nodes` nodes; returns how many of those are left.
        """
        head = share.visits
        bit = share.bit
        while count > 0 and nodes > 0 and (visit := head.newer) is not head:
            nodes -= 1
            node = visit.leaf
            length = len(node.run)
            if length > count:
                self._cut(share, node, length - count)
                break
            count -= length
            parent = node.parent
            if node.mask == bit and parent is self._root and not (node.kids or node.real):
                del parent.kids[node.run[0]]  # a whole prompt nobody else shares
                node.stamps.clear()
                node.run = NOTHING
                node.end = GONE
                share.blocks -= length
                self.total_blocks -= length
                self.nodes -= 1
                self._holders -= 1
                visit.leave()
                self._visits -= 1
            else:
                self._cut(share, node, 0)
        return nodes

    def _cut(self, share: Share, node: Node, keep: int) -> None:
        """End what a backend holds after the first `keep` blocks of `node`, the lowest it holds."""
        bit = share.bit
        if keep:
            if node.mask == bit and not node.kids and not node.real & ~bit:
                lost = len(node.run) - keep
                share.blocks -= lost
                self.total_blocks -= lost
                node.end -= lost
                del node.run[keep:]
                return
            self._split(node, keep)
        parent = node.parent
        assert parent is not None  # no visit ends at the root
        visit = node.stamps.pop(share.lane)
        node.mask ^= bit
        if node.real:
            node.real &= ~bit
        share.blocks -= len(node.run)
        self._holders -= 1
        if parent.stamps.get(share.lane) is visit:
            visit.leaf = parent
        else:
            visit.leave()
            self._visits -= 1
        self._tidy(node)

    def _tidy(self, node: Node) -> None:
        """Take a node that nobody holds out, and those above it that this leaves empty; or merge."""
        parent = node.parent
        while parent is not None and not (node.mask or node.real or node.kids):
            del parent.kids[node.run[0]]
            self.nodes -= 1
            self.total_blocks -= len(node.run)
            node.run = NOTHING
            node.end = GONE
            node = parent
            parent = node.parent
        self._try_merge(node)

    def _is_clear(self, share: Share) -> bool:
        """Return whether nothing in the trie bears the share's bit."""
        return not share.blocks

    def _clear(self, share: Share, nodes: int) -> int:
        """Take everything from a share that ends, as `_evict`."""
        return self._evict(share, share.blocks, nodes)

    def _clear_dying(self, nodes: int) -> int:
        share = self._dying[-1]
        nodes = self._clear(share, nodes)
        if self._is_clear(share):
            self._dying.pop()
            self._lanes.free(share.lane)
        return nodes

    def _shrink(self, nodes: int) -> None:
        """Evict until the estimate is within `max_bytes`: what was dropped, then the least used.

        Stops after `nodes` nodes.
        """
        ages = self._ages
        while self.bytes > self._max_bytes and nodes > 0:
            if self._dying:
                nodes = self._clear_dying(nodes)
                continue
            if not ages:
                return
            at, slot = ages[0]
            share = self._shares[slot]
            visit = share.oldest()
            if visit is None or share.pinned:
                heappop(ages)
                share.aged = False
                continue
            if visit.at > at:  # the bound was low: a slot's oldest use only ever moves forward
                heapreplace(ages, (visit.at, slot))
                continue
            nodes -= 1
            node = visit.leaf
            keep = 0
            if node.mask == share.bit:  # alone here, so a part of it frees memory
                excess = self.bytes - self._max_bytes
                keep = max(0, len(node.run) - 1 - excess // BLOCK_BYTES)
            self._cut(share, node, keep)

    def _end_of(self, bit: int, hashes: "array[int]") -> Node:
        """Return the last node that `bit` holds and that lies on the chain as a whole."""
        at = 0
        end = len(hashes)
        node = self._root
        while at < end:
            child = node.kids.get(hashes[at])
            if child is None or not child.mask & bit:
                break
            if common(child.run, hashes, at) < len(child.run):
                break
            at += len(child.run)
            node = child
        return node
