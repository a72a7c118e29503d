"""The radix trie by example; its equality with a naive index is in tests/property."""

import gc
import random
import tracemalloc
from array import array

import pytest

from gateway.core.runs import WIDE, Fan
from gateway.core.trie import SLICE, RadixTrie
from tests.garbage import leaves_nothing
from tests.property.trie_oracle import check_structure


def chain(*blocks: int) -> "array[int]":
    return array("Q", blocks)


def trie_of(*slots: int, capacity: int = 1000) -> RadixTrie:
    trie = RadixTrie()
    for slot in slots:
        trie.add_backend(slot, capacity)
    return trie


def test_empty_trie_holds_nothing() -> None:
    trie = trie_of(0)
    assert trie.lookup(chain(1, 2)) == []
    assert trie.lookup(chain()) == []
    assert trie.oldest_use(0) is None


def test_lookup_gives_each_backend_its_own_depth() -> None:
    trie = trie_of(0, 255)
    trie.insert(0, chain(1, 2, 3, 4), 1.0)
    trie.insert(255, chain(1, 2), 2.0)
    assert trie.lookup(chain(1, 2, 3, 9)) == [(2, 1 << 255), (3, 1)]
    assert trie.depths(chain(1, 2, 3, 4, 5)) == {255: 2, 0: 4}


def test_growing_conversation_stays_one_node() -> None:
    trie = trie_of(0)
    for turn in range(1, 20):
        trie.insert(0, chain(*range(turn * 5)), float(turn))
    assert trie.nodes == 2
    assert trie.blocks(0) == trie.total_blocks == 95


def test_shared_blocks_are_stored_once() -> None:
    trie = trie_of(0, 1)
    trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(1, chain(1, 2, 3), 1.0)
    assert (trie.blocks(0), trie.blocks(1), trie.total_blocks) == (3, 3, 3)


def test_tail_of_the_longest_unused_prompt_goes_first() -> None:
    trie = trie_of(0, capacity=6)
    trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(0, chain(7, 8, 9), 2.0)
    trie.insert(0, chain(4, 5), 3.0)
    assert trie.depths(chain(1, 2, 3)) == {0: 1}
    assert trie.depths(chain(7, 8, 9)) == {0: 3}


def test_shared_head_outlives_its_tails() -> None:
    trie = trie_of(0, capacity=20)
    head = range(1, 6)
    for user in range(50):
        trie.insert(0, chain(*head, *range(100 * user + 100, 100 * user + 104)), float(user))
    trie.settle(0)
    assert trie.depths(chain(*head)) == {0: 5}
    assert trie.blocks(0) == 20


def test_chain_longer_than_the_capacity_keeps_its_head() -> None:
    trie = trie_of(0, capacity=4)
    trie.insert(0, chain(9), 1.0)
    trie.insert(0, chain(*range(10)), 2.0)
    assert trie.depths(chain(*range(10))) == {0: 4}


def test_zero_capacity_holds_nothing() -> None:
    trie = trie_of(0, capacity=0)
    trie.insert(0, chain(1, 2), 1.0)
    assert (trie.blocks(0), trie.nodes) == (0, 1)


def test_oldest_use_is_that_of_the_next_victim() -> None:
    trie = trie_of(0)
    trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(0, chain(1, 5), 4.0)
    assert trie.oldest_use(0) == 1.0
    trie.insert(0, chain(1, 2, 3), 6.0)
    assert trie.oldest_use(0) == 4.0


def test_time_running_backwards_keeps_the_order_of_calls() -> None:
    trie = trie_of(0, capacity=2)
    trie.insert(0, chain(1), 5.0)
    trie.insert(0, chain(2), 3.0)
    trie.insert(0, chain(3), 4.0)
    assert trie.depths(chain(1)) == {}
    assert trie.oldest_use(0) == 5.0


