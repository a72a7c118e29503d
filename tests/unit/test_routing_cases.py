"""Cases from public bug reports of other routers (routing cases R01..R40), on the deciding core."""

from collections import Counter
from random import Random

import pytest

from gateway.core.breaker import LAST_DELAY_S
from gateway.core.dispatcher import Dispatcher
from gateway.core.policies import POLICIES
from gateway.core.settings import EngineProfile
from gateway.core.types import Outcome, Query, Refusal, Snapshot, Ticket, Usage
from loadtest.bench_decide import queries
from tests.core_kit import admit, books, dispatcher, done, query, serve

SYSTEM = ("system", 4096)  # 16k characters


def unlike(index: int, tokens: int = 640, *, stream: bool = True, output: int = 250) -> Query:
    """A prompt that shares nothing with any other."""
    return query((f"unlike{index}", tokens), stream=stream, output=output)


def spread(tickets: list[Ticket]) -> Counter[str]:
    return Counter(ticket.backend for ticket in tickets)


def peak_over_mean(counts: Counter[str], backends: int) -> float:
    return max(counts.values()) / (sum(counts.values()) / backends)


def status(core: Dispatcher, name: str, now: float) -> int:
    return next(b.in_flight for b in core.backends(now) if b.name == name)


# -- load accounting and spread ------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random", "power_of_two"}))
def test_r01_a_burst_between_two_polls_spreads(policy: str) -> None:
    core = dispatcher(8, policy=policy)
    for name in ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"):
        core.observe(name, Snapshot(at=0.0, kv_utilization=0.0), 0.0)
    tickets = [admit(core, unlike(i, 640), 0.001 * i) for i in range(200)]
    assert peak_over_mean(spread(tickets), 8) <= 1.3


def test_r02_load_counts_before_the_answer_starts() -> None:
    core = dispatcher(4)
    tickets = [admit(core, unlike(i), 0.01 * i) for i in range(10)]
    assert len(spread(tickets)) == 4
    assert max(spread(tickets).values()) <= 4


def test_r03_double_ends_and_late_calls_never_make_a_gauge_negative() -> None:
    core = dispatcher(2)
    ticket = admit(core, unlike(0), 0.0)
    core.attempt_failed(ticket, 0.1)
    core.reassign(ticket, 0.1)
    core.first_token(ticket, 0.2)
    core.first_token(ticket, 0.3)
    core.finish(ticket, done(Outcome.CLIENT_CLOSED), 0.4)
    with pytest.raises(RuntimeError):
        core.finish(ticket, done(), 0.5)
    assert books(core) == [(0, 0, 0.0, 0)] * 2


def test_r04_a_request_that_lives_for_days_stays_on_the_books() -> None:
    core = dispatcher(2)
    ticket = admit(core, unlike(0), 0.0)
    core.first_token(ticket, 1.0)
    week = 7 * 86_400.0
    for turn in range(50):
        serve(core, unlike(turn + 1), turn * week / 50)
    assert status(core, ticket.backend, week) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_r05_cold_requests_one_after_another_are_spread(policy: str) -> None:
    core = dispatcher(8, policy=policy)
    tickets = [serve(core, unlike(i), 20.0 * i) for i in range(64)]
    assert len(spread(tickets)) == 8
    assert max(spread(tickets).values()) <= 18


def test_r05_cold_requests_are_spread_over_a_big_pool_too() -> None:
    core = dispatcher(256)
    tickets = [serve(core, unlike(i, 64), 60.0 * i) for i in range(512)]
    assert len(spread(tickets)) > 200
    assert max(spread(tickets).values()) <= 10


def test_r05_a_backend_wrongly_thought_slow_is_heard_again() -> None:
    core = dispatcher(2)
    truth = 0.1
    for i in range(40):  # the second one happened to be measured under somebody else's load
        core.drain("b1" if i % 2 else "b0")
        serve(core, unlike(i, 3200), 20.0 * i, took=truth if i % 2 else 3 * truth)
        core.undrain("b1" if i % 2 else "b0")
    believed = {b.name: b.prefill_tokens_per_s for b in core.backends(800.0)}
    assert believed["b1"] < 0.7 * believed["b0"]

    tickets = [serve(core, unlike(100 + i, 3200), 1000.0 + 20 * i, truth) for i in range(200)]
    now = {b.name: b.prefill_tokens_per_s for b in core.backends(9000.0)}
    assert min(spread(tickets[-100:]).values()) >= 20
    assert now["b1"] > 0.8 * now["b0"]


