from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import inf
from random import Random

import pytest

from gateway.core.cost import Demand, refresh
from gateway.core.ledger import Account
from gateway.core.policies import POLICIES, pick, policy_named
from gateway.core.policies.affinity import smg_limit
from gateway.core.policies.published import PUBLISHED
from gateway.core.pool import SHORTLIST_ABOVE
from gateway.core.ring import Ring
from gateway.core.settings import (
    AffinitySpec,
    ChwblSpec,
    CostSpec,
    DynamoSpec,
    PrebleSpec,
    RoutingSpec,
    WeightsSpec,
)
from gateway.core.types import Chain
from tests.core_kit import account, demand, query, ticket_for

WANTED = query(("p", 6400), tail=0)
# the ring sends this prompt everywhere it is not full, and a prefix has no home there
BY_KEY = {"chwbl"}

Pool = tuple[list[Account], list[tuple[int, int]]]
"""Candidates, and what the prefix index says of WANTED."""


def pool(*loads: int, hits: Sequence[int] = (), tokens: int = 640, prefilled: bool = False) -> Pool:
    """Backends with so many requests of `tokens` tokens each, and so many blocks of WANTED."""
    made = [account(slot) for slot in range(len(loads))]
    for row, load in zip(made, loads, strict=True):
        for ident in range(load):
            ticket = ticket_for(query((f"u{ident}", tokens), tail=0), row, ident)
            row.place(ticket, 0.0)
            if prefilled:
                row.prefilled(ticket)
    masks: dict[int, int] = {}
    for row, depth in zip(made, hits, strict=False):
        if depth:
            masks[depth] = masks.get(depth, 0) | row.bit
    return made, sorted(masks.items())


ring = cache(lambda names: Ring(names, ChwblSpec().virtual_nodes))


def want(routing: RoutingSpec | None = None, rows: Sequence[Account] = ()) -> Demand:
    asked = demand(WANTED)
    asked.routing = routing or RoutingSpec()
    asked.ring = ring(tuple(row.name for row in rows))
    return asked


def winners(
    name: str, made: Pool, rounds: int = 200, routing: RoutingSpec | None = None
) -> Counter[int]:
    policy = policy_named(name)
    rng = Random(4)
    counts: Counter[int] = Counter()
    for turn in range(rounds):
        asked = want(routing, made[0])
        asked.cursor = turn
        counts[policy.choose(*made, asked, rng).slot] += 1
    return counts


def priced(name: str, made: Pool, routing: RoutingSpec | None = None) -> list[Account]:
    policy_named(name).choose(*made, want(routing, made[0]), Random(1))
    return made[0]


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(POLICIES) - BY_KEY))
def test_every_policy_spreads_over_equal_idle_backends(name: str) -> None:
    counts = winners(name, pool(0, 0, 0, 0), rounds=400)
    assert len(counts) == 4
    assert min(counts.values()) > 50


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_fills_the_terms_it_names(name: str) -> None:
    made = priced(name, pool(1, 2, 0, hits=(50, 0, 3)))
    assert all(len(row.terms) == len(policy_named(name).terms) for row in made)


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_serves_a_single_backend(name: str) -> None:
    assert winners(name, pool(5), rounds=3) == {0: 3}


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_serves_an_empty_prompt(name: str) -> None:
    made, _ = pool(1, 0)
    asked = demand(query(tail=0))
    assert policy_named(name).choose(made, [], asked, Random(1)) in made


@pytest.mark.parametrize("name", [n for n, policy in POLICIES.items() if policy.narrow])
def test_narrowing_a_big_pool_never_loses_the_winner(name: str) -> None:
    policy = policy_named(name)
    assert policy.narrow is not None
    rng = Random(3)
    for turn in range(60):
        loads = [rng.randrange(4) for _ in range(SHORTLIST_ABOVE + 6)]
        hits = [rng.choice((0, 0, 0, 40, 90, 100)) for _ in loads]
        made, held = pool(*loads, hits=hits)
        for row in made:
            row.other_in_flight = rng.randrange(3)
            refresh(row, 0.0)
        asked = want()
        asked.cursor = turn
        fewer = policy.narrow(made, held, asked, Random(turn))
        assert len(fewer) < len(made)
        if name in {"random", "power_of_two"}:  # the draw itself
            continue
        chosen = policy.choose(fewer, held, asked, Random(turn))
        cheapest = chosen.cost if name != "round_robin" else 0.0
        policy.choose(made, held, asked, Random(turn))
        assert chosen.cost == cheapest == min(row.cost for row in made)
        equals = {row.slot for row in made if row.cost == chosen.cost}
        assert equals <= {row.slot for row in fewer}


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'best'.*round_robin"):
        policy_named("best")


