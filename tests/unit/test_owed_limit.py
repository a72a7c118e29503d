"""W follows its two signs, within bounds, and goes back where there is none."""

import pytest

from gateway.core.owed_limit import (
    CALM,
    FIXED,
    HELD_BACK,
    LATE_INSIDE,
    LEAST_S,
    MOST_S,
    OwedLimit,
)
from gateway.core.settings import QueueSpec

ADAPTIVE = QueueSpec(owed_s=0.5, adaptive=True)


def told(limit: OwedLimit, waited_s: float, *, held: bool = False, seconds: int = 60) -> None:
    for second in range(seconds):
        for tenth in range(10):
            limit.first_token(waited_s, 1.0, second + tenth / 10, held=held)


def test_fixed_it_never_moves() -> None:
    limit = OwedLimit(QueueSpec(owed_s=0.5))
    told(limit, 9.0)
    assert (limit.seconds, limit.reason) == (0.5, FIXED)


def test_it_shrinks_to_its_bound_while_requests_wait_inside_the_engine() -> None:
    limit = OwedLimit(ADAPTIVE)
    told(limit, 0.8)
    assert (limit.seconds, limit.reason) == (LEAST_S, LATE_INSIDE)


def test_it_grows_to_its_bound_while_requests_wait_though_the_engine_answers_early() -> None:
    limit = OwedLimit(ADAPTIVE)
    told(limit, 0.0, held=True)
    assert (limit.seconds, limit.reason) == (MOST_S, HELD_BACK)


def test_that_requests_wait_is_no_reason_to_grow_where_they_would_wait_inside() -> None:
    limit = OwedLimit(ADAPTIVE)
    told(limit, 0.4, held=True)
    assert abs(limit.seconds - 0.5) < 0.2
    assert limit.reason == CALM


def test_without_a_sign_it_returns_to_what_is_configured() -> None:
    limit = OwedLimit(ADAPTIVE)
    told(limit, 0.8)
    for second in range(100, 200):
        limit.first_token(0.0, 1.0, float(second), held=False)
    assert abs(limit.seconds - 0.5) < 0.01
    assert limit.reason == CALM


def test_one_step_a_second_however_many_first_tokens_come() -> None:
    limit = OwedLimit(ADAPTIVE)
    told(limit, 0.8, seconds=2)
    before = limit.seconds
    for i in range(1000):
        limit.first_token(0.9, 1.0, 2.0 + i / 1100, held=False)
    assert limit.seconds == pytest.approx(before * 0.8)


def test_a_configured_value_beyond_the_bounds_is_kept() -> None:
    limit = OwedLimit(QueueSpec(owed_s=5.0, adaptive=True))
    told(limit, 0.4)
    assert limit.seconds == 5.0