def test_undone_insert_leaves_what_was_known_before() -> None:
    trie = trie_of(0)
    trie.insert(0, chain(1, 2), 1.0)
    visit = trie.insert(0, chain(1, 2, 3, 4), 2.0)
    assert trie.trim(0, chain(1, 2, 3, 4), 2, visit) == 2
    assert trie.depths(chain(1, 2, 3, 4)) == {0: 2}


def test_undo_spares_blocks_used_by_a_later_request() -> None:
    trie = trie_of(0)
    failed = trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(0, chain(1, 2, 3), 2.0)
    assert trie.trim(0, chain(1, 2, 3), 0, failed) == 0
    assert trie.depths(chain(1, 2, 3)) == {0: 3}


def test_undo_spares_the_head_of_another_prompt() -> None:
    trie = trie_of(0)
    failed = trie.insert(0, chain(1, 2, 3, 4), 1.0)
    trie.insert(0, chain(1, 2, 8), 2.0)
    assert trie.trim(0, chain(1, 2, 3, 4), 0, failed) == 2
    assert trie.depths(chain(1, 2, 8)) == {0: 3}


def test_undo_on_one_backend_leaves_the_others() -> None:
    trie = trie_of(0, 1)
    trie.insert(1, chain(1, 2, 3), 1.0)
    visit = trie.insert(0, chain(1, 2, 3), 2.0)
    trie.trim(0, chain(1, 2, 3), 0, visit)
    assert trie.depths(chain(1, 2, 3)) == {1: 3}


def test_dropping_every_backend_leaves_only_the_root() -> None:
    rng = random.Random(1)
    trie = trie_of(0, 1, 2)
    for step in range(500):
        blocks = [*range(rng.randrange(8)), *(rng.getrandbits(60) for _ in range(5))]
        trie.insert(rng.randrange(3), chain(*blocks), float(step))
    for slot in range(3):
        trie.drop(slot)
    assert (trie.nodes, trie.total_blocks) == (1, 0)
    assert trie.bytes == RadixTrie().bytes


def test_removed_slot_starts_empty_when_reused() -> None:
    trie = trie_of(0, 1)
    for step in range(100):
        trie.insert(0, chain(1, 2, 3), float(step))
        trie.remove_backend(0)
        trie.add_backend(0, 10)
    assert trie.depths(chain(1, 2, 3)) == {}
    assert len(trie._ages) <= 2


def test_slot_outside_the_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 256"):
        RadixTrie().add_backend(256, 10)


def test_an_insert_leaves_a_little_over_the_capacity_for_when_the_request_has_ended() -> None:
    trie = trie_of(0, 1, capacity=800)
    for number in range(9):
        trie.insert(0, chain(*range(number * 100, number * 100 + 100)), float(number))
    assert trie.blocks(0) == 900
    trie.insert(0, chain(*range(900, 1000)), 9.0)
    assert trie.blocks(0) == 900
    trie.settle(1)
    assert trie.blocks(0) == 900
    trie.settle(0)
    assert trie.blocks(0) == 800
    trie.insert(0, chain(*range(1000, 1050)), 10.0)
    assert trie.depths(chain(*range(200, 300))) == {0: 100}
    assert not trie.sweep()
    assert trie.blocks(0) == 800
    assert trie.depths(chain(*range(200, 300))) == {0: 50}


def test_no_more_than_a_share_of_the_capacity_is_left_over() -> None:
    for capacity, over in ((7, 0), (80, 10), (8192, 1024), (20_000, 1024), (64_000, 2000)):
        trie = trie_of(0, capacity=capacity)
        trie.insert(0, array("Q", range(capacity + over)), 1.0)
        assert trie.blocks(0) == capacity + over
        trie.insert(0, chain(1 << 60, 1 << 61), 2.0)
        assert trie.blocks(0) == capacity + over
        trie.set_capacity(0, capacity)
        assert trie.blocks(0) == capacity


def test_sweeps_keep_room_below_the_byte_cap() -> None:
    trie = trie_of(0, capacity=10**6)
    trie.max_bytes = 400_000
    for number in range(4000):
        trie.insert(0, chain(*range(number * 9, number * 9 + 9)), float(number))
        assert trie.bytes <= 400_000
        if number > 2000:
            assert not trie.sweep()
            assert 380_000 < trie.bytes <= 394_000