def test_round_robin_takes_turns() -> None:
    assert winners("round_robin", pool(9, 0, 0), rounds=9) == {0: 3, 1: 3, 2: 3}


def test_random_ignores_load() -> None:
    assert len(winners("random", pool(50, 0))) == 2


def test_least_requests_takes_the_least_loaded() -> None:
    assert winners("least_requests", pool(3, 1, 2)) == {1: 200}


def test_power_of_two_never_takes_the_busiest_and_mostly_the_idle() -> None:
    counts = winners("power_of_two", pool(3, 1, 2), rounds=900)
    assert counts[0] == 0
    assert counts[1] == pytest.approx(600, abs=60)


def test_power_of_two_draws_two_different_ones() -> None:
    made, held = pool(1, 2)
    for seed in range(50):
        policy_named("power_of_two").choose(made, held, want(), Random(seed))
        assert [row.cost for row in made] == [1.0, 2.0]


# -- token sums ------------------------------------------------------------------------------------


def test_lmetric_multiplies_owed_and_uncached_tokens_with_requests() -> None:
    made = priced("lmetric", pool(1, 4, 0, hits=(0, 100, 50)))
    # (owed + uncached) x (in flight + 1); of a whole hit one token is computed
    assert [row.cost for row in made] == [7040 * 2, 2561 * 5, 3200 * 1]


def test_dynamo_adds_prefill_less_overlap_and_decode_blocks() -> None:
    made = priced("dynamo", pool(2, 0, hits=(0, 60)))
    # 1,280 owed + 6,400 asked and 1,280 resident tokens in blocks of 16; the other: 2,560 missing
    assert made[0].terms == (480.0, 80.0)
    assert made[1].terms == (160.0, 0.0)
    assert [row.cost for row in made] == [560.0, 160.0]


def test_dynamo_never_credits_more_than_there_is_to_prefill() -> None:
    routing = RoutingSpec(dynamo=DynamoSpec(overlap_weight=2.0, block_tokens=32))
    made = priced("dynamo", pool(1, 1, hits=(60, 20), prefilled=True), routing)
    # 6,400 - 2 x 3,840 < 0; 6,400 - 2 x 1,280 = 3,840 = 120 blocks of 32; 640 resident = 20
    assert [row.terms for row in made] == [(0.0, 20.0), (120.0, 20.0)]


# -- weights ---------------------------------------------------------------------------------------


def test_weights_sum_prefix_queue_and_kv_scores() -> None:
    made, held = pool(0, 2, 4, hits=(0, 50, 100))
    made[0].kv_utilization = 0.5
    routing = RoutingSpec(weights=WeightsSpec(3, 2, 2))
    priced("weights", (made, held), routing)
    assert made[0].terms == (0.0, 1.0, 0.5)
    assert made[1].terms == pytest.approx((0.5, 0.5, 1 - 1280 / 420_000))
    assert made[2].terms[:2] == (1.0, 0.0)
    assert made[0].cost == -(3 * 0.0 + 2 * 1.0 + 2 * 0.5)


def test_one_waiting_request_counts_like_five_hundred() -> None:
    for waiting in (1, 500):
        made, held = pool(0, 0)
        made[0].reported_waiting = waiting
        assert [row.terms[1] for row in priced("weights", (made, held))] == [0.0, 1.0]


def test_weights_with_equal_queues_leave_it_to_the_prefix() -> None:
    assert winners("weights", pool(3, 3, 3, hits=(0, 10, 0))) == {1: 200}


def test_weights_see_what_the_engine_reports_waiting() -> None:
    made, held = pool(0, 0)
    made[0].reported_waiting = 5
    assert winners("weights", (made, held)) == {1: 200}


def test_an_index_of_4096_tokens_cannot_tell_longer_prefixes_apart() -> None:
    made = pool(0, 0, 0, hits=(64, 100, 32))
    capped = RoutingSpec(weights=WeightsSpec(3, 2, 2, index_tokens=4096))
    assert [row.terms[0] for row in priced("weights", made, capped)] == [1.0, 1.0, 0.5]
    assert [row.terms[0] for row in priced("weights", made)] == [0.64, 1.0, 0.32]
    assert set(winners("weights", made, routing=capped)) == {0, 1}
    assert winners("weights", made) == {1: 200}


