"""The trie's parts by example."""

from array import array

import pytest

from gateway.core.runs import Node, Share, Visit, common, depth_of, slots_of


def test_ring_gives_the_oldest_first() -> None:
    share = Share(10, 0)
    nowhere = share.visits.leaf
    first, second = Visit(1.0, nowhere), Visit(2.0, nowhere)
    assert share.oldest() is None
    first.join(share.visits)
    second.join(share.visits)
    assert share.oldest() is first
    first.leave()
    assert share.oldest() is second
    second.leave()
    assert share.oldest() is None


@pytest.mark.parametrize("same", range(1, 9))
@pytest.mark.parametrize("rest", [0, 1, 5])
def test_common_finds_where_two_chains_part(same: int, rest: int) -> None:
    run = array("Q", range(8))
    hashes = array("Q", [99, *range(same), *range(100, 100 + rest)])
    assert common(run, hashes, 1) == same


def test_slots_are_the_set_bits() -> None:
    assert list(slots_of(1 << 255 | 0b1010)) == [1, 3, 255]
    assert list(slots_of(0)) == []


def test_depth_counts_blocks_from_the_root() -> None:
    root = Node(array("Q"), -1, None, {})
    above = Node(array("Q", [1, 2]), 1, root, {})
    assert depth_of(Node(array("Q", [3]), 1, above, {})) == 3
    assert depth_of(root) == 0
