from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.histogram import GAPS, SECONDS, Histogram, quantiles


def test_value_on_a_bound_counts_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)

    assert list(histogram.cumulative()) == [(1.0, 1), (2.0, 1), (inf, 1)]


def test_value_over_every_bound_counts_in_the_last_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(2.5)

    assert list(histogram.cumulative()) == [(1.0, 0), (2.0, 0), (inf, 1)]


@given(st.lists(st.floats(0, 1e6)))
def test_buckets_are_what_counting_by_hand_gives(values: list[float]) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)

    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values)


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rise"):
        Histogram(bounds)


def test_shipped_bounds_rise() -> None:
    assert Histogram(SECONDS).bounds == SECONDS
    assert Histogram(GAPS).bounds == GAPS


def test_a_quantile_lies_within_its_bucket() -> None:
    first, second = Histogram((1.0, 2.0, 4.0)), Histogram((1.0, 2.0, 4.0))
    first.observe_all([0.5, 1.5])
    second.observe_all([3.0, 3.0])

    assert quantiles([first, second], (0.25, 0.5, 0.75, 1.0)) == [1.0, 2.0, 3.0, 4.0]


def test_a_quantile_beyond_every_bound_is_the_last_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(50.0)

    assert quantiles([histogram], (0.5, 0.99)) == [2.0, 2.0]


def test_nothing_observed_has_no_quantile() -> None:
    assert quantiles([], (0.5,)) == [None]
    assert quantiles([Histogram((1.0,))], (0.5, 0.9)) == [None, None]


@given(st.lists(st.floats(0.0, 599.0), min_size=1), st.floats(0.0, 1.0))
def test_a_quantile_is_between_the_bounds_around_the_true_one(
    values: list[float], share: float
) -> None:
    histogram = Histogram(SECONDS)
    histogram.observe_all(values)
    (told,) = quantiles([histogram], (share,))

    true = sorted(values)[max(0, ceil(share * len(values)) - 1)]
    lower = max((bound for bound in (0.0, *SECONDS) if bound < true), default=0.0)
    upper = min(bound for bound in SECONDS if bound >= true)
    assert told is not None
    assert lower - 1e-9 <= told <= upper + 1e-9
