from dataclasses import replace
from random import Random

import pytest

from gateway.core.classify import Features
from gateway.core.dispatcher import Dispatcher
from gateway.core.ledger import LedgerError
from gateway.core.settings import BucketSpec, ClassSpec, MatchRule, ModelSpec
from gateway.core.types import Outcome, Refusal, RefusalKind, Snapshot, Ticket, Usage
from tests.core_kit import admit, books, dispatcher, done, query, serve, settings

PROMPT = query(("system", 6400), ("user", 640))
LIMITED = (ClassSpec("chat", default=True, bucket=BucketSpec(100.0, 8000.0)),)


def refused(core: Dispatcher, wanted: object = PROMPT, now: float = 0.0) -> Refusal:
    answer = core.admit(wanted, now)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal)
    return answer


def bucket(core: Dispatcher, now: float) -> float:
    level = core.classes(now)[0].bucket_tokens
    assert level is not None
    return level


# -- admission ---------------------------------------------------------------------------------


def test_an_admitted_request_is_on_the_books_at_once() -> None:
    core = dispatcher()
    ticket = admit(core, PROMPT, 0.0)
    row = next(b for b in core.backends(0.0) if b.name == ticket.backend)
    assert (row.in_flight, row.context_tokens) == (1, 7050)
    assert row.index_blocks == 110


def test_the_next_turn_of_a_conversation_goes_where_the_last_one_was() -> None:
    core = dispatcher()
    first = serve(core, PROMPT, 0.0)
    second = admit(core, query(("system", 6400), ("user", 640), ("more", 640)), 1.0)
    assert second.backend == first.backend
    assert second.hit_tokens == 7040
    assert second.uncached_tokens == 650


def test_an_unknown_model_is_refused_as_such() -> None:
    assert refused(dispatcher(), query(("p", 64), model="x")).kind is RefusalKind.UNKNOWN_MODEL


def test_without_an_eligible_backend_the_refusal_names_when_to_come_back() -> None:
    core = dispatcher(2)
    core.set_up("b0", False, 0.0)
    core.drain("b1")
    answer = refused(core)
    assert answer.kind is RefusalKind.NO_BACKEND
    assert 0 < answer.retry_after_s <= 60
    assert core.classes(0.0)[0].rejected == 1
    assert core.undrain("b1")
    assert admit(core, PROMPT, 0.0).backend == "b1"


def test_unknown_backends_can_be_neither_drained_nor_observed() -> None:
    core = dispatcher(1)
    assert not core.drain("x")
    assert not core.undrain("x")
    core.set_up("x", False, 0.0)
    core.observe("x", Snapshot(at=0.0), 0.0)
    assert admit(core, PROMPT, 0.0).backend == "b0"


# -- buckets -----------------------------------------------------------------------------------


def test_the_bucket_pays_uncached_prompt_and_expected_output() -> None:
    core = dispatcher(classes=LIMITED)
    ticket = admit(core, PROMPT, 0.0)
    assert ticket.reserved_tokens == 7050 + 250
    assert bucket(core, 0.0) == 700.0


def test_a_cached_prompt_costs_little() -> None:
    core = dispatcher(classes=LIMITED)
    serve(core, PROMPT, 0.0)
    assert admit(core, PROMPT, 80.0).reserved_tokens == 10 + 250


def test_an_empty_bucket_refuses_for_as_long_as_it_takes_and_leaves_no_trace() -> None:
    core = dispatcher(classes=LIMITED)
    admit(core, PROMPT, 0.0)
    before = books(core, 0.0), core.index_bytes
    answer = refused(core, query(("other", 640)))
    assert answer.kind is RefusalKind.RATE
    assert answer.retry_after_s == pytest.approx((650 + 250 - 700) / 100.0)
    assert (books(core, 0.0), core.index_bytes) == before
    assert isinstance(core.admit(query(("other", 640)), answer.retry_after_s), Ticket)


def test_a_wait_longer_than_a_minute_is_told_as_a_minute() -> None:
    core = dispatcher(classes=(ClassSpec("chat", default=True, bucket=BucketSpec(1.0, 8000.0)),))
    admit(core, PROMPT, 0.0)
    assert refused(core).retry_after_s == 60.0


def test_a_request_larger_than_the_burst_passes_when_the_bucket_is_full() -> None:
    core = dispatcher(classes=LIMITED)
    admit(core, query(("huge", 64_000)), 0.0)
    assert bucket(core, 0.0) < -50_000
    assert refused(core, query(("p", 64)), 1.0).retry_after_s == 60.0