def test_shrinking_capacity_evicts_at_once() -> None:
    trie = trie_of(0)
    trie.insert(0, chain(*range(50)), 1.0)
    trie.add_backend(0, 7)
    assert (trie.blocks(0), trie.capacity(0)) == (7, 7)


def test_byte_cap_holds_when_long_prompts_follow_short_ones() -> None:
    trie = RadixTrie(400_000)
    trie.add_backend(0, 10**9)
    for number in range(2000):
        trie.insert(0, chain(number), float(number))
    for number in range(200):
        long = chain(*range(10_000 * number, 10_000 * number + 5000))
        trie.insert(0, long, 5000.0 + number)
        assert trie.bytes <= 400_000
        assert trie.depths(long)[0] >= 1000
        check_structure(trie)
    assert trie.depths(chain(*range(1_990_000, 1_995_000))) == {0: 5000}


def test_what_has_no_room_at_all_leaves_nothing_behind() -> None:
    trie = RadixTrie(700)
    trie.add_backend(0, 100)
    for number in range(5):
        visit = trie.insert(0, chain(number, number + 10), float(number))
        assert trie.bytes <= 700
        assert trie.trim(0, chain(number, number + 10), 0, visit) <= 2
        check_structure(trie)
    trie.max_bytes = 100
    trie.insert(0, chain(8, 9), 9.0)
    assert trie.blocks(0) == 0


def test_long_prompt_after_many_short_ones_evicts_more_than_a_slice() -> None:
    trie = trie_of(0, capacity=4000)
    for number in range(4000):
        trie.insert(0, chain(10**6 + number), float(number))
    over = 2000 - trie.capacity(0) // 8
    trie.insert(0, chain(*range(2000)), 5000.0)
    assert trie.blocks(0) == 6000 - 64 - over // 8


def test_prompt_that_joins_what_a_thousand_others_had_cut_is_one_run() -> None:
    trie = trie_of(0, capacity=10**9)
    long = list(range(1, 20_001))
    for number in range(1000):
        trie.insert(0, chain(*long[: 20_000 - 20 * number]), float(number))
    assert trie.nodes == 1001
    trie.insert(0, chain(*long), 1000.0)
    assert trie.nodes == 2
    assert trie.depths(chain(*long)) == {0: 20_000}
    check_structure(trie)


def test_eviction_leaves_a_very_long_run_alone_until_it_is_used() -> None:
    trie = trie_of(0, capacity=10**9)
    long = list(range(1, 20_001))
    trie.insert(0, chain(*long[:5], 10**6), 0.0)
    trie.insert(0, chain(*long), 1.0)
    trie.set_capacity(0, 20_000)
    assert trie.nodes == 3
    assert trie.depths(chain(*long)) == {0: 20_000}
    trie.insert(0, chain(*long), 2.0)
    assert trie.nodes == 2
    check_structure(trie)


def test_broken_chains_never_break_the_trie() -> None:
    rng = random.Random(2)
    trie = trie_of(0, 1, capacity=30)
    for step in range(3000):
        blocks = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        trie.insert(step % 2, chain(*blocks), float(step))
        trie.lookup(chain(*reversed(blocks)))
        trie.trim(step % 2, chain(*blocks[::-1]), rng.randrange(4))
    for slot in (0, 1):
        trie.drop(slot)
    assert (trie.nodes, trie.total_blocks) == (1, 0)


def evict_trim_and_drop() -> RadixTrie:
    rng = random.Random(4)
    trie = trie_of(0, 1, 2, capacity=200)
    for step in range(2000):
        blocks = [*range(rng.randrange(8)), *(rng.getrandbits(60) for _ in range(5))]
        visit = trie.insert(step % 3, chain(*blocks), float(step))
        if step % 7 == 0:
            trie.trim(step % 3, chain(*blocks), 2, visit)
    trie.drop(0)
    trie.set_capacity(1, 100)
    trie.sweep()
    return trie