def test_weights_believe_their_index_whatever_the_engine_reports() -> None:
    made, held = pool(0, 0, hits=(100, 0))
    made[0].trust = 0.1
    assert priced("weights", (made, held))[0].terms[0] == 1.0


# -- homes -----------------------------------------------------------------------------------------


def test_affinity_stays_home_however_busy_within_its_penalty() -> None:
    assert winners("affinity", pool(30, 0, hits=(90, 0))) == {0: 200}


def test_affinity_leaves_a_home_whose_tokens_in_flight_take_the_penalty_longer() -> None:
    # 10 x 64,000 tokens at 1 / 30 us are 19.2 s, 9 are 17.3 s; the others owe nothing
    assert winners("affinity", pool(10, 0, hits=(90, 0), tokens=64_000)) == {1: 200}
    assert winners("affinity", pool(9, 0, hits=(90, 0), tokens=64_000)) == {0: 200}
    # ... or 1.9 s, when it is compared with that
    assert winners("affinity", pool(10, 9, hits=(90, 0), tokens=64_000)) == {0: 200}


def test_the_penalty_of_affinity_is_configured() -> None:
    routing = RoutingSpec(affinity=AffinitySpec(0.5, 1.0))
    made = pool(1, 0, hits=(60, 0), tokens=64_000)
    assert winners("affinity", made, routing=routing) == {1: 200}
    assert winners("affinity", pool(1, 0, hits=(60, 0)), routing=routing) == {0: 200}


def test_affinity_needs_four_fifths_of_the_prompt() -> None:
    assert winners("affinity", pool(1, 0, hits=(79, 0))) == {1: 200}
    assert winners("affinity", pool(1, 0, hits=(80, 0))) == {0: 200}


def test_affinity_takes_the_home_with_the_least_owed() -> None:
    assert winners("affinity", pool(3, 1, 0, hits=(90, 85, 0))) == {1: 200}


def test_smg_follows_a_match_longer_than_half_until_loads_differ_by_32_and_a_tenth() -> None:
    assert winners("smg", pool(2, 1, hits=(60, 0))) == {0: 200}
    assert winners("smg", pool(2, 1, hits=(50, 0))) == {1: 200}
    assert winners("smg", pool(33, 1, hits=(60, 0))) == {0: 200}  # 32 apart
    assert winners("smg", pool(34, 1, hits=(60, 0))) == {1: 200}  # 33 apart
    # 33 apart, but not more than a tenth over the least
    assert winners("smg", pool(363, 330, hits=(60, 0)), rounds=5) == {0: 5}


def test_smg_takes_the_least_loaded_of_equal_matches() -> None:
    assert winners("smg", pool(3, 1, 2, 0, hits=(60, 60, 60, 0))) == {1: 200}


def test_smg_of_today_follows_shorter_matches_for_longer() -> None:
    routing = PUBLISHED["smg-0.3/64/1.5"]
    assert winners("smg", pool(60, 1, hits=(31, 0)), routing=routing) == {0: 200}
    assert winners("smg", pool(66, 1, hits=(31, 0)), routing=routing) == {1: 200}
    assert winners("smg", pool(2, 1, hits=(30, 0)), routing=routing) == {1: 200}


def test_smg_1_13_skips_a_match_far_over_the_mean() -> None:
    routing = PUBLISHED["smg-1.13"]
    # mean 5, two sigma 2, so the floor of 4: followed up to 9
    assert smg_limit([4, 6], 64, 1.5) == 9.0
    # mean 25, two sigma 51.96
    assert smg_limit([10, 10, 10, 70], 64, 1.5) == pytest.approx(76.96, abs=0.01)
    # no deviation: half over the mean
    assert smg_limit([100] * 8, 64, 1.5) == 150.0
    alike = [1] * 30
    assert winners("smg", pool(5, *alike, hits=(60,)), routing=routing) == {0: 200}
    crowded = winners("smg", pool(6, *alike, hits=(60,)), routing=routing)
    assert 0 not in crowded


def test_preble_exploits_a_match_longer_than_what_is_missing() -> None:
    made = pool(0, 0, hits=(51, 0))
    assert winners("preble", made) == {0: 200}
    assert made[0][1].cost == inf


def test_preble_explores_by_windowed_cost_otherwise() -> None:
    made, held = pool(1, 2, hits=(0, 50), tokens=6400)
    priced("preble", (made, held))
    one = made[0].engine.prefill_s(6400, 6400)
    half = made[1].engine.prefill_s(3200, 6400)
    assert made[0].cost == pytest.approx(one + one)
    assert made[1].cost == pytest.approx(2 * one + half)


