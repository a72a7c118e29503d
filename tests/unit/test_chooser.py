from random import Random

from gateway.core.chooser import Chooser
from gateway.core.cost import refresh
from gateway.core.explain import INVEST, NOBODY
from gateway.core.fleet import Fleet
from gateway.core.policies import policy_named
from gateway.core.settings import CostSpec, RoutingSpec, Slo
from tests.core_kit import query, settings

SYSTEM = ("system", 6400)


def chooser(count: int = 2, policy: str = "cost") -> tuple[Fleet, Chooser]:
    rng = Random(1)
    fleet = Fleet(settings(count, policy=policy), rng)
    return fleet, Chooser(fleet, policy_named(policy), rng)


def test_a_choice_changes_neither_books_nor_index() -> None:
    fleet, made = chooser()
    wanted = query(SYSTEM)
    for _ in range(5):
        assert made.choose(fleet.pools["m"], wanted, Slo(), 0.0) is not None
    assert fleet.trie.total_blocks == 0
    assert all(row.in_flight == 0 for row in fleet.by_name.values())


def test_tried_backends_are_not_chosen_again() -> None:
    fleet, made = chooser(3)
    pool = fleet.pools["m"]
    tried = [pool.rows[0].slot, pool.rows[2].slot]
    assert made.choose(pool, query(SYSTEM), Slo(), 0.0, tried) is pool.rows[1]
    assert made.choose(pool, query(SYSTEM), Slo(), 0.0, [row.slot for row in pool.rows]) is None
    assert made.reason == NOBODY


def test_the_last_block_anyone_holds_is_known() -> None:
    fleet, made = chooser()
    pool = fleet.pools["m"]
    prompt = query(SYSTEM, ("user", 640))
    made.choose(pool, prompt, Slo(), 0.0)
    assert made.known is None
    fleet.trie.insert(pool.rows[0].slot, query(SYSTEM).chain.hashes, 0.0)
    made.choose(pool, prompt, Slo(), 0.0)
    assert made.known == prompt.chain.hashes[99]


def test_a_hot_prefix_is_computed_elsewhere_and_booked_at_its_real_price() -> None:
    fleet, made = chooser()
    pool = fleet.pools["m"]
    home, other = pool.rows
    prompt = query(SYSTEM, ("user", 640))
    fleet.trie.insert(home.slot, query(SYSTEM).chain.hashes, 0.0)
    for _ in range(50):
        pool.hot.note(prompt.chain.hashes[99])
    home.other_in_flight = 20
    refresh(home, 0.0)
    assert made.choose(pool, prompt, Slo(), 0.0) is other
    assert made.reason == INVEST
    assert (other.depth, other.hit_tokens) == (0, 0)
    assert other.prefill_s == other.engine.prefill_s(prompt.chain.tokens, prompt.chain.tokens)
    assert home.depth == 100


def test_a_prefix_only_few_ask_for_stays_home() -> None:
    fleet, made = chooser()
    pool = fleet.pools["m"]
    home = pool.rows[0]
    fleet.trie.insert(home.slot, query(SYSTEM).chain.hashes, 0.0)
    home.other_in_flight = 20
    refresh(home, 0.0)
    assert made.choose(pool, query(SYSTEM, ("user", 640)), Slo(), 0.0) is home


def test_in_a_big_pool_the_home_of_the_prefix_is_found() -> None:
    fleet, made = chooser(200)
    pool = fleet.pools["m"]
    home = pool.rows[150]
    prompt = query(SYSTEM, ("user", 640))
    fleet.trie.insert(home.slot, prompt.chain.hashes, 0.0)
    home.other_in_flight = 3
    refresh(home, 0.0)
    assert made.choose(pool, prompt, Slo(), 0.0) is home
    assert len(made.rows) < 30


def test_how_busy_the_homes_of_a_hot_prefix_must_be_is_configured() -> None:
    for ratio, invests in ((1.2, True), (3.0, False)):
        fleet, made = chooser()
        pool = fleet.pools["m"]
        home, other = pool.rows
        prompt = query(SYSTEM, ("user", 640))
        fleet.trie.insert(home.slot, query(SYSTEM).chain.hashes, 0.0)
        for _ in range(50):
            pool.hot.note(prompt.chain.hashes[99])
        home.other_in_flight, other.other_in_flight = 20, 4  # 1.67 times the mean
        for row in pool.rows:
            refresh(row, 0.0)
        made._demand.routing = RoutingSpec(cost=CostSpec(hot_ratio=ratio))
        made.choose(pool, prompt, Slo(), 0.0)
        assert (made.reason == INVEST) is invests