def test_the_bucket_is_settled_with_what_the_engine_reports() -> None:
    core = dispatcher(classes=LIMITED)
    ticket = admit(core, PROMPT, 0.0)
    core.finish(ticket, done(usage=Usage(7000, 20, 6000)), 0.0)
    assert bucket(core, 0.0) == 8000 - 1000 - 20


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_5XX, Outcome.NO_BACKEND, Outcome.EXPIRED])
def test_a_request_that_never_ran_is_refunded_whole(outcome: Outcome) -> None:
    core = dispatcher(classes=LIMITED)
    ticket = admit(core, PROMPT, 0.0)
    core.finish(ticket, done(outcome, prefilled=False), 0.0)
    assert bucket(core, 0.0) == 8000.0


def test_leaving_before_the_first_token_gives_no_free_prefill() -> None:
    core = dispatcher(classes=LIMITED)
    ticket = admit(core, PROMPT, 0.0)
    core.finish(ticket, done(Outcome.CLIENT_CLOSED, prefilled=False), 0.0)
    assert bucket(core, 0.0) == 8000.0 - 7050
    assert books(core) == [(0, 0, 0.0, 0)] * 8


# -- requests that run no prefill --------------------------------------------------------------

COUNT = query(("system", 6400), ("user", 640), output=0, prefills=False, stream=False)


def test_a_tokenizer_request_is_in_flight_and_nothing_else() -> None:
    core = dispatcher(classes=LIMITED)
    ticket = admit(core, COUNT, 0.0)
    assert [b.in_flight for b in core.backends(0.0) if b.name == ticket.backend] == [1]
    assert all(b[1:] == (0, 0.0, 0) for b in books(core, 0.0))
    assert (ticket.hit_tokens, ticket.uncached_tokens, ticket.reserved_tokens) == (0, 0, 0.0)
    assert (bucket(core, 0.0), len(core._silent)) == (8000.0, 0)
    assert core.index_bytes == dispatcher(classes=LIMITED).index_bytes
    core.first_token(ticket, 0.1)
    core.finish(ticket, done(usage=Usage(7050, 900, 0), at=0.1), 0.1)
    assert books(core) == [(0, 0, 0.0, 0)] * 8
    assert bucket(core, 0.1) == 8000.0


def test_after_a_tokenizer_request_no_backend_is_believed_to_hold_its_prompt() -> None:
    core = dispatcher(3)
    serve(core, COUNT, 0.0)
    told = core.explain(PROMPT, 1.0)
    assert [row.hit_tokens for row in told.backends] == [0, 0, 0]


@pytest.mark.parametrize("policy", ["cost", "round_robin", "random"])
def test_tokenizer_requests_teach_the_choice_nothing(policy: str) -> None:
    core, twin = dispatcher(4, policy=policy), dispatcher(4, policy=policy)
    home = serve(core, PROMPT, 0.0)
    serve(twin, PROMPT, 0.0)
    row, pool = core._fleet.by_name[home.backend], core._fleet.pools["m"]
    for turn in range(50):
        ticket = admit(core, COUNT, 1.0 + turn)
        core.first_token(ticket, 1.5 + turn)
        core.finish(ticket, done(usage=Usage(7050, 300, 0), at=1.5 + turn), 1.5 + turn)
    other = twin._fleet.by_name[home.backend], twin._fleet.pools["m"]
    assert (row.trust, row.index_share) == (other[0].trust, other[0].index_share)
    assert row.hit_tokens_predicted == other[0].hit_tokens_predicted
    assert (pool.hit_share, pool.cursor) == (other[1].hit_share, other[1].cursor)
    assert core.expected_output("m", "chat", None) == twin.expected_output("m", "chat", None)
    after = [admit(each, PROMPT, 60.0) for each in (core, twin)]
    assert [t.hit_tokens for t in after if t.backend == home.backend] == [
        7040 for t in after if t.backend == home.backend
    ]


def test_tokenizer_requests_go_where_the_fewest_requests_are_even_from_an_empty_bucket() -> None:
    core = dispatcher(4, classes=LIMITED)
    busy = admit(core, PROMPT, 0.0)
    assert refused(core).kind is RefusalKind.RATE
    tickets = [admit(core, COUNT, 0.0) for _ in range(3)]
    assert {busy.backend, *(ticket.backend for ticket in tickets)} == {"b0", "b1", "b2", "b3"}
    assert {ticket.policy for ticket in tickets} == {"least_requests"}
    assert core.reassign(tickets[0], 0.1)
    assert tickets[0].policy == "least_requests"