def test_r06_embeddings_count_as_load_and_spread() -> None:
    core = dispatcher(4)
    tickets = [admit(core, unlike(i, stream=False, output=0), 0.0) for i in range(64)]
    assert peak_over_mean(spread(tickets), 4) <= 1.5
    assert all(b.in_flight > 0 for b in core.backends(0.0))
    for ticket in tickets:
        core.finish(ticket, done(), 1.0)
    assert books(core) == [(0, 0, 0.0, 0)] * 4


def test_r07_a_miss_goes_to_the_idle_backend_not_to_the_smallest_tree() -> None:
    core = dispatcher(2)
    small, big = "b0", "b1"
    core.drain(small)
    for turn in range(50):
        serve(core, unlike(turn, 6400), float(turn))
    core.undrain(small)
    core.drain(big)
    for turn in range(5):
        admit(core, unlike(100 + turn, 64), 100.0)
    core.undrain(big)
    shown = {b.name: b for b in core.backends(100.0)}
    assert shown[small].index_blocks < shown[big].index_blocks
    assert [admit(core, unlike(200), 100.0).backend for _ in range(1)] == [big]


@pytest.mark.parametrize("policy", ["cost", "lmetric", "dynamo", "preble"])
def test_r08_margins_fire_on_a_small_pool_too(policy: str) -> None:
    core = dispatcher(2, policy=policy)
    home = serve(core, query(SYSTEM), 0.0).backend
    tickets = [admit(core, query(SYSTEM, (f"u{i}", 64)), 1.0) for i in range(16)]
    assert spread(tickets)[home] < 16


# -- prefix affinity against hot spots -----------------------------------------------------------


def test_r09_a_common_system_prompt_does_not_make_a_monopoly() -> None:
    core = dispatcher(2)
    tickets = [admit(core, query(SYSTEM, (f"user{i}", 64)), 0.05 * i) for i in range(40)]
    assert max(spread(tickets).values()) <= 24


@pytest.mark.parametrize("backends", [2, 4, 8])
def test_r09_every_backend_gets_its_part_of_users_who_come_and_go(backends: int) -> None:
    core = dispatcher(backends)
    live: list[Ticket] = []
    tickets = []
    for turn in range(400):
        now = 0.05 * turn
        ticket = admit(core, query(SYSTEM, (f"user{turn}", 64)), now)
        core.first_token(ticket, now + 0.02)
        live.append(ticket)
        tickets.append(ticket)
        if len(live) > 10 * backends:
            core.finish(live.pop(0), done(), now + 0.02)
    assert peak_over_mean(spread(tickets[100:]), backends) <= 1.3


def test_r09_a_long_common_document_gets_further_homes_even_at_low_load() -> None:
    core = dispatcher(4)
    live: list[Ticket] = []
    tickets = []
    for turn in range(200):
        now = 0.5 * turn
        ticket = admit(core, query(("document", 24_576), (f"user{turn}", 64)), now)
        core.first_token(ticket, now + 0.02)
        live.append(ticket)
        tickets.append(ticket)
        if len(live) > 12:
            core.finish(live.pop(0), done(), now + 0.02)
    assert peak_over_mean(spread(tickets[100:]), 4) <= 1.5


def test_r10_a_small_imbalance_does_not_throw_affinity_away() -> None:
    core = dispatcher(2)
    home = serve(core, query(("mine", 12_800)), 0.0).backend
    other = "b1" if home == "b0" else "b0"
    for name, count in ((home, 11), (other, 10)):
        core.drain(other if name == home else home)
        for i in range(count):
            core.first_token(admit(core, unlike(i), 10.0), 10.1)
        core.undrain(other if name == home else home)
    assert (status(core, home, 10.2), status(core, other, 10.2)) == (11, 10)
    assert admit(core, query(("mine", 12_800), ("next", 640)), 30.0).backend == home


