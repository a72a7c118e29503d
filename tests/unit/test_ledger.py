from math import inf
from random import Random

import pytest

from gateway.core.cost import refresh
from gateway.core.ledger import Account, LedgerError, SilentPrefills
from gateway.core.settings import CostSpec
from tests.core_kit import account, query, ticket_for

LONG = (("system", 6400), ("user", 640))


def totals(row: Account) -> tuple[int, ...]:
    return (
        row.in_flight,
        row.unprefilled,
        row.owed_ns,
        row.owed_tokens,
        row.context_tokens,
        row.kv_tokens,
        len(row.live),
        len(row.pinned),
    )


def test_a_placed_request_owes_its_uncached_prefill_and_holds_its_context() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row, hit=6400)
    row.place(ticket, 0.0)
    assert row.in_flight == 1
    assert row.owed_tokens == ticket.uncached_tokens == 650
    assert row.owed_s == pytest.approx(ticket.prefill_s, abs=1e-8)
    assert row.context_tokens == 7050


def test_the_first_token_pays_the_prefill_but_not_the_context() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    row.prefilled(ticket)
    assert (row.owed_ns, row.owed_tokens, row.unprefilled) == (0, 0, 0)
    assert (row.in_flight, row.context_tokens) == (1, 7050)


@pytest.mark.parametrize("first_token", [True, False])
def test_release_gives_back_exactly_what_was_taken(first_token: bool) -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    if first_token:
        row.prefilled(ticket)
    assert row.release(ticket)
    assert totals(row) == (0,) * 8


def test_a_second_release_changes_nothing() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    row.release(ticket)
    assert not row.release(ticket)
    assert totals(row) == (0,) * 8


def test_a_ticket_cannot_be_placed_twice() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    with pytest.raises(LedgerError):
        row.place(ticket, 0.0)


def test_a_first_token_of_a_request_that_is_not_there_is_an_error() -> None:
    row = account()
    with pytest.raises(LedgerError):
        row.prefilled(ticket_for(query(*LONG), row))


def test_a_change_of_the_engine_model_does_not_unbalance_the_books() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    row.engine.rescale(3.0, 3.0)
    row.release(ticket)
    assert totals(row) == (0,) * 8


def test_a_prefix_shared_by_live_requests_is_counted_once() -> None:
    row = account()
    for ident in range(10):
        ticket = ticket_for(query(("system", 64_000), (f"user{ident}", 640)), row, ident)
        row.place(ticket, 0.0)
    assert row.context_tokens == 10 * 64_650
    assert 64_000 + 10 * 650 <= row.kv_tokens <= 64_000 + 10 * (650 + 1024)


def test_the_shared_prefix_is_held_until_its_last_user_left() -> None:
    row = account()
    tickets = [ticket_for(query(("s", 64_000), (f"u{i}", 640)), row, i) for i in range(3)]
    for ticket in tickets:
        row.place(ticket, 0.0)
    row.release(tickets[0])
    row.release(tickets[2])
    assert row.kv_tokens == tickets[1].query.chain.tokens
    row.release(tickets[1])
    assert totals(row) == (0,) * 8


def test_congestion_is_the_prefill_sent_per_second_and_fades() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 100.0)
    now = row.congestion(100.0)
    assert now == pytest.approx(ticket.prefill_s / CostSpec().congestion_window_s)
    assert row.congestion(100.0 + CostSpec().congestion_window_s) == pytest.approx(
        now / 2.718281828
    )


def test_a_prefill_that_never_ran_leaves_no_congestion() -> None:
    row = account()
    ticket = ticket_for(query(*LONG), row)
    row.place(ticket, 0.0)
    row.release(ticket)
    row.forget_rate(ticket, 5.0)
    assert row.congestion(5.0) == pytest.approx(0.0, abs=1e-12)


def test_only_a_prefill_that_had_the_engine_to_itself_is_called_alone() -> None:
    row = account()
    first, second = (ticket_for(query((name, 640)), row, i) for i, name in enumerate("ab", 1))
    row.place(first, 0.0)
    assert row.prefilled(first)
    row.place(second, 0.0)
    row.place(ticket_for(query(("c", 640)), row, 3), 0.0)
    assert not row.prefilled(second)


def test_the_peak_of_requests_in_flight_is_kept() -> None:
    row = account()
    tickets = [ticket_for(query((str(i), 64)), row, i) for i in range(5)]
    for ticket in tickets:
        row.place(ticket, 0.0)
    for ticket in tickets:
        row.release(ticket)
    assert (row.in_flight, row.peak_in_flight) == (0, 5)


def test_random_traffic_leaves_empty_books() -> None:
    rng = Random(5)
    row = account()
    live = []
    for ident in range(3000):
        parts = [(f"p{rng.randrange(4)}", 64 * rng.randrange(200)) for _ in range(3)]
        ticket = ticket_for(query(*parts, tail=rng.randrange(64)), row, ident)
        row.place(ticket, ident * 0.01)
        live.append(ticket)
        if rng.random() < 0.5:
            chosen = rng.choice(live)
            if chosen.owes:
                row.prefilled(chosen)
        while len(live) > 20 or (live and rng.random() < 0.3):
            row.release(live.pop(rng.randrange(len(live))))
        assert min(totals(row)) >= 0
    for ticket in live:
        row.release(ticket)
    assert totals(row) == (0,) * 8


def test_a_silent_prefill_leaves_the_books_when_it_should_be_over() -> None:
    row = account()
    silent = SilentPrefills()
    ticket = ticket_for(query(*LONG, stream=False), row)
    row.place(ticket, 0.0)
    refresh(row, 0.0)
    silent.add(row, ticket, 0.0)
    assert silent.due(ticket.prefill_s) == []
    assert silent.due(10.0) == [row]
    assert (row.owed_ns, row.in_flight, len(silent)) == (0, 1, 0)


def test_a_request_moved_at_once_may_be_expected_on_two_backends() -> None:
    silent = SilentPrefills()
    rows = [account(0), account(1)]
    ticket = ticket_for(query(*LONG, stream=False), rows[0])
    for row in rows:
        silent.add(row, ticket, 0.0)
    rows[1].place(ticket, 0.0)
    assert silent.due(10.0) == [rows[1]]


def test_a_silent_prefill_whose_request_ended_is_forgotten() -> None:
    row = account()
    silent = SilentPrefills()
    ticket = ticket_for(query(*LONG, stream=False), row)
    row.place(ticket, 0.0)
    silent.add(row, ticket, 0.0)
    row.release(ticket)
    assert silent.due(10.0) == []
    assert totals(row) == (0,) * 8


def test_silent_prefills_say_when_there_is_something_to_settle() -> None:
    row = account()
    silent = SilentPrefills()
    assert silent.next_due == inf
    for ident in range(3):
        ticket = ticket_for(query((str(ident), 640), stream=False), row, ident)
        row.place(ticket, 0.0)
        silent.add(row, ticket, 0.01 * ident)
    while silent.next_due < inf:
        due = silent.next_due
        assert silent.due(due - 1e-6) == []
        assert silent.due(due)
    assert row.owed_ns == 0
