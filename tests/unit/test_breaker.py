from random import Random

import pytest

from gateway.core.breaker import LAST_DELAY_S, TRIP_AFTER, Breaker, State
from gateway.core.types import Outcome
from tests.core_kit import account, query, ticket_for


def breaker() -> Breaker:
    return Breaker(Random(3))


def opened(now: float = 0.0) -> Breaker:
    made = breaker()
    for ident in range(TRIP_AFTER):
        made.failed(ident, now)
    return made


def test_failures_in_a_row_open_it() -> None:
    made = breaker()
    changes = [made.failed(ident, 1.0) for ident in range(TRIP_AFTER)]
    assert changes == [False] * (TRIP_AFTER - 1) + [True]
    assert not made.allows(1.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    made = breaker()
    for ident in range(20):
        made.failed(ident, 1.0)
        made.succeeded(1.0)
    assert made.state is State.CLOSED


def test_after_the_delay_one_trial_is_let_through_and_no_more() -> None:
    made = opened()
    now = made.retry_at
    assert not made.allows(now - 0.001)
    assert made.allows(now)
    assert made.sent(7, now)
    assert not made.allows(now + 100)


def test_a_good_trial_closes_it() -> None:
    made = opened()
    made.sent(7, made.retry_at)
    assert made.succeeded(made.retry_at)
    assert made.allows(made.retry_at)
    assert made.failures == 0


def test_each_failed_trial_doubles_the_delay_up_to_a_limit() -> None:
    made = opened()
    delays = []
    for ident in range(100, 110):
        now = made.retry_at
        made.sent(ident, now)
        assert made.failed(ident, now)
        delays.append(made.retry_at - now)
    assert delays[1] > delays[0]
    assert max(delays) <= 1.2 * LAST_DELAY_S


def test_a_withdrawn_trial_lets_the_next_one_through_at_once() -> None:
    made = opened()
    made.sent(7, made.retry_at)
    assert made.withdrawn(7, 50.0)
    assert made.allows(50.0)


def test_someone_elses_end_does_not_end_the_trial() -> None:
    made = opened()
    made.sent(7, made.retry_at)
    assert not made.withdrawn(8, 50.0)
    assert not made.failed(8, 50.0)
    assert made.state is State.TRIAL


def test_failures_of_requests_sent_before_it_opened_do_not_lengthen_the_delay() -> None:
    made = opened()
    before = made.retry_at
    for ident in range(50, 90):
        assert not made.failed(ident, 0.1)
    assert made.retry_at == before


def test_an_old_stream_that_ends_well_does_not_close_it() -> None:
    made = opened(now=10.0)
    assert not made.succeeded(sent_at=3.0)
    assert made.state is State.OPEN


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_4XX, Outcome.CLIENT_CLOSED])
def test_what_is_not_the_backends_fault_never_opens_it(outcome: Outcome) -> None:
    made = breaker()
    row = account()
    for ident in range(50):
        made.judge(ticket_for(query(("a", 64)), row, ident), outcome, 1.0)
    assert made.state is State.CLOSED
    assert made.failures == 0


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_TRUNCATED,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_5XX,
    ],
)
def test_what_is_the_backends_fault_opens_it(outcome: Outcome) -> None:
    made = breaker()
    row = account()
    for ident in range(TRIP_AFTER):
        made.judge(ticket_for(query(("a", 64)), row, ident), outcome, 1.0)
    assert made.state is State.OPEN


def test_a_failure_counted_at_the_attempt_is_not_counted_again_at_the_end() -> None:
    made = breaker()
    row = account()
    ticket = ticket_for(query(("a", 64)), row)
    made.failed(ticket.id, 1.0)
    ticket.tried += (row.slot,)
    made.judge(ticket, Outcome.UPSTREAM_ERROR, 1.0)
    assert made.failures == 1


def test_the_delays_of_two_breakers_differ() -> None:
    rng = Random(1)
    retries = []
    for _ in range(2):
        made = Breaker(rng)
        for ident in range(TRIP_AFTER):
            made.failed(ident, 0.0)
        retries.append(made.retry_at)
    assert retries[0] != retries[1]


def test_a_reset_forgets_everything() -> None:
    made = opened()
    assert made.reset()
    assert made.allows(0.0)
    assert not made.reset()


def test_a_calm_breaker_is_one_that_no_answer_can_change() -> None:
    made = breaker()
    calm = [made.calm]
    made.failed(1, 0.0)
    calm.append(made.calm)
    made.succeeded(0.0)
    calm.append(made.calm)
    for ident in range(3):
        made.failed(ident, 1.0)
    calm.append(made.calm)
    made.sent(9, 100.0)
    calm.append(made.calm)
    made.succeeded(100.0)
    calm.append(made.calm)
    made.failed(1, 101.0)
    made.reset()
    calm.append(made.calm)
    assert calm == [True, False, True, False, False, True, True]
