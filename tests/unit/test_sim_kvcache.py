"""The block pool: sharing, reviving, evicting, giving back."""

from gateway.sim.kvcache import BlockPool


def filled(hashes: list[int], total: int = 8) -> BlockPool:
    pool = BlockPool(total)
    pool.take(len(hashes))
    for block in hashes:
        assert pool.publish(block)
    return pool


def test_match_stops_at_the_first_missing_block() -> None:
    pool = filled([1, 2, 4])

    assert pool.match([1, 2, 3, 4], 4) == (2, 0)
    assert pool.match([1, 2, 3, 4], 1) == (1, 0)


def test_released_blocks_are_idle_until_held_again() -> None:
    pool = filled([1, 2])
    pool.release([1, 2], 0)

    assert (pool.idle, pool.shared, pool.free) == (2, 0, 8)
    assert pool.match([1, 2], 2) == (2, 2)
    pool.hold([1, 2])
    assert (pool.idle, pool.shared, pool.free) == (0, 2, 6)


def test_blank_blocks_go_before_idle_and_tails_before_heads() -> None:
    pool = filled([1, 2, 3])
    pool.release([1, 2, 3], 0)

    pool.take(6)

    assert pool.match([1, 2, 3], 3) == (2, 2)


def test_a_second_copy_stays_private() -> None:
    pool = filled([1])
    pool.take(1)

    assert not pool.publish(1)
    pool.release([], 1)
    assert (pool.private, pool.shared, pool.free) == (0, 1, 7)


def test_utilization_counts_held_blocks_only() -> None:
    pool = filled([1, 2], total=4)
    assert pool.utilization == 0.5
    pool.release([1, 2], 0)
    assert pool.utilization == 0.0


def test_forgetting_idle_blocks_keeps_held_ones() -> None:
    pool = filled([1, 2])
    pool.release([2], 0)

    pool.forget_idle()

    assert pool.counts() == {1: 1}
    assert pool.free == 7