def test_r11_a_home_that_owes_more_than_recomputing_costs_is_left() -> None:
    core = dispatcher(2)
    home = serve(core, query(("mine", 6400)), 0.0).backend
    other = "b1" if home == "b0" else "b0"
    core.drain(other)
    for i in range(10):
        admit(core, unlike(i, 6400), 60.0)
    core.undrain(other)
    wanted = query(("mine", 6400), ("next", 64))
    told = core.explain(wanted, 60.0)
    rows = {row.name: row for row in told.backends}
    assert rows[home].owed_prefill_s > rows[other].terms["prefill_s"]
    ticket = admit(core, wanted, 60.0)
    assert (ticket.backend, ticket.reason) == (
        other,
        "its prefix home costs more than recomputing here",
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_r12_every_policy_teaches_the_index(policy: str) -> None:
    core = dispatcher(1, policy=policy)
    assert serve(core, unlike(1), 0.0).hit_tokens == 0
    assert serve(core, unlike(1), 1.0).hit_tokens == 640


def test_r15_predictions_follow_what_the_engine_reports_within_twenty_requests() -> None:
    core = dispatcher(1)
    wanted = query(("mine", 6400))
    core.finish(admit(core, wanted, 0.0), done(usage=Usage(6410, 5, 0)), 0.5)
    predicted = []
    for turn in range(1, 21):  # the engine evicts behind our back, every time
        ticket = admit(core, wanted, float(turn))
        predicted.append(ticket.hit_tokens)
        core.finish(ticket, done(usage=Usage(6410, 5, 0)), turn + 0.5)
    assert predicted[0] == 6400
    assert predicted[-1] < 0.1 * 6400


def test_r15_a_working_cache_is_believed_again() -> None:
    core = dispatcher(1)
    wanted = query(("mine", 6400))
    for turn in range(40):
        cached = 0 if turn < 15 else 6400
        ticket = admit(core, wanted, float(turn))
        core.finish(ticket, done(usage=Usage(6410, 5, cached)), turn + 0.5)
    assert admit(core, wanted, 41.0).hit_tokens == 6400
    shown = core.backends(41.0)[0]
    assert 0 < shown.hit_tokens_reported < shown.hit_tokens_predicted + 15 * 6400


# -- metrics and staleness -----------------------------------------------------------------------


def test_r21_stale_metrics_neither_stop_nor_skew_traffic() -> None:
    core = dispatcher(4)
    for name in ("b0", "b1", "b2", "b3"):
        full = Snapshot(at=0.0, running=200, waiting=500, kv_utilization=1.0)
        empty = Snapshot(at=0.0)
        core.observe(name, full if name == "b0" else empty, 0.0)
    fresh = [admit(core, unlike(i), 0.1) for i in range(12)]
    assert spread(fresh)["b0"] == 0
    for ticket in fresh:
        core.finish(ticket, done(), 0.2)
    later = [admit(core, unlike(100 + i), 60.0) for i in range(40)]
    assert peak_over_mean(spread(later), 4) <= 1.3
    assert all((b.snapshot_age_s or 0) > 50 for b in core.backends(60.0))


def test_r21_without_any_metrics_ever_the_books_alone_balance() -> None:
    core = dispatcher(4)
    assert peak_over_mean(spread([admit(core, unlike(i), 0.0) for i in range(40)]), 4) <= 1.3
    assert all(b.snapshot_age_s is None for b in core.backends(0.0))


def test_r21_a_scrape_that_arrives_stale_is_ignored() -> None:
    core = dispatcher(2)
    core.observe("b0", Snapshot(at=0.0, running=500, waiting=500), 30.0)
    tickets = [admit(core, unlike(i), 30.0) for i in range(10)]
    assert spread(tickets)["b0"] == 5


# -- failures ------------------------------------------------------------------------------------


def test_r25_a_failing_backend_is_tried_once_per_request_and_then_left_out() -> None:
    core = dispatcher(3)
    sent = 0
    for turn in range(60):
        now = 0.001 * turn
        ticket = admit(core, unlike(turn), now)
        tries = [ticket.backend]
        while ticket.backend == "b0":
            sent += 1
            core.attempt_failed(ticket, now)
            assert core.reassign(ticket, now)
            tries.append(ticket.backend)
        assert tries.count("b0") <= 1
        core.finish(ticket, done(), now)
    assert sent == 3
    assert not next(b.up for b in core.backends(0.06) if b.name == "b0")


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_4XX, Outcome.CLIENT_CLOSED])
@pytest.mark.parametrize("prefilled", [True, False])
def test_r30_client_mistakes_and_cancels_leave_a_backend_healthy(
    outcome: Outcome, *, prefilled: bool
) -> None:
    core = dispatcher(1)
    for turn in range(50):
        core.finish(admit(core, unlike(turn), turn), done(outcome, prefilled=prefilled), turn + 0.1)
    assert core.backends(50.0)[0].up


