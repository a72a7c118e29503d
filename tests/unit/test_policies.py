from collections import Counter
from collections.abc import Sequence
from math import inf
from random import Random

import pytest

from gateway.core.cost import Demand, refresh
from gateway.core.ledger import Account
from gateway.core.policies import POLICIES, pick, policy_named
from gateway.core.pool import fill
from tests.core_kit import account, demand, query, ticket_for

WANTED = query(("p", 6400), tail=0)


def rows(
    *loads: int, hits: Sequence[int] = (), tokens: int = 640, prefilled: bool = False
) -> list[Account]:
    """Backends with so many requests of `tokens` tokens each, and so many blocks of WANTED."""
    made = [account(slot) for slot in range(len(loads))]
    for row, load in zip(made, loads, strict=True):
        for ident in range(load):
            ticket = ticket_for(query((f"u{ident}", tokens), tail=0), row, ident)
            row.place(ticket, 0.0)
            if prefilled:
                row.prefilled(ticket)
        refresh(row, 0.0)
    fill(
        made, [(depth, row.bit) for row, depth in zip(made, hits, strict=False)], WANTED.chain, 0.0
    )
    return made


def want() -> Demand:
    return demand(WANTED)


def winners(name: str, made: list[Account], rounds: int = 200) -> Counter[int]:
    policy = policy_named(name)
    rng = Random(4)
    counts: Counter[int] = Counter()
    for turn in range(rounds):
        asked = want()
        asked.cursor = turn
        policy.score(made, asked, rng)
        counts[pick(made, policy.near, rng).slot] += 1
    return counts


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_spreads_over_equal_idle_backends(name: str) -> None:
    counts = winners(name, rows(0, 0, 0, 0), rounds=400)
    assert len(counts) == 4
    assert min(counts.values()) > 50


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_fills_the_terms_it_names(name: str) -> None:
    policy = policy_named(name)
    made = rows(1, 2, 0, hits=(50, 0, 3))
    policy.score(made, want(), Random(1))
    assert all(len(row.terms) == len(policy.terms) for row in made)


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_serves_a_single_backend(name: str) -> None:
    assert winners(name, rows(5), rounds=3) == {0: 3}


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'best'.*round_robin"):
        policy_named("best")


def test_round_robin_takes_turns() -> None:
    assert winners("round_robin", rows(9, 0, 0), rounds=9) == {0: 3, 1: 3, 2: 3}


def test_random_ignores_load() -> None:
    assert len(winners("random", rows(50, 0))) == 2


def test_least_requests_takes_the_least_loaded() -> None:
    assert winners("least_requests", rows(3, 1, 2)) == {1: 200}


def test_power_of_two_never_takes_the_busiest_and_mostly_the_idle() -> None:
    counts = winners("power_of_two", rows(3, 1, 2), rounds=900)
    assert counts[0] == 0
    assert counts[1] == pytest.approx(600, abs=60)


def test_power_of_two_draws_two_different_ones() -> None:
    made = rows(1, 2)
    for seed in range(50):
        policy_named("power_of_two").score(made, want(), Random(seed))
        assert [row.cost for row in made] == [1.0, 2.0]


def test_lmetric_multiplies_owed_tokens_with_requests() -> None:
    made = rows(1, 4, hits=(0, 100))
    policy_named("lmetric").score(made, want(), Random(1))
    assert made[0].cost == (640 + 6400) * 2
    assert made[1].cost == (4 * 640 + 1) * 5


def test_dynamo_adds_prefill_and_context() -> None:
    made = rows(2)
    policy_named("dynamo").score(made, want(), Random(1))
    assert made[0].cost == (1280 + 6400) + made[0].kv_tokens


def test_weights_sum_prefix_queue_and_kv_scores() -> None:
    made = rows(0, 2, 4, hits=(0, 50, 100))
    made[0].kv_utilization = 0.5
    policy_named("weights").score(made, want(), Random(1))
    assert made[0].terms == (0.0, 1.0, 0.5)
    assert made[1].terms[:2] == (0.5, 0.5)
    assert made[2].terms[:2] == (1.0, 0.0)
    assert made[0].cost == -(3 * 0.0 + 2 * 1.0 + 2 * 0.5)


def test_weights_with_equal_queues_leave_it_to_the_prefix() -> None:
    assert winners("weights", rows(3, 3, 3, hits=(0, 10, 0))) == {1: 200}


def test_weights_see_what_the_engine_reports_waiting() -> None:
    made = rows(0, 0)
    made[0].reported_waiting = 5
    assert winners("weights", made) == {1: 200}


def test_affinity_stays_home_however_busy_within_its_penalty() -> None:
    assert winners("affinity", rows(30, 0, hits=(90, 0))) == {0: 200}


def test_affinity_leaves_a_home_whose_queue_is_hopeless() -> None:
    made = rows(40, 0, hits=(90, 0), tokens=64_000)
    assert made[0].owed_s > 18
    assert winners("affinity", made) == {1: 200}


def test_affinity_needs_four_fifths_of_the_prompt() -> None:
    assert winners("affinity", rows(1, 0, hits=(79, 0))) == {1: 200}
    assert winners("affinity", rows(1, 0, hits=(80, 0))) == {0: 200}


def test_affinity_takes_the_home_with_the_least_owed() -> None:
    assert winners("affinity", rows(3, 1, 0, hits=(90, 85, 0))) == {1: 200}


def test_cache_aware_follows_the_match_until_loads_differ_too_much() -> None:
    assert winners("cache_aware", rows(2, 1, hits=(60, 0))) == {0: 200}
    assert winners("cache_aware", rows(90, 1, hits=(60, 0))) == {1: 200}
    assert winners("cache_aware", rows(2, 1, hits=(50, 0))) == {1: 200}


def test_cost_prefers_the_home_of_a_long_prefix() -> None:
    assert winners("cost", rows(1, 1, hits=(0, 99))) == {1: 200}


def test_cost_leaves_a_home_that_owes_more_than_recomputing_costs() -> None:
    assert winners("cost", rows(30, 0, hits=(99, 0))) == {1: 200}


def test_pick_takes_any_of_those_as_cheap_as_the_cheapest() -> None:
    made = rows(0, 0, 0)
    for row, price in zip(made, (1.0, 1.005, 1.02), strict=True):
        row.cost = price
    rng = Random(1)
    assert {pick(made, 0.01, rng).slot for _ in range(100)} == {0, 1}
    assert {pick(made, 0.0, rng).slot for _ in range(100)} == {0}


def test_pick_understands_negative_and_infinite_costs() -> None:
    made = rows(0, 0, 0)
    for row, price in zip(made, (inf, -5.0, -4.0), strict=True):
        row.cost = price
    assert pick(made, 0.01, Random(1)).slot == 1
