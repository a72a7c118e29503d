"""The exact index equals a plain table of block -> holders under any order of operations."""

import gc
import random
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import gateway.core.exact_index
from gateway.core.exact_index import ExactIndex, Stretch
from tests.garbage import leaves_nothing

SLOTS = (0, 1, 70)


class IndexMachine(RuleBasedStateMachine):
    """Chains are paths in a small tree; holders come and go in any part of them."""

    most_blocks = 256

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gateway.core.exact_index, "MOST_BLOCKS", self.most_blocks)

    def teardown(self) -> None:
        self.patch.undo()

    @initialize()
    def start(self) -> None:
        self.index = ExactIndex()
        self.lanes = {slot: self.index.take(slot) for slot in SLOTS}
        self.held: dict[int, set[int]] = {slot: set() for slot in SLOTS}
        self.ids: dict[tuple[int, str], int] = {}
        self.parents: dict[int, int] = {}
        self.words = ["ab"]

    def chained(self, word: str) -> list[int]:
        """One id per (block before, letter), as chained hashing gives."""
        chain: list[int] = []
        before = 0
        for letter in word:
            own = self.ids.setdefault((before, letter), len(self.ids) + 1)
            self.parents[own] = before
            chain.append(own)
            before = own
        return chain

    @rule(
        slot=st.sampled_from(SLOTS),
        word=st.text("ab", min_size=1, max_size=24),
        start=st.integers(0, 23),
        known=st.booleans(),
    )
    def extend(self, slot: int, word: str, start: int, known: bool) -> None:
        chain = self.chained(word)
        start %= len(chain)
        self.words.append(word)
        before = ([0, *chain])[start] if known else None
        self.index.extend(self.lanes[slot], chain[start:], before)
        self.held[slot].update(chain[start:])

    @rule(slot=st.sampled_from(SLOTS), pick=st.integers(0, 99), more=st.text("ab", max_size=9))
    def decode(self, slot: int, pick: int, more: str) -> None:
        """One block after another, as a running sequence tells them."""
        word = self.words[pick % len(self.words)]
        chain = self.chained(word + more)
        for at in range(len(word), len(chain)):
            self.index.add(self.lanes[slot], chain[at], chain[at - 1])
            self.held[slot].add(chain[at])
        self.words.append(word + more)

    @rule(slot=st.sampled_from(SLOTS), pick=st.integers(0, 99), keep=st.integers(0, 23))
    def evict_tail(self, slot: int, pick: int, keep: int) -> None:
        chain = self.chained(self.words[pick % len(self.words)])
        gone = chain[keep:][::-1]
        self.index.shrink(self.lanes[slot], gone)
        self.held[slot].difference_update(gone)

    @rule(slot=st.sampled_from(SLOTS), picks=st.lists(st.integers(0, 200), max_size=9))
    def evict_any(self, slot: int, picks: list[int]) -> None:
        self.index.shrink(self.lanes[slot], picks)
        self.held[slot].difference_update(picks)

    @rule(slot=st.sampled_from(SLOTS))
    def clear(self, slot: int) -> None:
        self.index.bury(slot, [{own: own for own in self.held[slot]}])
        self.lanes[slot] = self.index.take(slot)
        self.held[slot] = set()

    @rule(blocks=st.integers(1, 30))
    def sweep(self, blocks: int) -> None:
        self.index.sweep(blocks)

    @rule(word=st.text("ab", min_size=1, max_size=24), most=st.integers(0, 30), few=st.booleans())
    def lookup(self, word: str, most: int, few: bool) -> None:
        self.check_lookup(word, most, SLOTS[:2] if few else SLOTS)

    def check_lookup(self, word: str, most: int, slots: tuple[int, ...]) -> None:
        chain = self.chained(word)
        expected = {}
        for slot in slots:
            depth = 0
            while depth < min(most, len(chain)) and chain[depth] in self.held[slot]:
                depth += 1
            if depth:
                expected[slot] = depth
        lanes = sum(1 << self.lanes[slot] for slot in slots)
        told = self.index.lookup(array("Q", chain), lanes, most)
        assert [depth for depth, _ in told] == sorted({*expected.values()})
        assert {
            slot: depth for depth, mask in told for slot in SLOTS if mask >> slot & 1
        } == expected

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "index"):
            return
        for word in self.words[-6:]:
            self.check_lookup(word, 99, SLOTS)
        for slot, lane in self.lanes.items():
            masks = self.index.stretches.items()
            assert {own for own, there in masks if there.mask >> lane & 1} == self.held[slot]
        if not self.index._dying:
            assert set(self.index.stretches) == set().union(*self.held.values())
        self.check_structure()

    def check_structure(self) -> None:
        """Every stretch is a path, in the table by each of its blocks, and refers downwards only."""
        table = self.index.stretches
        for there in set(table.values()):
            assert 0 < len(there.blocks) <= self.most_blocks
            assert there.mask
            assert all(table[own] is there for own in there.blocks)
            before = there.before
            for own in there.blocks:
                assert before in (None, self.parents[own])
                before = own
            below = list(self.below(there))
            assert len(below) < 60
            assert all(part.blocks or part.below is None for part in below)
        assert sum(len(there.blocks) for there in set(table.values())) == len(table)

    def below(self, there: Stretch) -> Iterator[Stretch]:
        while there.below is not None:
            there = there.below
            yield there


class ShortMachine(IndexMachine):
    """Stretches are full soon."""

    most_blocks = 3


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestShortMachine = ShortMachine.TestCase
TestShortMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def move_borders() -> ExactIndex:
    index = ExactIndex()
    lanes = [index.take(slot) for slot in range(4)]
    chain = list(range(1, 200))
    for lane in lanes:
        index.extend(lane, chain, 0)
    for step in range(400):
        lane = lanes[1 + step % 3]
        end = 1 + step * 37 % 190
        index.shrink(lane, chain[end:][::-1])
        for at in range(end, len(chain)):
            index.add(lane, chain[at], chain[at - 1])
    assert len(set(index.stretches.values())) <= 8
    assert sum(isinstance(thing, Stretch) for thing in gc.get_objects()) <= 8
    return index


def test_borders_that_move_to_and_fro_leave_nothing_behind() -> None:
    leaves_nothing(move_borders)


@pytest.mark.parametrize("machine", [IndexMachine, ShortMachine])
def test_five_thousand_random_steps_equal_the_plain_table(machine: type[IndexMachine]) -> None:
    rng = random.Random(machine.most_blocks)
    model = machine()
    model.start()
    try:
        for step in range(5_000):
            slot, pick, word = rng.choice(SLOTS), rng.randrange(100), random_word(rng, model.words)
            match rng.randrange(12):
                case 0 | 1 | 2:
                    model.extend(slot, word, rng.choice([0, 0, rng.randrange(24)]), pick % 4 > 0)
                case 3 | 4 | 5:
                    model.decode(slot, pick, word[-(pick % 5) :])
                case 6 | 7 | 8 | 9:
                    model.evict_tail(slot, pick, rng.randrange(12))
                case 10:
                    model.evict_any(slot, [rng.randrange(len(model.ids) + 1)])
                case _ if pick < 10:
                    model.clear(slot)
            model.sweep(3)
            del model.words[:-12]
            if step % 10 == 0:
                model.agree()
    finally:
        model.teardown()


def random_word(rng: random.Random, words: list[str]) -> str:
    known = rng.choice(words)
    return (known[: rng.randrange(len(known) + 1)] + "".join(rng.choices("ab", k=4)))[:24]
