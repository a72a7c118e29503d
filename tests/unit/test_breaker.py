from random import Random

import pytest

from gateway.core.breaker import (
    FIRST_DELAY_S,
    LAST_DELAY_S,
    LAST_ENDS,
    TRIP_AFTER,
    TRIP_FAULTS,
    Breaker,
    State,
)
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
    for ident in range(TRIP_FAULTS - 1):  # as many as the rule of half the requests lets pass
        assert not made.failed(ident, 1.0)
        made.succeeded(1.0)
        assert made.failures == 0
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


def end(made: Breaker, ident: int, outcome: Outcome, now: float = 1.0) -> bool:
    """A request that was sent at `now` ends."""
    ticket = ticket_for(query(("a", 64)), account(), ident)
    ticket.dispatched_at = now
    return made.judge(ticket, outcome, now)


def test_a_calm_breaker_is_one_that_no_answer_can_change() -> None:
    made = breaker()
    calm = [made.calm]
    made.failed(1, 0.0)
    calm.append(made.calm)
    made.succeeded(0.0)  # the fault is still among the last twenty ends
    calm.append(made.calm)
    for ident in range(LAST_ENDS):
        calm.append(made.calm)
        end(made, ident, Outcome.OK)
    assert calm == [True, *[False] * (LAST_ENDS + 2)]
    assert made.calm
    for ident in range(TRIP_AFTER):
        made.failed(ident, 1.0)
    calm = [made.calm]
    made.sent(9, 100.0)
    calm.append(made.calm)
    made.succeeded(100.0)  # on probation
    calm.append(made.calm)
    made.reset()
    calm.append(made.calm)
    assert calm == [False, False, False, True]


def test_a_backend_that_fails_every_other_request_is_noticed() -> None:
    made = breaker()
    ends = [Outcome.OK, Outcome.UPSTREAM_5XX] * LAST_ENDS
    opened_after = next(n for n, one in enumerate(ends, 1) if end(made, n, one))
    assert made.state is State.OPEN
    assert opened_after == 2 * TRIP_FAULTS


def test_a_backend_that_answers_but_breaks_off_every_stream_is_noticed() -> None:
    made = breaker()
    broken = 0
    while made.allows(1.0):
        made.succeeded(1.0)  # the first token
        end(made, broken, Outcome.UPSTREAM_TRUNCATED)
        broken += 1
    assert broken == TRIP_FAULTS


@pytest.mark.parametrize("period", [3, 4, 10])
def test_a_backend_that_fails_less_than_half_stays(period: int) -> None:
    made = breaker()
    for ident in range(50 * period):
        end(made, ident, Outcome.UPSTREAM_TIMEOUT if ident % period == 0 else Outcome.OK)
    assert made.state is State.CLOSED


def test_mistakes_of_clients_count_as_answers_and_their_cancels_as_nothing() -> None:
    made = breaker()
    for ident in range(TRIP_FAULTS - 1):
        end(made, ident, Outcome.UPSTREAM_5XX)
        end(made, ident, Outcome.UPSTREAM_4XX)
    known = made.ends
    for ident in range(50):
        end(made, ident, Outcome.CLIENT_CLOSED)
    assert made.ends == known
    assert made.state is State.CLOSED


def test_after_a_good_trial_fewer_failures_open_it_again_and_for_longer() -> None:
    made = opened()
    first = made.retry_at
    made.sent(7, first)
    end(made, 7, Outcome.OK, first)
    assert made.allows(first)
    faults = 0
    while made.allows(first):
        end(made, faults, Outcome.OK, first)
        end(made, faults, Outcome.UPSTREAM_5XX, first)
        faults += 1
    assert faults < TRIP_FAULTS / 2
    assert made.delay_s == 2 * FIRST_DELAY_S


def test_twenty_good_ends_make_it_as_patient_as_at_first() -> None:
    made = opened()
    made.sent(7, made.retry_at)
    now = made.retry_at
    for ident in range(LAST_ENDS + 1):
        end(made, ident, Outcome.OK, now)
    assert made.calm
    assert made.delay_s == FIRST_DELAY_S


def test_every_change_is_told_with_its_reason() -> None:
    told: list[tuple[State, str]] = []
    made = Breaker(Random(3), lambda state, why: told.append((state, why)))
    for ident in range(TRIP_AFTER):
        made.failed(ident, 0.0)
    made.sent(7, made.retry_at)
    made.withdrawn(7, 2.0)
    made.sent(8, 2.0)
    made.failed(8, 3.0)
    made.sent(9, made.retry_at)
    made.succeeded(made.retry_at)
    made.reset()  # changes nothing any more
    assert told == [
        (State.OPEN, "3 failures in a row"),
        (State.TRIAL, "a request is sent as a trial"),
        (State.OPEN, "the trial told nothing"),
        (State.TRIAL, "a request is sent as a trial"),
        (State.OPEN, "the trial failed"),
        (State.TRIAL, "a request is sent as a trial"),
        (State.CLOSED, "it answered"),
    ]
    assert made.opens == 2


def test_what_is_shown_is_half_open_from_when_a_trial_may_be_sent() -> None:
    made = breaker()
    assert made.shown(0.0) == "closed"
    for ident in range(TRIP_AFTER):
        made.failed(ident, 0.0)
    assert made.shown(made.retry_at - 0.01) == "open"
    assert made.shown(made.retry_at) == "half_open"
    made.sent(7, made.retry_at)
    assert made.shown(made.retry_at) == "half_open"


def test_whoever_hears_of_an_opening_hears_why_the_last_request_failed() -> None:
    told: list[str] = []
    made = Breaker(Random(3), lambda _state, why: told.append(why))
    for ident, why in enumerate(["connection reset", "host name not found", "connection refused"]):
        made.failed(ident, 0.0, why)
    made.sent(7, made.retry_at)
    made.failed(7, made.retry_at, "connect timed out")

    assert told == [
        "3 failures in a row, the last: connection refused",
        "a request is sent as a trial",
        "the trial failed: connect timed out",
    ]