def test_preble_gives_a_request_away_at_twice_the_least_load() -> None:
    assert winners("preble", pool(2, 1, hits=(90, 0))) == {0: 200}
    assert winners("preble", pool(3, 1, hits=(90, 0))) == {1: 200}
    routing = RoutingSpec(preble=PrebleSpec(redirect_ratio=3.5))
    assert winners("preble", pool(3, 1, hits=(90, 0)), routing=routing) == {0: 200}


def test_chwbl_sends_a_key_to_one_backend_while_it_is_within_its_bound() -> None:
    home = next(iter(winners("chwbl", pool(0, 0, 0, 0), rounds=20)))
    # (total + 1) / 4 x 1.25: 5 there and 11 elsewhere give 5.31, but it would have 6
    loads = [4, 4, 3, 4]
    loads[home] = 5
    assert home not in winners("chwbl", pool(*loads))
    # with 4 of 16 it would have 5
    assert winners("chwbl", pool(4, 4, 4, 4)) == {home: 200}


def test_chwbl_moves_on_to_the_same_next_backend() -> None:
    made = pool(0, 0, 0, 0)
    home = next(iter(winners("chwbl", made, rounds=1)))
    loads = [0, 0, 0, 0]
    loads[home] = 9
    assert len(winners("chwbl", pool(*loads))) == 1


def test_chwbl_keeps_keys_apart_and_spreads_them() -> None:
    made, _ = pool(0, 0, 0, 0)
    asked = want(rows=made)
    counts: Counter[int] = Counter()
    rng = Random(2)
    for _ in range(2000):
        asked.chain = one_block(rng.getrandbits(64))
        counts[policy_named("chwbl").choose(made, [], asked, rng).slot] += 1
    assert max(counts.values()) < 1.25 * 500


def one_block(key: int) -> Chain:
    return Chain(array("Q", [key]), 64.0, 64)


def test_chwbl_of_a_prompt_without_a_block_takes_the_least_loaded() -> None:
    made, _ = pool(2, 1, 3)
    asked = demand(query(tail=30))
    asked.ring = ring(tuple(row.name for row in made))
    assert policy_named("chwbl").choose(made, [], asked, Random(1)).slot == 1


def test_chwbl_goes_home_when_nobody_is_within_the_bound() -> None:
    routing = RoutingSpec(chwbl=ChwblSpec(load_ratio=1.0))
    home = next(iter(winners("chwbl", pool(0, 0, 0), rounds=1)))
    assert winners("chwbl", pool(1, 1, 1), routing=routing) == {home: 200}


# -- cost ------------------------------------------------------------------------------------------


def test_cost_prefers_the_home_of_a_long_prefix() -> None:
    assert winners("cost", pool(1, 1, hits=(0, 99))) == {1: 200}


def test_cost_leaves_a_home_that_owes_more_than_recomputing_costs() -> None:
    assert winners("cost", pool(30, 0, hits=(99, 0))) == {1: 200}


def test_cost_spreads_prices_that_are_nearly_equal() -> None:
    made = pool(0, 0)
    made[0][1].other_owed_s = 0.001  # of a price of 0.22 s
    refresh(made[0][1], 0.0)
    assert len(winners("cost", made)) == 2
    exact = RoutingSpec(cost=CostSpec(tie_ratio=0.0))
    assert winners("cost", made, routing=exact) == {0: 200}


def test_pick_takes_any_of_those_as_cheap_as_the_cheapest() -> None:
    made, _ = pool(0, 0, 0)
    for row, price in zip(made, (1.0, 1.005, 1.02), strict=True):
        row.cost = price
    rng = Random(1)
    assert {pick(made, 0.01, rng).slot for _ in range(100)} == {0, 1}
    assert {pick(made, 0.0, rng).slot for _ in range(100)} == {0}


def test_pick_understands_negative_and_infinite_costs() -> None:
    made, _ = pool(0, 0, 0)
    for row, price in zip(made, (inf, -5.0, -4.0), strict=True):
        row.cost = price
    assert pick(made, 0.01, Random(1)).slot == 1


def test_what_others_published_names_only_known_policies() -> None:
    assert set(POLICIES) <= set(PUBLISHED)
    assert {spec.policy for spec in PUBLISHED.values()} == set(POLICIES)
    assert PUBLISHED["weights-3:3:2-4096"].weights.index_tokens == 4096