def test_evicted_prompts_leave_nothing_to_the_cycle_collector() -> None:
    leaves_nothing(evict_trim_and_drop)


def test_a_held_visit_keeps_no_later_one_alive() -> None:
    trie = trie_of(0, capacity=3)
    held = trie.insert(0, chain(1, 2, 3), 0.0)
    for step in range(1, 5):
        trie.insert(0, chain(*range(step * 10, step * 10 + 3)), float(step))
    assert held is not None
    assert held.newer is held.older
    assert held.newer.at == float("-inf")


@pytest.mark.parametrize(("new_blocks", "holders"), [(4, 1), (40, 1), (200, 1), (40, 8)])
def test_estimated_bytes_follow_real_memory(new_blocks: int, holders: int) -> None:
    rng = random.Random(7)
    trie = trie_of(*range(holders), capacity=10**9)
    count = 4000 // new_blocks + 300
    shared = [[rng.getrandbits(63) for _ in range(30)] for _ in range(5)]
    gc.collect()
    tracemalloc.start()
    for step in range(count):
        fresh = [rng.getrandbits(63) for _ in range(new_blocks)]
        for slot in range(holders):
            trie.insert(slot, chain(*shared[step % 5], *fresh), float(step))
    gc.collect()
    real, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < trie.bytes / real < 1.4


def test_the_last_use_is_that_of_the_deepest_held_block() -> None:
    trie = trie_of(0, 1)
    trie.insert(0, chain(1, 2, 3, 4), 1.0)
    trie.insert(0, chain(1, 2), 5.0)
    trie.insert(1, chain(1, 2, 3), 7.0)
    assert trie.last_use(0, chain(1, 2, 3, 4, 9), 4) == (1.0, 2)
    assert trie.last_use(0, chain(1, 2, 3, 4), 3) == (1.0, 1)
    assert trie.last_use(0, chain(1, 2, 3, 4), 2) == (5.0, 2)
    assert trie.last_use(1, chain(1, 2, 3, 4), 3) == (7.0, 3)
    assert trie.last_use(0, chain(8, 9), 2) is None


def test_blocks_used_between_two_times_are_counted_by_their_last_use() -> None:
    trie = trie_of(0, 1)
    trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(0, chain(7, 8), 2.0)
    trie.insert(0, chain(1, 5, 6), 3.0)
    trie.insert(1, chain(11, 12), 2.0)
    trie.insert(0, chain(9), 4.0)
    assert trie.used_between(0, 1.0, 9.0, 10) == 6
    assert trie.used_between(0, 1.0, 4.0, 10) == 5
    assert trie.used_between(0, 0.0, 3.0, 10) == 4
    assert trie.used_between(0, 4.0, 9.0, 0) == 0
    assert trie.used_between(0, 0.0, 9.0, 3) is None


def test_what_was_last_used_by_a_time_is_forgotten_and_nothing_younger() -> None:
    trie = trie_of(0, 1)
    trie.insert(0, chain(1, 2, 3), 1.0)
    trie.insert(1, chain(1, 2, 3), 1.0)
    trie.insert(0, chain(7, 8), 2.0)
    trie.insert(0, chain(1, 5), 3.0)
    assert trie.forget(0, 2.0) == 4
    assert trie.depths(chain(1, 2, 3)) == {0: 1, 1: 3}
    assert trie.depths(chain(7, 8)) == {}
    assert trie.depths(chain(1, 5)) == {0: 2, 1: 1}
    assert trie.forget(0, 2.5) == 0


