"""What the radix trie is made of: nodes with runs, visits in rings, and each backend's share.

Data and the three loops over it; the rules are in core/trie.py, which alone changes any of it.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

# CPython 3.11 sizes, checked against tracemalloc by the unit tests.
BLOCK_BYTES: Final = 8
NODE_BYTES: Final = 210  # node, array, share of the parent's table
HOLDER_BYTES: Final = 80  # the first is the rest of that, the others an entry in a table
VISIT_BYTES: Final = 80  # visit, its float

WIDE: Final = 16_384
"""Children from which on a node has a `Fan`."""
FAN_PARTS: Final = 64

LONG_RUN: Final = 16_384
"""Blocks from which on an eviction does not copy a run to join it: 256 times 128 KiB take 2 ms."""

SLACK_BLOCKS: Final = 1024
"""What an insert may leave over a capacity, a long prompt's; 3 % of a large one, 12 of a small."""


class Visit:
    """One insert: when, and the deepest node whose last use it still is. Opaque to callers.

    Also a link of its backend's ring of visits, whose head is older than the oldest.
    """

    __slots__ = ("at", "leaf", "newer", "older")

    def __init__(self, at: float, leaf: "Node") -> None:
        self.at = at
        self.leaf = leaf
        self.newer = self.older = self

    def join(self, head: "Visit") -> None:
        """Become the newest of a ring."""
        last = head.older
        self.older = last
        self.newer = head
        last.newer = head.older = self

    def lead(self, head: "Visit") -> None:
        """Become the oldest of a ring."""
        first = head.newer
        self.newer = first
        self.older = head
        first.older = head.newer = self

    def leave(self) -> None:
        """Leave the ring, and forget it: a held visit must not keep every later one alive."""
        self.older.newer = self.newer
        self.newer.older = self.older
        self.newer = self.older = NOBODY


class Node:
    """A run of blocks. `used` is the visit that last used it, by lane for each bit of `mask`.

    With one holder it is the visit itself: most nodes are the ends of short prompts, and a table
    is as large as all the rest of them. `kids` has each child by the first block of its run; those
    without any share `NO_KIDS`.
    """

    __slots__ = ("kids", "mask", "parent", "run", "used")

    def __init__(
        self,
        run: "array[int]",
        mask: int,
        parent: "Node | None",
        used: Visit | dict[int, Visit],
    ) -> None:
        self.run = run
        self.mask = mask
        self.parent = parent
        self.used = used
        self.kids: dict[int, Node] | Fan = NO_KIDS

    def use(self, lane: int) -> Visit | None:
        """Return the visit by which a lane's backend last used this; None: it does not hold it."""
        used = self.used
        if isinstance(used, dict):
            return used.get(lane)
        return used if self.mask >> lane & 1 else None

    def stamp(self, lane: int, bit: int, visit: Visit) -> Visit | None:
        """Note a use; return the lane's last one, None: it is a new holder."""
        used = self.used
        if isinstance(used, dict):
            old = used.get(lane)
            used[lane] = visit
            self.mask |= bit
            return old
        if self.mask == bit:
            self.used = visit
            return used
        self.used = {self.mask.bit_length() - 1: used, lane: visit}
        self.mask |= bit
        return None

    def let_go(self, lane: int) -> Visit:
        """Take a holder out; return its last use."""
        used = self.used
        self.mask ^= 1 << lane
        if isinstance(used, dict):
            visit = used.pop(lane)
            if len(used) == 1:
                (self.used,) = used.values()
            return visit
        self.used = NOBODY  # a held visit that ends here must not be a cycle
        return used


class Fan:
    """The children of a node that has very many: a dict cut up by hash.

    A dict that grows copies itself, 10 ms at 170,000 children. The parts are small.
    """

    __slots__ = ("_parts", "_size")

    def __init__(self, kids: "dict[int, Node] | Fan") -> None:
        self._parts: list[dict[int, Node]] = [{} for _ in range(FAN_PARTS)]
        self._size = 0
        for key, kid in kids.items():
            self[key] = kid

    def __len__(self) -> int:
        return self._size

    def __setitem__(self, key: int, kid: Node) -> None:
        part = self._parts[key % FAN_PARTS]
        before = len(part)
        part[key] = kid
        self._size += len(part) - before

    def __delitem__(self, key: int) -> None:
        del self._parts[key % FAN_PARTS][key]
        self._size -= 1

    def get(self, key: int) -> Node | None:
        """Return the child that starts with the block `key`."""
        return self._parts[key % FAN_PARTS].get(key)

    def items(self) -> Iterator[tuple[int, Node]]:
        """Yield every child with its first block."""
        for part in self._parts:
            yield from part.items()

    def values(self) -> Iterator[Node]:
        """Yield every child."""
        for part in self._parts:
            yield from part.values()


class Share:
    """A backend's part of the trie: one lane of the masks. `visits` is the head of its ring.

    It holds `capacity` blocks, and until its next request has ended up to `most`.
    `aged` = the heap of ages has an entry for it (one at most). `until` = what was last used by
    then is to be forgotten.
    """

    __slots__ = ("aged", "bit", "blocks", "capacity", "lane", "most", "until", "visits")

    def __init__(self, capacity: int, lane: int) -> None:
        self.resize(capacity)
        self.lane = lane
        self.bit = 1 << lane
        self.blocks = 0
        self.aged = False
        self.until = float("-inf")
        self.visits = Visit(float("-inf"), _NOWHERE)

    def resize(self, capacity: int) -> None:
        """Change how much fits."""
        self.capacity = capacity
        self.most = capacity + min(capacity >> 3, max(SLACK_BLOCKS, capacity >> 5))

    def oldest(self) -> Visit | None:
        """Return the visit whose blocks go first; None if nothing is held."""
        first = self.visits.newer
        return None if first is self.visits else first


NO_KIDS: Final[dict[int, Node]] = {}
"""Of all nodes without children: never to be changed."""

_NOWHERE: Final = Node(array("Q"), 0, None, {})
NOBODY: Final = Visit(float("-inf"), _NOWHERE)


def common(run: Sequence[int], hashes: Sequence[int], at: int) -> int:
    """Return how many blocks of `run` the chain shares from `at` on; at least 1, as the key did.

    Chaining makes agreement monotone, so bisection finds its end.
    """
    low = 1
    high = min(len(run), len(hashes) - at)
    while low < high:
        middle = (low + high + 1) >> 1
        if run[middle - 1] == hashes[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def slots_of(mask: int) -> Iterator[int]:
    """Yield the positions of a mask's set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def depth_of(node: Node) -> int:
    """Return the blocks from the root to the end of `node`."""
    depth = 0
    above: Node | None = node
    while above is not None:
        depth += len(above.run)
        above = above.parent
    return depth