def test_a_tokenizer_requests_explanation_is_its_decision() -> None:
    core = dispatcher(3)
    serve(core, PROMPT, 0.0)
    core.set_up("b1", False, 0.0)
    told = core.explain(COUNT, 1.0)
    ticket = admit(core, COUNT, 1.0)
    assert (told.winner, told.policy, told.reason) == (
        ticket.backend,
        "least_requests",
        ticket.reason,
    )
    assert {(row.hit_tokens, row.uncached_tokens) for row in told.backends} == {(0, 0)}
    assert told.prompt_tokens == 7050
    core.remember("r", ticket, 1.0)
    kept = core.decisions("r")
    assert kept is not None
    assert kept.backends == [row for row in told.backends if row.eligible]


# -- failures ----------------------------------------------------------------------------------


def test_a_failed_attempt_moves_to_a_backend_not_tried_and_is_undone_where_it_was() -> None:
    core = dispatcher(2)
    ticket = admit(core, PROMPT, 0.0)
    first = ticket.backend
    core.attempt_failed(ticket, 0.1)
    assert core.reassign(ticket, 0.1)
    assert (ticket.backend != first, ticket.attempts) == (True, 2)
    left = next(b for b in core.backends(0.1) if b.name == first)
    assert (left.in_flight, left.owed_prefill_s, left.index_blocks) == (0, 0.0, 0)


def test_when_all_were_tried_the_ticket_is_on_no_books_and_can_be_finished() -> None:
    core = dispatcher(2, classes=LIMITED)
    ticket = admit(core, PROMPT, 0.0)
    assert core.reassign(ticket, 0.0)
    assert not core.reassign(ticket, 0.0)
    assert not core.reassign(ticket, 0.0)
    assert books(core) == [(0, 0, 0.0, 0)] * 2
    core.finish(ticket, done(Outcome.UPSTREAM_ERROR, prefilled=False), 0.0)
    assert bucket(core, 0.0) == 8000.0


def test_undoing_takes_nothing_from_those_who_share_the_prefix() -> None:
    core = dispatcher(1)
    failing = admit(core, PROMPT, 0.0)
    other = admit(core, query(("system", 6400), ("other", 640)), 0.0)
    core.finish(other, done(), 1.0)
    core.finish(failing, done(Outcome.UPSTREAM_ERROR, prefilled=False), 1.0)
    assert core.backends(1.0)[0].index_blocks == 110
    assert admit(core, PROMPT, 2.0).hit_tokens == 6400


def test_an_answered_request_cannot_be_reassigned() -> None:
    core = dispatcher(2)
    ticket = admit(core, PROMPT, 0.0)
    core.first_token(ticket, 0.1)
    with pytest.raises(LedgerError, match="has an answer"):
        core.reassign(ticket, 0.2)


@pytest.mark.parametrize("call", ["finish", "reassign", "first_token", "attempt_failed"])
def test_a_finished_ticket_accepts_nothing_more(call: str) -> None:
    core = dispatcher(2)
    ticket = admit(core, PROMPT, 0.0)
    core.finish(ticket, done(), 0.1)
    before = books(core, 0.1)
    arguments = (ticket, done(), 0.2) if call == "finish" else (ticket, 0.2)
    with pytest.raises(LedgerError, match="finished"):
        getattr(core, call)(*arguments)
    assert books(core, 0.1) == before


def test_a_second_first_token_changes_nothing() -> None:
    core = dispatcher(1)
    ticket = admit(core, PROMPT, 0.0)
    core.first_token(ticket, 0.1)
    core.first_token(ticket, 0.9)
    assert ticket.first_token_at == 0.1
    assert core.backends(0.9)[0].owed_prefill_s == 0.0


# -- learning ----------------------------------------------------------------------------------


def test_answer_lengths_are_learnt_from_usage() -> None:
    core = dispatcher(1)
    for turn in range(100):
        ticket = admit(core, PROMPT, float(turn))
        core.finish(ticket, done(usage=Usage(7050, 20, None)), turn + 0.5)
    assert 18 <= core.expected_output("m", "chat", None) <= 30
    assert core.expected_output("m", "chat", 5) == 5


def test_a_slow_backend_is_found_out_and_gets_less() -> None:
    core = dispatcher(4)
    now = 0.0
    for turn in range(400):
        now += 0.5
        ticket = admit(core, query((f"u{turn}", 3200)), now)
        factor = 8.0 if ticket.backend == "b0" else 1.0
        core.first_token(ticket, now + factor * 0.11)
        core.finish(
            ticket,
            done(usage=Usage(3210, 11, 0), at=now + factor * 0.18),
            now + factor * 0.18,
        )
    speeds = {b.name: b.prefill_tokens_per_s for b in core.backends(now)}
    assert speeds["b0"] < speeds["b1"] / 4
    later = [admit(core, query((f"v{turn}", 3200)), now).backend for turn in range(20)]
    assert later.count("b0") <= 2


