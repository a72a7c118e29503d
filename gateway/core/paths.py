"""The tree of runs under the trie: how one backend's share gains, loses and splits them.

Knows shares and visits, no slots, capacities or caps: those are in core/trie.py, whose docstring
gives the invariants. Must never walk more of the tree than the path or the nodes it is told of.
"""

from array import array

from gateway.core.runs import (
    BLOCK_BYTES,
    HOLDER_BYTES,
    LONG_RUN,
    NO_KIDS,
    NOBODY,
    NODE_BYTES,
    VISIT_BYTES,
    WIDE,
    Fan,
    Node,
    Share,
    Visit,
    common,
)

__all__ = ["Paths"]


class Paths:
    """Nodes from the root down, and the four counts that memory is estimated from."""

    def __init__(self) -> None:
        self.nodes = 1
        self.total_blocks = 0
        self._holders = 0  # set bits over all masks
        self._visits = 0
        self._root = Node(array("Q"), -1, None, {})

    @property
    def bytes(self) -> int:
        """Estimated memory. At most `max_bytes`, but for what the last drop left to `sweep`."""
        return (
            self.total_blocks * BLOCK_BYTES
            + self.nodes * NODE_BYTES
            + self._holders * HOLDER_BYTES
            + self._visits * VISIT_BYTES
        )

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
                share.blocks += end - at
                self.total_blocks += end - at
                if kids or node.mask != bit:
                    return self._grow(node, hashes[at:], bit, visit)
                node.run.extend(hashes[at:])  # a conversation's private end: in place
                return node
            run = child.run
            length = len(run)
            if length > end - at or run[length - 1] != hashes[at + length - 1]:
                length = common(run, hashes, at)
                child = self._split(child, length)
            old = child.stamp(lane, bit, visit)
            if old is None:
                share.blocks += length
                self._holders += 1
            elif old.leaf is child:
                old.older.newer = old.newer  # as `leave`
                old.newer.older = old.older
                old.newer = old.older = NOBODY
                self._visits -= 1
            if len(kids) == 1 and node.mask == child.mask and node.used == child.used:
                self._merge(node, child)
            node = child
            at += length
        return node

    def _walk_below(self, share: Share, hashes: "array[int]", visit: Visit) -> Node | None:
        """Give a backend the end of the chain that it does not hold, as used before all it holds.

        Returns the path's last node; None, and nothing has changed, when it holds the whole chain.
        """
        lane, bit = share.lane, share.bit
        at = 0
        end = len(hashes)
        node = self._root
        while at < end:
            child = node.kids.get(hashes[at])
            if child is None:
                share.blocks += end - at
                self.total_blocks += end - at
                return self._grow(node, hashes[at:], bit, visit)
            held = child.mask & bit
            length = len(child.run)
            if length > end - at or child.run[length - 1] != hashes[at + length - 1]:
                length = common(child.run, hashes, at)
                if held and at + length == end:
                    return None
                child = self._split(child, length)
            if not held:
                child.stamp(lane, bit, visit)
                share.blocks += length
                self._holders += 1
            node = child
            at += length
        return node if node.use(lane) is visit else None

    def _grow(self, node: Node, run: "array[int]", bit: int, visit: Visit) -> Node:
        """Put a child under `node`, and return it."""
        kids = node.kids
        if not kids:
            node.kids = kids = {}
        elif len(kids) == WIDE and not isinstance(kids, Fan):
            node.kids = kids = Fan(kids)
        kids[run[0]] = child = Node(run, bit, node, visit)
        self.nodes += 1
        self._holders += 1
        return child

    def _split(self, node: Node, keep: int) -> Node:
        """Put a new node with the first `keep` blocks above `node`, and return it."""
        parent = node.parent
        assert parent is not None  # the root has no run to split
        run = node.run
        used = node.used
        top = Node(run[:keep], node.mask, parent, used.copy() if isinstance(used, dict) else used)
        parent.kids[run[0]] = top
        top.kids = {run[keep]: node}
        node.run = run[keep:]
        node.parent = top
        self.nodes += 1
        self._holders += node.mask.bit_count()
        return top

    def _merge(self, node: Node, only: Node) -> None:
        """Fold `node` into its only child: same holders, same last uses, so never told apart."""
        parent = node.parent
        assert parent is not None  # the root's mask is no node's
        run = node.run
        parent.kids[run[0]] = only
        run.extend(only.run)  # in place: an insert may fold a thousand nodes of one long run
        only.run = run
        only.parent = parent
        self.nodes -= 1
        self._holders -= node.mask.bit_count()

    def _try_merge(self, node: Node) -> None:
        if len(node.kids) == 1 and node.parent is not None:
            (only,) = node.kids.values()
            same = node.mask == only.mask and node.used == only.used
            if same and len(only.run) <= LONG_RUN:  # a longer one is folded by who walks it next
                self._merge(node, only)

    def _cut(self, share: Share, node: Node, keep: int) -> None:
        """End what a backend holds after the first `keep` blocks of `node`, the lowest it holds."""
        if keep:
            if node.mask == share.bit:
                share.blocks -= len(node.run) - keep
                self.total_blocks -= len(node.run) - keep
                del node.run[keep:]
                return
            self._split(node, keep)
        parent = node.parent
        assert parent is not None  # no visit ends at the root
        visit = node.let_go(share.lane)
        share.blocks -= len(node.run)
        self._holders -= 1
        if parent.use(share.lane) is visit:
            visit.leaf = parent
        else:
            visit.leave()
            self._visits -= 1
        if node.mask:
            self._try_merge(node)
            return
        kids = parent.kids
        del kids[node.run[0]]
        self.nodes -= 1
        self.total_blocks -= len(node.run)
        if not kids:
            parent.kids = NO_KIDS
        elif len(kids) == 1:
            self._try_merge(parent)

    def _kept(self, share: Share, node: Node, most: int) -> int:
        """Return how many blocks of a backend's lowest node can stay below `most` bytes."""
        if node.mask != share.bit:  # others hold it, so a part of it frees nothing
            return 0
        return max(0, len(node.run) - 1 - (self.bytes - most) // BLOCK_BYTES)

    def _evict(self, share: Share, count: int, nodes: int) -> int:
        """Take `count` blocks from a backend, those longest unused first, tails before heads.

        Stops after `nodes` nodes; returns how many of those are left.
        """
        head = share.visits
        while count > 0 and nodes > 0 and (visit := head.newer) is not head:
            nodes -= 1
            node = visit.leaf
            length = len(node.run)
            if length > count:
                self._cut(share, node, length - count)
                break
            count -= length
            self._cut(share, node, 0)
        return nodes

    def _expire(self, share: Share, nodes: int) -> int:
        """Take what a backend last used by `share.until`; as `_evict`."""
        head = share.visits
        while nodes > 0:
            visit = head.newer
            if visit is head or visit.at > share.until:
                share.until = float("-inf")
                break
            nodes -= 1
            self._cut(share, visit.leaf, 0)
        return nodes

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
