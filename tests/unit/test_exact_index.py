"""The table of what engines tell, and how a lookup is put together from it and the trie."""

import random
from array import array

import pytest

from gateway.core.exact_index import MOST_BLOCKS, ExactIndex, beyond, merge

PROMPT = array("Q", range(1000, 1010))


def index_of(*depths: int) -> ExactIndex:
    """Slot i holds the first `depths[i]` blocks of PROMPT."""
    index = ExactIndex()
    for slot, depth in enumerate(depths):
        index.extend(index.take(slot), PROMPT[:depth])
        index.set_live(slot, frozenset({"m"}))
    return index


def test_lookup_tells_every_depth_once_rising() -> None:
    index = index_of(4, 0, 10, 4, 1)
    lanes, slots = index.live["m"]
    assert slots == 0b11111
    assert index.lookup(PROMPT, lanes, 99) == [(1, 0b10000), (4, 0b01001), (10, 0b00100)]


def test_lookup_keeps_to_the_first_blocks_and_the_asked_lanes() -> None:
    index = index_of(4, 0, 10)
    assert index.lookup(PROMPT, 0b111, 3) == [(3, 0b101)]
    assert index.lookup(PROMPT, 0b001, 99) == [(4, 0b001)]
    assert index.lookup(PROMPT, 0b010, 99) == []
    assert index.lookup(PROMPT, 0b111, 0) == []
    assert index.lookup(array("Q"), 0b111, 9) == []
    assert index.lookup(array("Q", [5]), 0b111, 9) == []


def test_lookup_equals_counting_block_by_block() -> None:
    rng = random.Random(4)
    for _ in range(200):
        depths = [rng.choice([0, 1, 3, rng.randrange(11)]) for _ in range(rng.randrange(1, 40))]
        index = index_of(*depths)
        most = rng.randrange(12)
        found = {}
        for depth, mask in index.lookup(PROMPT, index.live["m"][0], most):
            for slot in range(len(depths)):
                if mask >> slot & 1:
                    assert slot not in found
                    found[slot] = depth
        assert found == {s: min(d, most) for s, d in enumerate(depths) if min(d, most)}


def test_a_backend_is_live_for_its_models_only() -> None:
    index = index_of(3, 3)
    index.set_live(1, frozenset({"m", "sql"}))
    assert index.live == {"m": (0b11, 0b11), "sql": (0b10, 0b10)}

    index.set_live(0, frozenset())
    assert index.live["m"] == (0b10, 0b10)


def test_a_buried_backend_begins_again_under_another_bit() -> None:
    index = index_of(3, 3)
    index.bury(0, [dict(enumerate(PROMPT[:3]))])
    assert index.live["m"] == (0b10, 0b10)
    lane = index.take(0)
    assert lane > 0

    lanes, slots = index.live["m"]
    assert slots == 0b11
    assert index.lookup(PROMPT, lanes, 9) == [(3, 0b10)]
    index.extend(lane, PROMPT[:2])
    assert index.lookup(PROMPT, lanes, 9) == [(2, 0b01), (3, 0b10)]

    assert index.sweep(2)
    assert not index.sweep(2)
    assert index.lookup(PROMPT, lanes, 9) == [(2, 0b01), (3, 0b10)]
    index.bury(0, [dict(enumerate(PROMPT[:2]))])
    index.sweep(9)
    assert index.take(0) == 0


def test_memory_goes_back_to_nothing() -> None:
    index = index_of(10, 10)
    for slot in (0, 1):
        index.bury(slot, [{own: own for own in PROMPT}])
    while index.sweep(3):
        pass
    assert index.bytes == 0
    assert index.stretches == {}


@pytest.mark.parametrize(
    ("trie", "told", "exact", "recent", "merged"),
    [
        ([], [], 0b1, [], []),
        ([(5, 0b11)], [], 0b00, [], [(5, 0b11)]),
        ([(5, 0b11)], [], 0b01, [], [(5, 0b10)]),
        ([(5, 0b11)], [(7, 0b01)], 0b01, [], [(5, 0b10), (7, 0b01)]),
        ([(5, 0b10)], [(5, 0b01)], 0b01, [], [(5, 0b11)]),
        ([(9, 0b01)], [(5, 0b01)], 0b01, [(9, 0b01)], [(9, 0b01)]),
        ([(2, 0b10), (9, 0b01)], [(9, 0b10)], 0b11, [(9, 0b01)], [(9, 0b11)]),
    ],
)
def test_merge_believes_engines_where_they_are_exact_and_the_trie_elsewhere(
    trie: list[tuple[int, int]],
    told: list[tuple[int, int]],
    exact: int,
    recent: list[tuple[int, int]],
    merged: list[tuple[int, int]],
) -> None:
    assert merge(trie, told, exact, recent) == merged


def test_beyond_is_what_one_lookup_found_deeper_than_the_other() -> None:
    told = [(2, 0b001), (5, 0b010), (9, 0b100)]
    assert list(beyond([(1, 0b001), (5, 0b010), (9, 0b100)], told, 0b111, 99)) == []
    assert list(beyond([(3, 0b001), (6, 0b110)], told, 0b111, 99)) == [(6, 0b010), (3, 0b001)]
    assert list(beyond([(3, 0b001), (6, 0b110)], told, 0b001, 99)) == [(3, 0b001)]
    assert list(beyond([(3, 0b001), (6, 0b110)], told, 0b111, 5)) == [(3, 0b001)]
    assert list(beyond([(4, 0b1)], [], 0b1, 99)) == [(4, 0b1)]


def test_a_conversation_held_by_many_is_as_many_stretches_as_there_are_depths() -> None:
    index = ExactIndex()
    chain = list(range(1, 101))
    for slot in range(8):
        lane = index.take(slot)
        before = 0
        for own in chain[: 100 - 10 * (slot % 4)]:  # told one by one
            index.extend(lane, [own], before)
            before = own
    assert len(set(index.stretches.values())) == 4
    for lane in (4, 5, 6, 7):
        index.shrink(lane, chain[5:][::-1])
    assert len(set(index.stretches.values())) == 5


def test_a_block_lost_in_the_middle_ends_what_is_held_there() -> None:
    index = index_of(10, 10)
    index.shrink(0, [PROMPT[4]])
    assert index.lookup(PROMPT, 0b11, 99) == [(4, 0b01), (10, 0b10)]
    index.shrink(1, [PROMPT[0], PROMPT[9]])
    assert index.lookup(PROMPT, 0b11, 99) == [(4, 0b01)]
    index.extend(0, [PROMPT[4]])
    assert index.lookup(PROMPT, 0b11, 99) == [(10, 0b01)]


def test_no_stretch_is_so_long_that_moving_its_border_would_stall() -> None:
    index = ExactIndex()
    lane = index.take(0)
    for own in range(1, 3000):
        index.add(lane, own, own - 1)
    longest = max(len(there.blocks) for there in index.stretches.values())
    assert longest == MOST_BLOCKS
    assert len(set(index.stretches.values())) == -(-2999 // MOST_BLOCKS)
    index.extend(index.take(1), range(5000, 8000), None)
    assert max(len(there.blocks) for there in index.stretches.values()) == MOST_BLOCKS
    assert index.lookup(array("Q", range(5000, 8000)), 0b11, 9999) == [(3000, 0b10)]
