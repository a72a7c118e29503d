from gateway.core.explain import (
    AWAY,
    HOME,
    NO_HIT,
    ONLY,
    REMEMBERED,
    Memory,
    reason_for,
    trail_of,
    why_hit,
    why_not,
)
from gateway.core.policies import policy_named
from gateway.core.types import Ticket
from tests.core_kit import account, query, ticket_for

COST = policy_named("cost")


def decided(ident: int = 1) -> Ticket:
    row = account()
    row.terms = (0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0)
    row.cost = 0.3
    ticket = ticket_for(query(("secret", 640)), row, ident)
    ticket.reason = NO_HIT
    ticket.trail = trail_of([row])
    return ticket


def test_the_reason_tells_home_from_away_from_cold() -> None:
    rows = [account(0), account(1)]
    assert reason_for(rows[:1], rows[0]) == ONLY
    assert reason_for(rows, rows[0]) == NO_HIT
    rows[0].depth = 5
    assert reason_for(rows, rows[0]) == HOME
    assert reason_for(rows, rows[1]) == AWAY


def test_a_remembered_decision_reads_as_it_was_made() -> None:
    memory = Memory()
    memory.remember("r1", decided(), COST)
    told = memory.recall("r1")
    assert told is not None
    assert (told.cls, told.winner, told.reason, told.prompt_tokens) == ("chat", "b0", NO_HIT, 650)
    assert told.backends[0].cost_s == 0.3
    assert told.backends[0].terms["decode_s"] == 0.2


def test_only_policies_that_price_in_seconds_show_a_cost() -> None:
    memory = Memory()
    ticket = decided()
    ticket.trail = tuple((*row[:6], (1.0,)) for row in ticket.trail)
    memory.remember("r1", ticket, policy_named("least_requests"))
    told = memory.recall("r1")
    assert told is not None
    assert told.backends[0].cost_s is None
    assert told.backends[0].terms == {"in_flight": 1.0}


def test_unknown_ids_are_not_remembered() -> None:
    assert Memory().recall("x") is None


def test_only_the_last_thousand_are_kept() -> None:
    memory = Memory()
    for ident in range(REMEMBERED + 50):
        memory.remember(str(ident), decided(), COST)
    assert len(memory) == REMEMBERED
    assert memory.recall("49") is None
    assert memory.recall("50") is not None


def test_an_id_seen_again_shows_the_last_decision_and_takes_one_place() -> None:
    memory = Memory()
    memory.remember("r", decided(), COST)
    again = decided()
    again.backend = "b7"
    memory.remember("r", again, COST)
    told = memory.recall("r")
    assert told is not None
    assert told.winner == "b7"
    assert len(memory) == 1


def test_the_latest_decisions_come_newest_first_and_no_more_than_asked_for() -> None:
    memory = Memory()
    for at in range(5):
        ticket = decided()
        ticket.dispatched_at = float(at)
        memory.remember(f"r{at}", ticket, COST)
    again = decided()
    again.dispatched_at = 9.0
    memory.remember("r1", again, COST)

    told = memory.latest(3)

    assert [(one.request_id, one.dispatched_at) for one in told] == [
        ("r1", 9.0),
        ("r4", 4.0),
        ("r3", 3.0),
    ]
    assert {(one.cls, one.backend, one.prompt_tokens) for one in told} == {("chat", "b0", 650)}


def test_a_latest_decision_tells_the_winners_hit() -> None:
    memory = Memory()
    ticket = decided()
    ((name, _, *_), *_) = ticket.trail
    loser = ("other", 7, 0, 0, 0.0, 0.0, ())
    ticket.trail = (loser, (name, 64, 0, 0, 0.0, 0.0, ()))
    memory.remember("r", ticket, COST)
    assert [one.hit_tokens for one in memory.latest(9)] == [64]


def test_a_ticket_gives_its_trail_away_once() -> None:
    memory = Memory()
    ticket = decided()
    memory.remember("r", ticket, COST)
    memory.remember("other", ticket, COST)
    assert ticket.trail == ()
    assert memory.recall("other") is None


def test_of_a_big_pool_the_cheapest_candidates_are_kept() -> None:
    rows = [account(slot) for slot in range(200)]
    for row in rows:
        row.cost = 200.0 - row.slot
    trail = trail_of(rows)
    assert len(trail) == 32
    assert {name for name, *_ in trail} == {f"b{slot}" for slot in range(168, 200)}


def test_each_way_to_be_left_out_has_its_words() -> None:
    row = account()
    assert why_not(row, 0.0) == "the policy looked at better ones only"
    for ident in range(3):
        row.breaker.failed(ident, 0.0)
    assert why_not(row, 0.0) == "breaker open"
    row.draining = True
    assert why_not(row, 0.0) == "draining"
    row.up = False
    assert why_not(row, 0.0) == "down"


def test_the_reason_of_a_hit_names_depth_trust_and_size() -> None:
    row = account()
    row.depth, row.index_capacity_blocks = 30, 1000
    wanted = query(("p", 6400))
    told = why_hit(row, wanted, 900, 5.0, exact=False)
    assert told == "30 of 100 blocks indexed; index holds 900 of 1000 blocks"
    row.trust, row.trust_at, row.index_share = 0.5, 5.0, 1.5
    told = why_hit(row, wanted, 900, 5.0, exact=False)
    assert "trusted to 50%" in told
    assert "sized to 150% of the engine's cache" in told
    assert why_hit(row, wanted, 900, 5.0, exact=True) == "the engine says it holds 30 of 100 blocks"