def test_dropped_backend_is_forgotten_at_once_and_its_memory_in_slices() -> None:
    trie = trie_of(0, 1, capacity=10**6)
    prompts = [chain(number, 1, 2) for number in range(3 * SLICE)]
    for step, prompt in enumerate(prompts):
        trie.insert(0, prompt, float(step))
        trie.insert(1, prompt, float(step))
    trie.drop(0)
    assert all(trie.depths(prompt) == {1: 3} for prompt in prompts)
    assert (trie.blocks(0), trie.oldest_use(0)) == (0, None)
    trie.insert(0, prompts[0], 1e6)
    assert trie.depths(prompts[0]) == {0: 3, 1: 3}
    assert trie.depths(prompts[1]) == {1: 3}
    before = trie.bytes
    sweeps = 1
    while trie.sweep():
        sweeps += 1
    assert 2 <= sweeps <= 4
    assert trie.bytes < before
    assert trie.depths(prompts[0]) == {0: 3, 1: 3}


def test_no_call_forgets_more_than_a_slice() -> None:
    trie = trie_of(0, 1, capacity=10**6)
    for number in range(4 * SLICE):
        trie.insert(0, chain(number, 1, 2), float(number))
        trie.insert(1, chain(number, 1, 2), float(number))
    for call in (
        lambda: trie.set_capacity(0, 0),
        lambda: trie.forget(1, 1e9),
        lambda: trie.drop(1),
        lambda: trie.sweep(5),
    ):
        before = trie.total_blocks + trie._holders
        call()
        assert before - trie.total_blocks - trie._holders <= (1 + 3) * SLICE
    assert trie.nodes > 2 * SLICE
    while trie.sweep():
        pass
    assert (trie.nodes, trie.blocks(0), trie.blocks(1)) == (1, 0, 0)


def test_slot_dropped_again_and_again_needs_no_more_bits_than_have_memory_left() -> None:
    trie = trie_of(0, capacity=10**6)
    for turn in range(10):
        for number in range(SLICE + 5):
            trie.insert(0, chain(number, turn), float(turn))
        trie.drop(0)
        while trie.sweep():
            pass
        trie.insert(0, chain(7, 8, 9), float(turn))
        assert max(share.lane for share in trie._shares.values()) <= 256
        assert trie.depths(chain(7, 8, 9)) == {0: 3}


def test_lowered_byte_cap_is_met_in_slices() -> None:
    trie = trie_of(0, capacity=10**6)
    for number in range(4 * SLICE):
        trie.insert(0, chain(number), float(number))
    trie.max_bytes = 10_000
    trie.insert(0, chain(1, 2), 1e6)
    assert trie.bytes > 10_000
    while trie.sweep():
        pass
    assert trie.bytes <= 10_000
    assert trie.depths(chain(1, 2)) == {0: 2}


def test_what_was_dropped_goes_before_what_is_still_believed() -> None:
    trie = trie_of(0, 1, capacity=10**6)
    trie.insert(0, chain(9, 9, 9), 0.0)
    for number in range(10, 2 * SLICE):
        trie.insert(1, chain(number), float(number))
    trie.drop(1)
    trie.max_bytes = RadixTrie().bytes + 2_000
    while trie.sweep():
        pass
    assert trie.depths(chain(9, 9, 9)) == {0: 3}


def test_children_beyond_a_dicts_easy_growth_are_found_and_taken_out_again() -> None:
    trie = trie_of(0, capacity=WIDE + 100)
    for number in range(WIDE + 300):
        trie.insert(0, chain(number), float(number))
    while trie.sweep():
        pass
    assert isinstance(trie._root.kids, Fan)
    assert len(trie._root.kids) == WIDE + 100 == trie.blocks(0)
    assert trie.depths(chain(WIDE + 299)) == {0: 1}
    assert trie.depths(chain(5)) == {}
    trie.drop(0)
    while trie.sweep():
        pass
    assert (trie.nodes, len(trie._root.kids)) == (1, 0)


def test_forgetting_less_does_not_take_back_what_is_still_to_be_forgotten() -> None:
    trie = trie_of(0, capacity=10**6)
    for number in range(3 * SLICE):
        trie.insert(0, chain(number), float(number))
    trie.forget(0, float(2 * SLICE))
    trie.forget(0, 1.0)
    while trie.sweep():
        pass
    assert trie.oldest_use(0) == 2 * SLICE + 1
    assert trie.blocks(0) == SLICE - 1
