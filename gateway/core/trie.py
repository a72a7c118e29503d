"""Which backend is believed to hold which prompt prefix: one radix trie of chained block hashes.

Edges are runs of hashes; a node carries the set of backends that hold its whole run (a bit mask)
and, for each, the visit that last used it. A block's hash is chained with everything before it,
so equal last hashes prove equal runs: one comparison per node.

Eviction is exactly least recently used, a prompt's tail before its head, per backend. The order is
kept per visit (one insert), not per node: the blocks whose last use is visit v are always the
lower end of v's path, so a list of visits in time order, each with its lowest node, is the whole
LRU. A split copies stamps and moves nothing. The list is linked: a dict used as a queue walks over
the gap its deleted head leaves, and that cost 0.8 s stalls at 100,000 prompts.

Invariants: a child's mask is a subset of its parent's; a parent's stamp is never older than its
child's; no node but the root has an empty mask. Must never look at a clock: `now` is an argument.
"""

from array import array
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

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


class RadixTrie:
    """Prefix residency of up to 256 backends, each with its own capacity, under one byte cap."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.nodes = 1
        self.total_blocks = 0
        self._holders = 0  # set bits over all masks
        self._visits = 0
        self._now = float("-inf")
        self._shares: dict[int, Share] = {}
        self._ages: list[tuple[float, int]] = []  # heap of (lower bound of oldest use, slot)
        self._root = Node(array("Q"), -1, None, {})

    # -- backends ---------------------------------------------------------------------------

    def add_backend(self, slot: int, capacity_blocks: int) -> None:
        """Let `slot` hold blocks. On a known slot this is `set_capacity`."""
        if not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"slot {slot} is not in 0..{MAX_SLOTS - 1}")
        if slot in self._shares:
            self.set_capacity(slot, capacity_blocks)
        else:
            self._shares[slot] = Share(max(0, capacity_blocks))

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Change how much `slot` can hold; what no longer fits is evicted now."""
        share = self._shares[slot]
        share.capacity = max(0, capacity_blocks)
        if share.blocks > share.capacity:
            self._evict(slot, share, share.blocks - share.capacity)
            self._shrink()

    def drop(self, slot: int) -> None:
        """Forget everything `slot` holds (it restarted). The slot stays usable."""
        share = self._shares[slot]
        self._evict(slot, share, share.blocks)

    def remove_backend(self, slot: int) -> None:
        """Drop `slot` and free it for another backend."""
        self.drop(slot)
        del self._shares[slot]
        self._ages = [age for age in self._ages if age[1] != slot]
        heapify(self._ages)

    # -- what is held -----------------------------------------------------------------------

    def lookup(self, hashes: "array[int]") -> list[tuple[int, int]]:
        """Return `(depth, mask)` pairs, depth rising: those in `mask` hold exactly `depth` blocks.

        Backends that hold nothing are in no mask. Looking up is no use: it changes nothing.
        """
        held: list[tuple[int, int]] = []
        alive = -1
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
                if not still:
                    return held
                alive = still
            run = child.run
            below = at + len(run)
            if below > end or run[-1] != hashes[below - 1]:
                at += common(run, hashes, at)
                break
            at = below
            kids = child.kids
        if at:
            held.append((at, alive))
        return held

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

    @property
    def bytes(self) -> int:
        """Estimated memory. Never above `max_bytes` after a call returns."""
        return (
            self.total_blocks * BLOCK_BYTES
            + self.nodes * NODE_BYTES
            + self._holders * HOLDER_BYTES
            + self._visits * VISIT_BYTES
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
        visit.leaf = self._walk_in(slot, share, hashes, visit)
        head = share.visits
        visit.older = last = head.older
        visit.newer = head
        last.newer = head.older = visit
        self._visits += 1
        if share.blocks > share.capacity:
            self._evict(slot, share, share.blocks - share.capacity)
        cells = self.total_blocks * BLOCK_BYTES + self._holders * HOLDER_BYTES
        if cells + self.nodes * NODE_BYTES + self._visits * VISIT_BYTES > self.max_bytes:
            self._shrink()
        return visit

    def trim(self, slot: int, hashes: "array[int]", depth: int, visit: Visit | None = None) -> int:
        """Take back what `slot` holds of this chain beyond `depth` blocks; return how many.

        Blocks under which `slot` holds another prompt stay. With `visit`, so do those that a later
        insert has used: give the visit of a failed dispatch and nothing of anyone else is lost.
        """
        share = self._shares[slot]
        node = self._end_of(slot, hashes)
        gone = 0
        while node.parent is not None:
            start = depth_of(node.parent)
            end = start + len(node.run)
            if end <= depth or any(kid.mask >> slot & 1 for kid in node.kids.values()):
                break
            if visit is not None and node.stamps[slot] is not visit:
                break
            parent = node.parent
            keep = max(0, depth - start)
            gone += end - start - keep
            self._cut(slot, share, node, keep)
            if keep:
                break
            node = parent
        self._shrink()
        return gone

    # -- inside -----------------------------------------------------------------------------

    def _walk_in(self, slot: int, share: Share, hashes: "array[int]", visit: Visit) -> Node:
        """Give `slot` every block of the chain, stamp its path, return the path's last node."""
        bit = 1 << slot
        at = 0
        end = len(hashes)
        node = self._root
        while at < end:
            kids = node.kids
            child = kids.get(hashes[at])
            if child is None:
                if not kids and node.mask == bit:  # a conversation's private end: grow in place
                    node.run.extend(hashes[at:])
                else:
                    kids[hashes[at]] = node = Node(hashes[at:], bit, node, {slot: visit})
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
            old = stamps.get(slot)
            if old is None:
                child.mask |= bit
                share.blocks += length
                self._holders += 1
            elif old.leaf is child:
                old.older.newer = old.newer  # as `leave`
                old.newer.older = old.older
                old.newer = old.older = NOBODY
                self._visits -= 1
            stamps[slot] = visit
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
        parent.kids[run[0]] = top
        top.kids[run[keep]] = node
        node.run = run[keep:]
        node.parent = top
        self.nodes += 1
        self._holders += len(top.stamps)
        return top

    def _merge(self, node: Node, only: Node) -> None:
        """Fold `node` into its only child: same holders, same last uses, so never told apart."""
        parent = node.parent
        assert parent is not None  # the root's mask is no node's
        parent.kids[node.run[0]] = only
        only.run = node.run + only.run
        only.parent = parent
        self.nodes -= 1
        self._holders -= len(node.stamps)

    def _try_merge(self, node: Node) -> None:
        if len(node.kids) == 1 and node.parent is not None:
            (only,) = node.kids.values()
            if node.mask == only.mask and node.stamps == only.stamps:
                self._merge(node, only)

    def _evict(self, slot: int, share: Share, count: int) -> None:
        """Take `count` blocks from `slot`, those longest unused first, tails before heads."""
        head = share.visits
        bit = 1 << slot
        while count > 0 and (visit := head.newer) is not head:
            node = visit.leaf
            length = len(node.run)
            if length > count:
                self._cut(slot, share, node, length - count)
                return
            count -= length
            parent = node.parent
            if node.mask == bit and parent is self._root:  # a whole prompt nobody else shares
                del parent.kids[node.run[0]]
                node.stamps.clear()
                share.blocks -= length
                self.total_blocks -= length
                self.nodes -= 1
                self._holders -= 1
                visit.leave()
                self._visits -= 1
            else:
                self._cut(slot, share, node, 0)

    def _cut(self, slot: int, share: Share, node: Node, keep: int) -> None:
        """End what `slot` holds after the first `keep` blocks of `node`, the lowest it holds."""
        if keep:
            if node.mask == 1 << slot:
                share.blocks -= len(node.run) - keep
                self.total_blocks -= len(node.run) - keep
                del node.run[keep:]
                return
            self._split(node, keep)
        parent = node.parent
        assert parent is not None  # no visit ends at the root
        visit = node.stamps.pop(slot)
        node.mask ^= 1 << slot
        share.blocks -= len(node.run)
        self._holders -= 1
        if parent.stamps.get(slot) is visit:
            visit.leaf = parent
        else:
            visit.leave()
            self._visits -= 1
        if node.mask:
            self._try_merge(node)
        else:
            del parent.kids[node.run[0]]
            self.nodes -= 1
            self.total_blocks -= len(node.run)
            self._try_merge(parent)

    def _shrink(self) -> None:
        """Evict what is longest unused anywhere until the estimate is within `max_bytes`."""
        ages = self._ages
        while self.bytes > self.max_bytes and ages:
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
            node = visit.leaf
            keep = 0
            if node.mask == 1 << slot:  # alone here, so a part of it frees memory
                excess = self.bytes - self.max_bytes
                keep = max(0, len(node.run) - 1 - excess // BLOCK_BYTES)
            self._cut(slot, share, node, keep)

    def _end_of(self, slot: int, hashes: "array[int]") -> Node:
        """Return the last node that `slot` holds and that lies on the chain as a whole."""
        at = 0
        end = len(hashes)
        node = self._root
        while at < end:
            child = node.kids.get(hashes[at])
            if child is None or not child.mask >> slot & 1:
                break
            if common(child.run, hashes, at) < len(child.run):
                break
            at += len(child.run)
            node = child
        return node
