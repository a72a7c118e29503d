"""The radix trie's meaning, written as naively as it can be: one stamp per backend and block."""

from array import array

from gateway.core.runs import NO_KIDS, Node, slots_of
from gateway.core.trie import RadixTrie, Visit


class NaiveIndex:
    """Per backend a table of block -> (visit number); `parents` gives the block before each."""

    def __init__(self) -> None:
        self.capacity: dict[int, int] = {}
        self.held: dict[int, dict[int, int]] = {}
        self.times: dict[int, float] = {}
        self.parents: dict[int, int | None] = {}
        self.depths: dict[int, int] = {}
        self.visits = 0

    def add_backend(self, slot: int, capacity: int) -> None:
        self.capacity[slot] = capacity
        self.held[slot] = {}

    def insert(self, slot: int, chain: list[int], now: float) -> int:
        self.visits += 1
        self.times[self.visits] = now
        before: int | None = None
        for depth, block in enumerate(chain):
            self.parents[block] = before
            self.depths[block] = depth
            self.held[slot][block] = self.visits
            before = block
        self._evict(slot)
        return self.visits

    def set_capacity(self, slot: int, capacity: int) -> None:
        self.capacity[slot] = capacity
        self._evict(slot)

    def drop(self, slot: int) -> None:
        self.held[slot] = {}

    def forget(self, slot: int, until: float) -> int:
        held = self.held[slot]
        old = [block for block, visit in held.items() if self.times[visit] <= until]
        for block in old:
            del held[block]
        return len(old)

    def last_use(self, slot: int, chain: list[int]) -> tuple[float, int] | None:
        depth = self.depth(slot, chain)
        if not depth:
            return None
        visits = [self.held[slot][block] for block in chain[:depth]]
        return self.times[visits[-1]], visits.count(visits[-1])

    def used_between(self, slot: int, after: float, before: float) -> int:
        return sum(after < self.times[visit] < before for visit in self.held[slot].values())

    def _evict(self, slot: int) -> None:
        held = self.held[slot]
        excess = len(held) - self.capacity[slot]
        if excess > 0:
            order = sorted(held, key=lambda block: (held[block], -self.depths[block]))
            for block in order[:excess]:
                del held[block]

    def trim(self, slot: int, chain: list[int], depth: int, visit: int | None) -> int:
        held = self.held[slot]
        gone = 0
        for block in reversed(chain[depth:]):
            if block not in held:
                continue
            if any(self.parents[other] == block for other in held):
                break
            if visit is not None and held[block] != visit:
                break
            del held[block]
            gone += 1
        return gone

    def depth(self, slot: int, chain: list[int]) -> int:
        count = 0
        while count < len(chain) and chain[count] in self.held[slot]:
            count += 1
        return count

    def oldest_use(self, slot: int) -> float | None:
        held = self.held[slot]
        return self.times[min(held.values())] if held else None


def compare(trie: RadixTrie, naive: NaiveIndex, chains: list[list[int]]) -> None:
    """Assert that both say the same about every backend and these chains."""
    for slot, held in naive.held.items():
        assert trie.blocks(slot) == len(held)
        assert trie.oldest_use(slot) == naive.oldest_use(slot)
    if not trie._dying:
        assert trie.total_blocks == len(set().union(*naive.held.values()))
    for chain in chains:
        expected = {slot: naive.depth(slot, chain) for slot in naive.held}
        assert trie.depths(array("Q", chain)) == {s: d for s, d in expected.items() if d}


def ring(head: Visit) -> dict[Visit, None]:
    """The visits of a ring, oldest first."""
    members: dict[Visit, None] = {}
    visit = head.newer
    while visit is not head:
        assert visit.newer.older is visit
        members[visit] = None
        visit = visit.newer
    return members


def stamps_of(node: Node) -> dict[int, Visit]:
    """The last use by each holder of a node."""
    return node.used if isinstance(node.used, dict) else {node.mask.bit_length() - 1: node.used}


def check_structure(trie: RadixTrie) -> None:
    """Assert every invariant that the trie's own docstring states, and its counts."""
    nodes = blocks = holders = 0
    shares = {share.lane: share for share in [*trie._shares.values(), *trie._dying]}
    assert len(shares) == len(trie._shares) + len(trie._dying)
    assert trie._lanes.live == sum(share.bit for share in trie._shares.values())
    sizes: dict[int, int] = dict.fromkeys(shares, 0)
    rings = {lane: ring(share.visits) for lane, share in shares.items()}
    stack: list[Node] = [trie._root]
    while stack:
        node = stack.pop()
        nodes += 1
        assert len(node.kids) == len(list(node.kids.values()))
        assert node.kids or node.kids is NO_KIDS
        for key, kid in node.kids.items():
            assert key == kid.run[0]
            assert kid.parent is node
            assert kid.mask
            assert kid.mask & ~node.mask == 0
            stamps = stamps_of(kid)
            assert isinstance(kid.used, dict) == (kid.mask.bit_count() > 1)
            assert set(stamps) == set(slots_of(kid.mask))
            for lane, visit in stamps.items():
                sizes[lane] += len(kid.run)
                assert visit in rings[lane]
                if node.parent is not None:
                    assert stamps_of(node)[lane].at >= visit.at
            same = node.parent is not None and len(node.kids) == 1
            assert not (same and kid.mask == node.mask and stamps == stamps_of(node))
            blocks += len(kid.run)
            holders += len(stamps)
            stack.append(kid)
    assert (nodes, blocks, holders) == (trie.nodes, trie.total_blocks, trie._holders)
    assert not NO_KIDS
    visits = 0
    for lane, share in shares.items():
        assert share.blocks == sizes[lane]
        visits += len(rings[lane])
        assert [v.at for v in rings[lane]] == sorted(v.at for v in rings[lane])
        for visit in rings[lane]:
            assert visit.leaf.use(lane) is visit
            assert all(kid.use(lane) is not visit for kid in visit.leaf.kids.values())
    assert visits == trie._visits
    assert len(trie._ages) <= len(trie._shares)
    assert all(share.blocks for share in trie._dying)


def check_caps(trie: RadixTrie) -> None:
    """Assert that the whole is not over its cap, and no backend over its own by more than a little."""
    assert all(share.blocks <= share.most for share in trie._shares.values())
    assert all(share.most <= 1.125 * share.capacity for share in trie._shares.values())
    assert trie.bytes <= trie.max_bytes
