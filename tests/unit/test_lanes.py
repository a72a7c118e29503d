"""Lanes by example; the trie's property tests use them at random."""

from gateway.core.lanes import Lanes


def test_slot_has_its_own_number_while_that_is_clean() -> None:
    lanes = Lanes(256)
    assert [lanes.take(slot) for slot in (0, 255, 7)] == [0, 255, 7]
    assert lanes.live == 1 << 255 | 1 << 7 | 1
    assert lanes.moved == {}


def test_slot_moves_while_its_lane_is_not_clean_and_comes_home_later() -> None:
    lanes = Lanes(256)
    first = lanes.take(3)
    lanes.retire(first)
    second = lanes.take(3)
    lanes.retire(second)
    third = lanes.take(3)
    assert (first, second, third) == (3, 256, 257)
    assert lanes.live == 1 << 257
    lanes.free(first)
    lanes.retire(third)
    assert lanes.take(3) == 3
    assert lanes.moved == {}


def test_lowest_clean_lane_is_taken_again() -> None:
    lanes = Lanes(4)
    for slot in (0, 1, 2):
        lanes.retire(lanes.take(slot))
    assert [lanes.take(slot) for slot in (0, 1, 2)] == [4, 5, 6]
    lanes.free(5)
    lanes.retire(6)
    assert lanes.take(2) == 5


def test_answers_name_slots_whatever_their_lanes() -> None:
    lanes = Lanes(4)
    for slot in (0, 2):
        lanes.retire(lanes.take(slot))
    lanes.take(2)
    lanes.take(0)
    lanes.take(1)
    held = [(5, 1 << 4 | 1 << 1), (9, 1 << 5)]
    assert lanes.by_slot(held) == [(5, 1 << 2 | 1 << 1), (9, 1)]
