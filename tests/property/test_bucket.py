"""The bucket never over-spends over any window, whatever is asked, settled and refunded."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.bucket import Bucket
from gateway.core.settings import BucketSpec

specs = st.builds(
    BucketSpec,
    st.floats(0.1, 1e5, allow_nan=False),
    st.floats(1.0, 1e6, allow_nan=False),
)
gaps = st.floats(0.0, 50.0, allow_nan=False)
sizes = st.floats(0.0, 2.0, allow_nan=False)  # in bursts
asks = st.lists(st.tuples(gaps, sizes), min_size=1, max_size=40)


def windows(times: list[float], spent: list[float]) -> list[tuple[float, float]]:
    """(length, tokens) of every window that starts and ends with a reservation."""
    return [
        (times[last] - times[first], sum(spent[first : last + 1]))
        for first in range(len(times))
        for last in range(first, len(times))
    ]


@given(specs, asks)
def test_no_window_spends_more_than_burst_and_refill(
    spec: BucketSpec, requests: list[tuple[float, float]]
) -> None:
    bucket = Bucket(spec, 0.0)
    now, times, spent = 0.0, [], []
    for gap, size in requests:
        now += gap
        tokens = min(1.0, size) * spec.burst_tokens
        if not bucket.reserve(tokens, now):
            times.append(now)
            spent.append(tokens)
    for length, tokens in windows(times, spent):
        allowed = spec.burst_tokens + spec.tokens_per_second * length
        assert tokens <= allowed * (1 + 1e-9) + 1e-3


@given(specs, asks)
def test_even_oversized_requests_only_spend_ahead_of_the_refill(
    spec: BucketSpec, requests: list[tuple[float, float]]
) -> None:
    """All but the last of any window fits the window: a debt is paid before anyone else passes."""
    bucket = Bucket(spec, 0.0)
    now, times, spent = 0.0, [], []
    for gap, size in requests:
        now += gap
        tokens = size * spec.burst_tokens
        if not bucket.reserve(tokens, now):
            times.append(now)
            spent.append(tokens)
    for first in range(len(times)):
        for last in range(first, len(times)):
            before = sum(spent[first:last])
            allowed = spec.burst_tokens + spec.tokens_per_second * (times[last] - times[first])
            assert before <= allowed * (1 + 1e-9) + 1e-3


@given(specs, st.lists(st.tuples(gaps, sizes, st.floats(0.0, 3.0)), max_size=40))
def test_real_use_is_paid_for_before_anyone_else_passes(
    spec: BucketSpec, requests: list[tuple[float, float, float]]
) -> None:
    """One after another, using less or more than reserved: all but a window's last fit it."""
    bucket = Bucket(spec, 0.0)
    now = 0.0
    charges: list[tuple[float, float]] = []
    for gap, size, share in requests:
        now += gap
        reserved = min(1.0, size) * spec.burst_tokens
        if bucket.reserve(reserved, now):
            continue
        charges.append((now, share * reserved))
        now += gap
        bucket.settle(reserved, share * reserved, now)
        assert bucket.available(now) <= spec.burst_tokens
    for first in range(len(charges)):
        for last in range(first, len(charges)):
            before = sum(tokens for _, tokens in charges[first:last])
            length = charges[last][0] - charges[first][0]
            allowed = spec.burst_tokens + spec.tokens_per_second * length
            assert before <= allowed * (1 + 1e-9) + 1e-3


@given(specs, asks)
def test_a_refused_request_passes_after_exactly_the_wait_it_was_told(
    spec: BucketSpec, requests: list[tuple[float, float]]
) -> None:
    bucket = Bucket(spec, 0.0)
    now = 0.0
    for gap, size in requests:
        now += gap
        tokens = size * spec.burst_tokens
        wait = bucket.reserve(tokens, now)
        if wait:
            level = bucket.level
            assert bucket.wait_s(tokens, now + 0.5 * wait) > 0 or wait < 1e-6
            assert bucket.level == level
            now += wait * (1 + 1e-9) + 1e-9
            assert bucket.reserve(tokens, now) == 0.0


@given(specs, asks)
def test_refunding_everything_leaves_the_bucket_as_if_nobody_had_come(
    spec: BucketSpec, requests: list[tuple[float, float]]
) -> None:
    bucket = Bucket(spec, 0.0)
    now = 0.0
    for gap, size in requests:
        now += gap
        tokens = size * spec.burst_tokens
        if not bucket.reserve(tokens, now):
            bucket.settle(tokens, 0.0, now)
    assert abs(bucket.available(now) - spec.burst_tokens) <= 1e-6 * spec.burst_tokens


@given(st.lists(gaps, min_size=2, max_size=20), specs)
def test_the_level_never_falls_by_itself(steps: list[float], spec: BucketSpec) -> None:
    bucket = Bucket(spec, 0.0)
    bucket.reserve(spec.burst_tokens, 0.0)
    now, levels = 0.0, []
    for step in steps:
        now += step
        levels.append(bucket.available(now))
    assert all(later >= earlier for earlier, later in pairwise(levels))
