from random import Random

import pytest

from gateway.core.backlog import Backlog


def test_an_empty_backlog_costs_nothing() -> None:
    assert Backlog().price_s(1.0) == 0.0


def test_a_short_one_waits_for_none_of_the_long_ones_and_holds_each_up_by_itself() -> None:
    backlog = Backlog()
    for _ in range(5):
        backlog.add(2.0)
    assert backlog.price_s(0.01) == pytest.approx(5 * 0.01)


def test_a_long_one_waits_for_all_the_short_ones() -> None:
    backlog = Backlog()
    for _ in range(5):
        backlog.add(0.01)
    assert backlog.price_s(2.0) == pytest.approx(5 * 0.01)


def test_the_price_is_near_the_sum_of_the_shorter_prefills() -> None:
    rng = Random(3)
    waiting = [rng.lognormvariate(-2.0, 1.5) for _ in range(400)]
    backlog = Backlog()
    for seconds in waiting:
        backlog.add(seconds)
    for mine in (0.001, 0.05, 0.3, 4.0):
        exact = sum(min(mine, seconds) for seconds in waiting)
        assert exact <= backlog.price_s(mine) * (1 + 1e-6)
        assert backlog.price_s(mine) <= 1.5 * exact


def test_what_has_left_counts_no_more() -> None:
    rng = Random(4)
    waiting = [rng.lognormvariate(-2.0, 3.0) for _ in range(200)] + [1e-9, 0.0, 1e6]
    backlog = Backlog()
    for seconds in waiting:
        backlog.add(seconds)
    rng.shuffle(waiting)
    for seconds in waiting:
        backlog.remove(seconds)
    assert backlog.count == 0
    assert backlog.price_s(1.0) == 0.0