def test_the_first_byte_of_a_whole_answer_teaches_no_prefill_speed() -> None:
    core = dispatcher(1)
    for turn in range(40):
        ticket = admit(core, query((f"u{turn}", 3200), stream=False), 10.0 * turn)
        core.first_token(ticket, 10.0 * turn + 8.0)
        core.finish(
            ticket, done(usage=Usage(3210, 400, 0), at=10.0 * turn + 8.0), 10.0 * turn + 8.0
        )
    assert core.backends(400.0)[0].prefill_tokens_per_s == pytest.approx(1 / 30e-6)


def test_a_whole_answer_stops_owing_its_prefill_while_it_decodes() -> None:
    core = dispatcher(1)
    admit(core, query(("u", 3200), stream=False), 0.0)
    admit(core, query(("v", 64)), 5.0)
    row = core.backends(5.0)[0]
    assert row.in_flight == 2
    assert row.in_flight_prefill_tokens == 74


# -- configuration -----------------------------------------------------------------------------


def test_requests_are_classified_by_the_rules_in_force() -> None:
    classes = (ClassSpec("coding", match=(MatchRule(tools=True),)), ClassSpec("chat", default=True))
    core = dispatcher(classes=classes)
    assert core.classify(Features("/", tools=True, prompt_tokens=5)) == ("coding", "tools=true")
    core.apply(settings(8), 0.0)
    assert core.classify(Features("/", tools=True, prompt_tokens=5)) == ("chat", "default")


def test_a_reload_changes_the_policy_and_keeps_live_tickets() -> None:
    core = dispatcher(2)
    ticket = admit(core, PROMPT, 0.0)
    core.apply(settings(2, policy="round_robin"), 0.1)
    assert core.policy == "round_robin"
    assert sum(b.in_flight for b in core.backends(0.1)) == 1
    core.finish(ticket, done(), 0.2)
    assert books(core) == [(0, 0, 0.0, 0)] * 2


@pytest.mark.parametrize("what", ["policy", "classes", "backends"])
def test_a_bad_reload_raises_and_changes_nothing(what: str) -> None:
    core = dispatcher(2)
    good = core.settings
    bad = {
        "policy": settings(2, policy="best"),
        "classes": replace(good, classes=()),
        "backends": replace(good, models=(ModelSpec("m", ("gone",)),)),
    }[what]
    with pytest.raises(ValueError, match=r"unknown|at least"):
        core.apply(bad, 0.0)
    assert core.settings is good
    assert core.policy == "cost"
    assert admit(core, PROMPT, 0.0).policy == "cost"


def test_a_ticket_outlives_its_backend_and_its_model() -> None:
    core = dispatcher(2)
    tickets = [admit(core, PROMPT, 0.0), admit(core, PROMPT, 0.0)]
    empty = replace(settings(["new"]), models=(ModelSpec("other", ("new",)),))
    core.apply(empty, 0.1)
    core.first_token(tickets[0], 0.2)
    core.finish(tickets[0], done(), 0.3)
    assert not core.reassign(tickets[1], 0.3)
    core.finish(tickets[1], done(Outcome.UPSTREAM_ERROR, prefilled=False), 0.4)
    assert books(core) == [(0, 0, 0.0, 0)]


def test_an_unknown_policy_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        Dispatcher(settings(1, policy="best"), Random(1), 0.0)


# -- looking in --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cost", "random", "power_of_two", "round_robin", "weights"])
def test_what_is_explained_is_what_then_happens(policy: str) -> None:
    core = dispatcher(5, policy=policy)
    rng = Random(2)
    for turn in range(60):
        wanted = query(("system", 3200), (f"u{rng.randrange(9)}", 640))
        told = core.explain(wanted, float(turn))
        ticket = admit(core, wanted, float(turn))
        assert (told.winner, told.reason) == (ticket.backend, ticket.reason)
        if rng.random() < 0.6:
            core.finish(ticket, done(), turn + 0.5)


def test_explaining_changes_nothing() -> None:
    core = dispatcher(3, classes=LIMITED)
    twin = dispatcher(3, classes=LIMITED)
    for turn in range(20):
        core.explain(PROMPT, float(turn))
        core.explain(query(("x", 64), model="nobody"), float(turn))
    assert books(core) == [(0, 0, 0.0, 0)] * 3
    assert core.classes(20.0) == twin.classes(20.0)
    assert core.index_nodes == 1
    assert admit(core, PROMPT, 20.0).backend == admit(twin, PROMPT, 20.0).backend


