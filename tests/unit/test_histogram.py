from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.histogram import GAPS, SECONDS, Histogram


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