def test_r31_a_recovered_backend_is_back_within_a_trial_interval() -> None:
    core = dispatcher(2)
    core.drain("b1")
    for turn in range(20):
        core.finish(admit(core, unlike(turn), 30.0 * turn), done(Outcome.UPSTREAM_5XX), 30.0 * turn)
    core.undrain("b1")
    now = 30.0 * 19
    assert {admit(core, unlike(100 + i), now).backend for i in range(8)} == {"b1"}
    now += 1.2 * LAST_DELAY_S
    trials = [admit(core, unlike(200 + i), now) for i in range(8)]
    assert spread(trials)["b0"] == 1
    trial = next(ticket for ticket in trials if ticket.backend == "b0")
    core.first_token(trial, now + 0.1)
    after = [admit(core, unlike(300 + i), now + 0.1).backend for i in range(8)]
    assert after.count("b0") >= 4


def test_r31_a_probe_that_answers_again_ends_the_quarantine_at_once() -> None:
    core = dispatcher(2)
    core.drain("b1")
    for turn in range(5):
        core.finish(admit(core, unlike(turn), 1.0), done(Outcome.UPSTREAM_ERROR), 1.0)
    core.undrain("b1")
    core.set_up("b0", False, 1.0)
    core.set_up("b0", True, 1.5)
    assert "b0" in {admit(core, unlike(100 + i), 1.5).backend for i in range(4)}


def test_all_backends_failing_still_answers_with_what_they_say() -> None:
    core = dispatcher(2)
    for turn in range(40):
        answer = core.admit(unlike(turn), 0.01 * turn)
        assert isinstance(answer, Ticket)
        core.finish(answer, done(Outcome.UPSTREAM_5XX), 0.01 * turn)
    core.set_up("b0", False, 1.0)
    core.set_up("b1", False, 1.0)
    assert isinstance(core.admit(unlike(99), 1.0), Refusal)


# -- change, size, unlike hardware ---------------------------------------------------------------


def test_r40_a_big_pool_is_priced_by_a_shortlist() -> None:
    """The figures are `loadtest/bench_decide.py`'s; here, that the work does not grow."""
    rng = Random(1)
    core = dispatcher(256)
    for wanted in queries(100, rng):
        ticket = admit(core, wanted, 0.0)
        assert len(ticket.trail) <= 24


# the other two that narrow keep all of the least loaded: their ties are what a draw is made among
@pytest.mark.parametrize(
    "policy", ["affinity", "dynamo", "lmetric", "power_of_two", "round_robin", "random"]
)
def test_r40_other_policies_look_at_few_of_a_big_pool_too(policy: str) -> None:
    core = dispatcher(256, policy=policy)
    for index in range(600):
        admit(core, unlike(index, 640 + 64 * (index % 7)), 0.0)
    looked_at = [len(admit(core, unlike(1000 + i), 0.0).trail) for i in range(40)]
    assert sum(looked_at) / len(looked_at) <= 20


def test_r40_a_big_pool_is_filled_evenly() -> None:
    core = dispatcher(256)
    tickets = [admit(core, unlike(i, 64), 0.0) for i in range(1024)]
    assert peak_over_mean(spread(tickets), 256) <= 1.5


def test_a_pool_of_unlike_engines_is_loaded_by_what_they_can_do() -> None:
    core = dispatcher(2, profile=EngineProfile())
    now = 0.0
    live: list[tuple[float, float, Ticket]] = []
    for turn in range(600):
        now += 0.1
        for entry in [e for e in live if e[1] <= now]:
            live.remove(entry)
            usage = Usage(3210, 51, 0)
            core.finish(entry[2], done(usage=usage, at=entry[1]), entry[1])
        ticket = admit(core, unlike(turn, 3200), now)
        factor = 4.0 if ticket.backend == "b0" else 1.0
        core.first_token(ticket, now + 0.11 * factor)
        live.append((now, now + 0.5 * factor, ticket))
    last = spread([admit(core, unlike(1000 + i, 3200), now) for i in range(30)])
    assert last["b1"] > 1.5 * last["b0"]


def test_direct_clients_of_a_backend_are_routed_around() -> None:
    """What a second gateway or a direct client put there shows only in the engine's metrics."""
    core = dispatcher(4)
    own = [admit(core, unlike(i), 0.0) for i in range(8)]
    for name in ("b0", "b1", "b2", "b3"):
        ours = spread(own)[name]
        waiting, running, used = (10, 30, 0.2) if name == "b2" else (0, 0, 0.005)
        seen = Snapshot(at=0.2, running=ours + running, waiting=waiting, kv_utilization=used)
        core.observe(name, seen, 0.2)
    assert spread([admit(core, unlike(100 + i), 0.3) for i in range(12)])["b2"] == 0
    # they left
    core.observe("b2", Snapshot(at=0.45, running=spread(own)["b2"], kv_utilization=0.005), 0.45)
    assert spread([admit(core, unlike(200 + i), 0.5) for i in range(40)])["b2"] >= 10