def test_an_explanation_has_a_row_for_every_backend_in_order() -> None:
    core = dispatcher(4)
    home = serve(core, PROMPT, 0.0).backend
    core.set_up("b1", False, 0.0)
    core.drain("b2")
    told = core.explain(PROMPT, 1.0)
    assert [row.name for row in told.backends] == ["b0", "b1", "b2", "b3"]
    assert [row.why_not for row in told.backends[1:3]] == ["down", "draining"]
    assert next(row for row in told.backends if row.name == home).hit_tokens == 7040


def test_a_big_pools_explanation_says_who_was_not_on_the_shortlist() -> None:
    told = dispatcher(60).explain(PROMPT, 0.0)
    assert len(told.backends) == 60
    left = [row for row in told.backends if not row.eligible]
    assert len(left) == 44
    assert {row.why_not for row in left} == {"the policy looked at better ones only"}


def test_a_decision_can_be_looked_up_by_its_request_id() -> None:
    core = dispatcher(3)
    ticket = admit(core, PROMPT, 0.0)
    told_before = ticket.reason
    core.remember("abc", ticket, 0.0)
    core.finish(ticket, done(), 1.0)
    told = core.decisions("abc")
    assert told is not None
    assert (told.winner, told.reason, told.policy) == (ticket.backend, told_before, "cost")
    assert len(told.backends) == 3
    assert core.decisions("nope") is None


def test_backends_can_be_listed_by_model() -> None:
    chosen = replace(settings(3), models=(ModelSpec("m", ("b2", "b0")),))
    core = Dispatcher(chosen, Random(1), 0.0)
    assert [b.name for b in core.backends(0.0)] == ["b0", "b1", "b2"]
    assert [b.name for b in core.backends(0.0, "m")] == ["b2", "b0"]
    assert core.backends(0.0, "x") == []


def test_an_explanation_says_why_each_hit_is_believed() -> None:
    core = dispatcher(2)
    home = serve(core, PROMPT, 0.0)
    rows = {row.name: row for row in core.explain(PROMPT, 1.0).backends}
    held = rows.pop(home.backend)
    assert held.index == "approximate"
    assert (held.depth_blocks, held.indexed_tokens) == (len(PROMPT.chain.hashes), 7040)
    assert held.why_hit is not None
    assert held.why_hit.startswith("110 of 110 blocks indexed")
    (other,) = rows.values()
    assert (other.depth_blocks, other.indexed_tokens) == (0, 0)
    assert other.why_hit is not None
    assert other.why_hit.startswith("0 of 110 blocks indexed")


def test_the_hottest_prefixes_are_shown_as_hashes_with_their_homes() -> None:
    core = dispatcher(3)
    for turn in range(6):
        serve(core, PROMPT, float(turn))
    serve(core, query(("other", 640)), 7.0)
    (hot,) = core.hot_prefixes()
    assert hot.model == "m"
    assert hot.prefix == f"{PROMPT.chain.hashes[-1]:016x}"
    assert hot.depth_blocks == len(PROMPT.chain.hashes)
    assert hot.request_ratio == pytest.approx(5 / 7)
    assert hot.homes
    assert core.hot_prefixes(hot.homes[0]) == [hot]
    assert core.hot_prefixes("nobody") == []


def test_no_more_than_twenty_prefixes_are_shown() -> None:
    core = dispatcher(3)
    for number in range(60):
        for turn in range(2):
            serve(core, query((f"p{number}", 640)), number + turn / 2)
    assert len(core.hot_prefixes()) == 20


def test_a_backends_status_shows_what_is_believed_of_its_cache() -> None:
    core = dispatcher(1)
    for turn in range(3):
        ticket = admit(core, PROMPT, float(turn))
        core.first_token(ticket, turn + 0.1)
        hit = 7040 if turn else 0
        core.finish(ticket, done(usage=Usage(7050, 9, hit), at=turn + 0.2), turn + 0.2)
    (shown,) = core.backends(5.0)
    assert shown.index_capacity_blocks == pytest.approx(420_000 / 64, rel=0.2)
    assert (shown.index_capacity_ratio, shown.prefix_trust_ratio) == (1.0, 1.0)
    assert shown.prefix_error_ratio == 0.0
    assert (shown.hit_tokens_predicted, shown.hit_tokens_reported) == (14_080, 14_080)
