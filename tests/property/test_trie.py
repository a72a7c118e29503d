"""The radix trie equals a naive index under any order of operations."""

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

import gateway.core.paths
import gateway.core.trie
from gateway.core.trie import RadixTrie, Visit
from tests.property.trie_oracle import NaiveIndex, check_caps, check_structure, compare

SLOTS = (0, 3, 200)


class TrieMachine(RuleBasedStateMachine):
    """Chains are made from few short words, so that they share, split and extend each other."""

    chains = Bundle("chains")

    @initialize(known=st.lists(st.tuples(st.sampled_from(SLOTS), st.text("ab", max_size=12))))
    def start(self, known: list[tuple[int, str]]) -> None:
        self.trie = RadixTrie()
        self.naive = NaiveIndex()
        self.now = 0.0
        self.next_block = 1
        self.ids: dict[tuple[int, str], int] = {}
        self.seen: list[list[int]] = [[]]
        self.visits: list[tuple[int, list[int], Visit, int]] = []
        for slot in SLOTS:
            self.trie.add_backend(slot, 40)
            self.naive.add_backend(slot, 40)
        for slot, word in known:
            self.insert(slot, self.new_chain(word), 0.5)

    def chained(self, word: str) -> list[int]:
        """One id per (block before, letter), as chained hashing gives."""
        chain: list[int] = []
        before = 0
        for letter in word:
            before = self.ids.setdefault((before, letter), len(self.ids) + 1)
            chain.append(before)
        return chain

    @rule(target=chains, word=st.text("ab", max_size=30))
    def new_chain(self, word: str) -> list[int]:
        self.seen.append(self.chained(word))
        return self.seen[-1]

    @rule(slot=st.sampled_from(SLOTS), chain=chains, tick=st.sampled_from([0.0, 0.5]))
    def insert(self, slot: int, chain: list[int], tick: float) -> None:
        self.now += tick
        visit = self.trie.insert(slot, array("Q", chain), self.now)
        check_caps(self.trie)
        self.trie.settle(slot)
        number = self.naive.insert(slot, chain, self.now)
        if visit is not None:
            self.visits.append((slot, chain, visit, number))

    @rule(slot=st.sampled_from(SLOTS), chain=chains, depth=st.integers(0, 30))
    def trim(self, slot: int, chain: list[int], depth: int) -> None:
        gone = self.trie.trim(slot, array("Q", chain), depth)
        assert gone == self.naive.trim(slot, chain, depth, None)

    @rule(pick=st.integers(0, 1000), depth=st.integers(0, 30))
    def undo(self, pick: int, depth: int) -> None:
        if self.visits:
            slot, chain, visit, number = self.visits[pick % len(self.visits)]
            gone = self.trie.trim(slot, array("Q", chain), depth, visit)
            assert gone == self.naive.trim(slot, chain, depth, number)

    @rule(slot=st.sampled_from(SLOTS), capacity=st.integers(0, 60))
    def resize(self, slot: int, capacity: int) -> None:
        self.trie.set_capacity(slot, capacity)
        self.naive.set_capacity(slot, capacity)

    @rule(slot=st.sampled_from(SLOTS))
    def drop(self, slot: int) -> None:
        self.trie.drop(slot)
        self.naive.drop(slot)

    @rule(slot=st.sampled_from(SLOTS), chain=chains)
    def last_use(self, slot: int, chain: list[int]) -> None:
        hashes = array("Q", chain)
        depth = self.trie.depths(hashes).get(slot, 0)
        assert self.trie.last_use(slot, hashes, depth) == self.naive.last_use(slot, chain)

    @rule(slot=st.sampled_from(SLOTS), long=st.floats(0, 9), short=st.floats(0, 9))
    def used_between(self, slot: int, long: float, short: float) -> None:
        span = self.now - long, self.now - short
        found = self.trie.used_between(slot, *span, visits=10_000)
        assert found == self.naive.used_between(slot, *span)

    @rule(slot=st.sampled_from(SLOTS), ago=st.sampled_from([0.0, 0.5, 2.0]))
    def forget(self, slot: int, ago: float) -> None:
        gone = self.trie.forget(slot, self.now - ago)
        assert gone == self.naive.forget(slot, self.now - ago)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "trie"):
            compare(self.trie, self.naive, self.seen[-12:])
            check_structure(self.trie)
            check_caps(self.trie)


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class SlicedMachine(TrieMachine):
    """As above, but one node is all that a call may forget, and two children are many.

    A drop is seen at once, the rest when it has been swept: what is only too much is swept here
    before anything else happens, what was dropped may stay for long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gateway.core.trie, "SLICE", 1)
        self.patch.setattr(gateway.core.paths, "WIDE", 1)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(slot=st.sampled_from(SLOTS), capacity=st.integers(0, 60))
    def resize(self, slot: int, capacity: int) -> None:
        super().resize(slot, capacity)
        sweep(self.trie)

    @rule(slot=st.sampled_from(SLOTS), ago=st.sampled_from([0.0, 0.5, 2.0]))
    def forget(self, slot: int, ago: float) -> None:
        before = self.trie.blocks(slot)
        self.trie.forget(slot, self.now - ago)
        sweep(self.trie)
        assert before - self.trie.blocks(slot) == self.naive.forget(slot, self.now - ago)

    @rule(nodes=st.integers(1, 5))
    def sweep_a_little(self, nodes: int) -> None:
        self.trie.sweep(nodes)

    @rule(slot=st.sampled_from(SLOTS))
    def replace(self, slot: int) -> None:
        self.trie.remove_backend(slot)
        self.trie.add_backend(slot, 40)
        self.naive.add_backend(slot, 40)


TestSlicedMachine = SlicedMachine.TestCase
TestSlicedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def sweep(trie: RadixTrie) -> None:
    """Give back whatever there is, a node a time; the end must come."""
    most = trie._visits + trie.nodes + 10
    while trie.sweep(1):
        most -= 1
        assert most


@pytest.mark.parametrize(("part", "wide"), [(256, 16_384), (1, 2)])
def test_twenty_thousand_random_steps_equal_the_naive_index(
    part: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.core.trie, "SLICE", part)
    monkeypatch.setattr(gateway.core.paths, "WIDE", wide)
    rng = random.Random(3)
    trie, naive = RadixTrie(), NaiveIndex()
    slots = range(6)
    for slot in slots:
        trie.add_backend(slot, 300)
        naive.add_backend(slot, 300)
    chains: list[list[int]] = [[1]]
    recent: list[tuple[int, list[int], Visit, int]] = []
    dying = 0
    for step in range(20_000):
        slot, chain = rng.choice(slots), _next_chain(rng, chains)
        if recent and rng.random() < 0.1:  # the same prompt again, before the first has ended
            slot, chain = recent[-1][:2]
        chains = [*chains[-49:], chain]
        visit = trie.insert(slot, array("Q", chain), step / 10)
        trie.settle(slot)
        number = naive.insert(slot, chain, step / 10)
        assert visit is not None
        recent = [*recent[-5:], (slot, chain, visit, number)]
        if rng.random() < 0.1:
            undone, words, mark, mark_number = rng.choice(recent)
            depth = rng.randrange(len(words) + 1)
            gone = trie.trim(undone, array("Q", words), depth, mark)
            assert gone == naive.trim(undone, words, depth, mark_number)
        if step % 97 == 0:
            trie.drop(slot)
            naive.drop(slot)
            dying = max(dying, len(trie._dying))
        if step % 499 == 0:
            capacity = rng.randrange(100, 400)
            trie.set_capacity(slot, capacity)
            naive.set_capacity(slot, capacity)
            sweep(trie)
        if step % 20 == 0:
            trie.sweep(2)
            compare(trie, naive, rng.sample(chains, min(3, len(chains))))
        if step % 100 == 0:
            check_structure(trie)
            check_caps(trie)
    assert (dying > 1) == (part == 1)
    for slot in slots:
        trie.drop(slot)
    sweep(trie)
    assert (trie.nodes, trie.total_blocks, trie._holders, trie._visits) == (1, 0, 0, 0)
    assert trie._lanes.moved == {} or part == 1


def _next_chain(rng: random.Random, chains: list[list[int]]) -> list[int]:
    base: list[int] = []
    if rng.random() < 0.75:
        known = rng.choice(chains)
        base = known[: rng.randrange(1, len(known) + 1)]
    grown = base + [rng.getrandbits(63) for _ in range(rng.randrange(0 if base else 1, 20))]
    return grown[:120]


def test_byte_cap_holds_and_evicts_what_is_longest_unused_anywhere() -> None:
    rng = random.Random(5)
    cap = 200_000
    trie = RadixTrie(cap)
    for slot in range(8):
        trie.add_backend(slot, 1_000_000)
    chains: list[list[int]] = [[1]]
    for step in range(4_000):
        chain = _next_chain(rng, chains)
        chains = [*chains[-49:], chain]
        trie.insert(rng.randrange(8), array("Q", chain), float(step))
        assert trie.bytes <= cap
        if step % 50 == 0:
            check_structure(trie)
    oldest = [use for slot in range(8) if (use := trie.oldest_use(slot)) is not None]
    assert len(oldest) == 8
    assert trie.bytes > 0.9 * cap
    # Global order: no slot keeps a use much older than what another has already lost.
    assert max(oldest) - min(oldest) < 300
