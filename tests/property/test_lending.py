"""Borrowing between classes: no token beyond what all were given, and no owner worse off for it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.bucket import Bucket
from gateway.core.lending import ClassBucket, connect
from gateway.core.settings import BucketSpec

specs = st.builds(
    BucketSpec,
    st.floats(1.0, 1e4, allow_nan=False),
    st.floats(10.0, 1e5, allow_nan=False),
    st.booleans(),
)
# which bucket, the gap before, how much of its burst (more than 1 leaves a debt)
steps = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.0, 30.0), st.floats(0.0, 1.5)),
    min_size=1,
    max_size=40,
)


def made(all_specs: list[BucketSpec]) -> list[ClassBucket]:
    buckets = [ClassBucket(spec, 0.0) for spec in all_specs]
    connect(buckets)
    return buckets


@given(st.lists(specs, min_size=3, max_size=3), steps)
def test_all_classes_together_never_get_more_than_the_sum_of_their_buckets(
    all_specs: list[BucketSpec], asked: list[tuple[int, float, float]]
) -> None:
    buckets = made(all_specs)
    bursts = sum(spec.burst_tokens for spec in all_specs)
    rates = sum(spec.tokens_per_second for spec in all_specs)
    now, times, spent = 0.0, [], []
    for which, gap, size in asked:
        now += gap
        tokens = min(1.0, size) * all_specs[which].burst_tokens
        if not buckets[which].reserve(tokens, now):
            times.append(now)
            spent.append(tokens)
    for first in range(len(times)):
        for last in range(first, len(times)):
            allowed = bursts + rates * (times[last] - times[first])
            assert sum(spent[first : last + 1]) <= allowed * (1 + 1e-9) + 1e-3


@given(st.lists(specs, min_size=3, max_size=3), steps)
def test_an_owners_bucket_is_never_emptier_than_it_would_be_alone(
    all_specs: list[BucketSpec], asked: list[tuple[int, float, float]]
) -> None:
    """So a borrower never makes an owner wait, not even for one refill."""
    shared = made(all_specs)
    alone = [Bucket(spec, 0.0) for spec in all_specs]
    now = 0.0
    for which, gap, size in asked:
        now += gap
        tokens = size * all_specs[which].burst_tokens
        waits = alone[which].wait_s(tokens, now)
        assert shared[which].wait_s(tokens, now) <= waits * (1 + 1e-9) + 1e-6
        if not shared[which].reserve(tokens, now):
            alone[which].settle(0.0, tokens, now)


@given(st.lists(specs, min_size=3, max_size=3), steps)
def test_a_bucket_stays_within_its_burst_and_time_only_adds(
    all_specs: list[BucketSpec], asked: list[tuple[int, float, float]]
) -> None:
    buckets = made(all_specs)
    now = 0.0
    for which, gap, size in asked:
        levels = [bucket.available(now) for bucket in buckets]
        now += gap
        after = [bucket.available(now) for bucket in buckets]
        assert all(later >= sooner for sooner, later in zip(levels, after, strict=True))
        assert all(b.level <= b.spec.burst_tokens * (1 + 1e-9) for b in buckets)
        buckets[which].settle(0.0, size * all_specs[which].burst_tokens, now)
    assert [bucket.at for bucket in buckets] == [now] * 3 or not any(s.borrow for s in all_specs)


def test_an_idle_class_lends_all_its_refill_and_a_busy_one_none() -> None:
    borrower, lender = made([BucketSpec(100, 1000, True), BucketSpec(300, 1000)])
    assert borrower.reserve(1000, 0.0) == 0.0
    assert borrower.available(1.0) == 400  # its own 100 and all 300 of the idle one

    lender.settle(0.0, 1000, 1.0)
    assert borrower.available(2.0) == 500
    assert lender.available(2.0) == 300


def test_who_does_not_borrow_gets_nothing() -> None:
    first, second = made([BucketSpec(100, 1000), BucketSpec(300, 1000)])
    first.settle(0.0, 1000, 0.0)
    assert first.common is None
    assert first.available(1.0) == 100
    assert second.available(1.0) == 1000


def test_two_borrowers_share_what_is_over() -> None:
    one, two, idle = made(
        [BucketSpec(10, 1000, True), BucketSpec(10, 1000, True), BucketSpec(100, 1000)]
    )
    one.settle(0.0, 1000, 0.0)
    two.settle(0.0, 30, 0.0)
    one.available(1.0)
    assert two.level == 1000  # its 10, and the 20 it lacked of the 50 offered
    assert one.level == 10 + 80
    assert idle.level == 1000


def test_what_was_granted_keeps_the_order_of_time() -> None:
    bucket = made([BucketSpec(10, 100, True)])[0]
    waits = [bucket.reserve(100, now) for now in (0.0, 1.0, 5.0, 10.0)]
    assert waits[0] == 0.0
    assert all(later < sooner for sooner, later in pairwise(waits[1:]))
