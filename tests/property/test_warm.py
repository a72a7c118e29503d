"""What is written down and read back answers as before, whatever happens meanwhile."""

import itertools
from array import array
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gateway.core.export
import gateway.core.restore
from gateway.core.export import export
from gateway.core.fleet import Fleet
from gateway.core.learn import OutputLengths
from gateway.core.restore import Restoration, Saved
from gateway.core.types import Snapshot
from tests.core_kit import TOKENS_PER_BLOCK
from tests.core_kit import settings as core_settings
from tests.property.trie_oracle import check_structure

NAMES = ("b0", "b1", "b2")
WAY = "bytes 256"
Op = tuple[int, str, bool]

words = st.text("ab", min_size=1, max_size=14)
operations = st.lists(st.tuples(st.integers(0, 2), words, st.booleans()), max_size=40)


class World:
    """A fleet under random prompts; equal words give equal chains in every world."""

    ids: dict[tuple[int, str], int] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, capacity: int = 1000) -> None:
        self.fleet = Fleet(core_settings(NAMES), Random(1))
        self.now = 0.0
        self.see(capacity)

    def see(self, capacity: int) -> None:
        for number, name in enumerate(NAMES):
            tokens = int(capacity * TOKENS_PER_BLOCK)
            told = Snapshot(0.0, kv_capacity_tokens=tokens, start_time=1000.0 + 10 * number)
            self.fleet.observe(self.fleet.by_name[name], told)

    @classmethod
    def chain(cls, word: str) -> "array[int]":
        before = 0
        chain = array("Q")
        for letter in word:
            before = cls.ids.setdefault((before, letter), Random(len(cls.ids)).getrandbits(64))
            chain.append(before)
        return chain

    def do(self, op: Op, *, forget: bool = True) -> None:
        index, word, trims = op
        slot = self.fleet.by_name[NAMES[index]].slot
        self.now += 1.0
        if trims and forget:
            self.fleet.trie.trim(slot, self.chain(word), len(word) // 2)
        else:
            self.fleet.trie.insert(slot, self.chain(word), self.now)

    def depths(self, word: str) -> dict[str, int]:
        found = self.fleet.trie.depths(self.chain(word))
        return {name: found.get(self.fleet.by_name[name].slot, 0) for name in NAMES}

    def pieces(self) -> Iterator[bytes]:
        return export(self.fleet, OutputLengths(), lambda _: WAY, self.now)


def reread(pieces: list[bytes], capacity: int = 1000) -> World:
    world = World(capacity)
    restoration = Restoration(Saved(pieces), world.fleet, OutputLengths(), lambda _: WAY, -1000.0)
    while restoration.step():
        pass
    assert sorted(restoration.restored) == list(NAMES)
    check_structure(world.fleet.trie)
    return world


@given(before=operations, asked=st.lists(words, max_size=10), slots=st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_every_lookup_and_the_order_of_eviction_are_as_before(
    before: list[Op], asked: list[str], slots: int
) -> None:
    old = World()
    for op in before:
        old.do(op)
    new = reread(list(old.pieces()))
    asked += [word for _, word, _ in before]
    for word in asked:
        assert new.depths(word) == old.depths(word)
    for world in (old, new):
        for name in NAMES:
            world.fleet.trie.set_capacity(world.fleet.by_name[name].slot, slots)
    for word in asked:
        assert new.depths(word) == old.depths(word)
    for name in NAMES:
        slot = old.fleet.by_name[name].slot
        assert new.fleet.trie.blocks(slot) == old.fleet.trie.blocks(slot)
        uses = [world.fleet.trie.oldest_use(slot) for world in (old, new)]
        assert uses[0] is None or uses[1] == uses[0] - 1000.0


@given(before=operations, slots=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_smaller_cache_gets_what_was_used_last(before: list[Op], slots: int) -> None:
    old = World()
    for op in before:
        old.do(op)
    new = reread(list(old.pieces()), capacity=slots)
    for name in NAMES:
        old.fleet.trie.set_capacity(old.fleet.by_name[name].slot, slots)
    for _, word, _ in before:
        assert new.depths(word) == old.depths(word)


@pytest.mark.parametrize("forget", [False, True])
@given(before=operations, during=operations)
@settings(max_examples=100, deadline=None)
def test_what_changes_between_two_slices_is_not_lost(
    *, forget: bool, before: list[Op], during: list[Op]
) -> None:
    old = World()
    for op in before:
        old.do(op)
    asked = {word for _, word, _ in before + during}
    seen = {word: [old.depths(word)] for word in asked}
    pieces = []
    rest = iter(during)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.core.export, "SLICE_NODES", 1)
        for piece in old.pieces():
            pieces.append(piece)
            for change in itertools.islice(rest, 1):
                old.do(change, forget=forget)
                for word in asked:
                    seen[word].append(old.depths(word))
    new = reread(pieces)
    for word in asked:
        for name, depth in new.depths(word).items():
            at_times = [depths[name] for depths in seen[word]]
            assert min(at_times) <= depth <= max(at_times)


@given(before=operations, live=operations)
@settings(max_examples=60, deadline=None)
def test_what_was_used_since_the_start_stays_and_is_younger(
    before: list[Op], live: list[Op]
) -> None:
    old, new = World(), World()
    for op in before:
        old.do(op)
    for op in live:
        new.do(op, forget=False)
    alone = {word: new.depths(word) for _, word, _ in before + live}
    restoration = Restoration(
        Saved(list(old.pieces())), new.fleet, OutputLengths(), lambda _: WAY, -1000.0
    )
    while restoration.step():
        pass
    check_structure(new.fleet.trie)
    for word, held in alone.items():
        saved = old.depths(word)
        assert new.depths(word) == {name: max(held[name], saved[name]) for name in NAMES}
    for name in NAMES:  # what is old goes first
        slot = new.fleet.by_name[name].slot
        mine = len({id_ for i, w, _ in live if NAMES[i] == name for id_ in World.chain(w)})
        new.fleet.trie.set_capacity(slot, mine)
    for word, held in alone.items():
        for name in NAMES:
            assert new.depths(word)[name] >= held[name]


@given(cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_no_bytes_raise_anything_but_a_fault(cut: int, at: int, byte: int) -> None:
    world = World()
    for number, word in enumerate(["ab", "abb", "aab", "abab"]):
        world.do((number % 3, word, False))
    pieces = list(world.pieces())
    raw = bytearray(pieces[-1])
    raw[at % len(raw)] = byte
    spoilt = [*pieces[:-1], bytes(raw[: len(raw) - cut % 3])]
    try:
        saved = Saved(spoilt)
    except gateway.core.restore.SavedFault:
        return
    restoration = Restoration(saved, World().fleet, OutputLengths(), lambda _: WAY, 0.0)
    while restoration.step():
        pass
