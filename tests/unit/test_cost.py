from dataclasses import fields, replace
from math import exp
from random import Random

import pytest

from gateway.core import cost
from gateway.core.backlog import Backlog
from gateway.core.ledger import Account
from gateway.core.pool import fill
from gateway.core.settings import CostSpec, EngineProfile, RoutingSpec
from gateway.core.types import Query
from tests.core_kit import account, demand, query, ticket_for

RNG = Random(0)
WANTED = query(("p", 4096), output=300, tail=0)


def priced(
    row: Account, wanted: Query = WANTED, *, depth: int = 0, now: float = 0.0
) -> dict[str, float]:
    """Price `wanted` on `row` alone; return the terms by name, and the total as `cost`."""
    cost.refresh(row, now)
    want = demand(wanted, now)
    fill([row], [(depth, row.bit)] if depth else [], want)
    cost.score([row], want, RNG)
    return {**dict(zip(cost.TERMS, row.terms, strict=True)), "cost": row.cost}


def busy(count: int, *, prefilled: bool = True, tokens: int = 1024) -> Account:
    row = account()
    for ident in range(count):
        ticket = ticket_for(query((f"u{ident}", tokens), tail=0), row, ident)
        row.place(ticket, 0.0)
        if prefilled:
            row.prefilled(ticket)
    return row


def test_the_price_is_the_sum_of_its_terms() -> None:
    terms = priced(busy(30))
    total = terms.pop("cost")
    assert total == pytest.approx(sum(terms.values()))


def test_an_idle_backend_costs_the_prefill_and_the_answer() -> None:
    row = account()
    terms = priced(row)
    assert terms["prefill_s"] == pytest.approx(row.engine.prefill_s(4096, 4096))
    for name in ("queue_s", "congestion_s", "eviction_s", "stall_s", "kv_guard_s", "slot_guard_s"):
        assert terms[name] == 0.0, name


@pytest.mark.parametrize("tpot_slo", [0.02, 0.012])
def test_every_term_equals_the_published_formula(tpot_slo: float) -> None:
    """docs/routing.md, computed here independently for one loaded backend."""
    profile = EngineProfile(kv_tokens=40_000, max_sequences=40)
    row = account(profile=profile)
    row.arrivals.apply({"chat": 1 / 2.0, "coding": 1 / 5.0})
    for ident in range(39):
        ticket = ticket_for(query((f"u{ident}", 1024), tail=0), row, ident)
        row.place(ticket, 0.0)
        if ident % 3:
            row.prefilled(ticket)
    row.oldest_use = -30.0
    now, output, prompt, depth = 2.0, 300, 4096, 32
    want = demand(WANTED, now)
    want.hit_share = 0.7
    want.routing = RoutingSpec(cost=CostSpec(others_weight=0.3))
    want.tpot_slo_s = tpot_slo
    want.ttft_slo_s = 5.0
    want.cls = "coding"
    row.arrivals.note("coding", 0.25, 1.0)
    cost.refresh(row, now)
    fill([row], [(depth, row.bit)], want)
    cost.score([row], want, RNG)

    a, b, c, d, e = 6.5e-3, 30e-6, 1.3e-9, 25e-6, 56e-9
    u = prompt - depth * 64
    pf = b * u + c * u * (prompt - u / 2)
    one = b * 1024 + c * 1024 * 512
    n, context = 39, 39 * 1024
    queue = 13 * one
    rho = min(0.85, 39 * one / 8 * exp(-now / 8))
    st = 1 / (1 - rho)
    step, add = a + d * n + e * context, d + e * prompt
    phi = min(1.0, (step + add) * st / (0.7 * tpot_slo))
    chats, codings = 39 / 8 * exp(-now / 8), 0.25 * exp(-now / 8)
    expected = (
        queue,
        pf,
        pf * rho * st,
        pf**2 / 2 * (2.0 * codings + 0.3 * chats * 5.0 / 2.0),
        pf * 10 * 0.7**2 * exp(-(now + 30) / 60),
        pf * 0.1 * phi * n,
        0.05 * phi * output * st * (step + n * add),
        0.1 * output * max(0.0, (step + add) * st - 0.7 * tpot_slo),
        output * step * st * max(0.0, (context + u + output - 0.95 * 40_000) / 40_000),
        output * step * st * max(0.0, (n + 1 - 0.9 * 40) / 40),
    )
    assert [value for value in expected if not value] == ([0.0] if tpot_slo == 0.02 else [])
    assert row.terms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("depth", [1, 10, 63])
def test_a_longer_prefix_hit_is_cheaper(depth: int) -> None:
    assert priced(account(), depth=depth + 1)["cost"] < priced(account(), depth=depth)["cost"]


def test_a_queue_is_paid_in_full() -> None:
    row = busy(5, prefilled=False)
    assert priced(row)["queue_s"] == pytest.approx(row.owed_s)


def test_more_running_streams_cost_more() -> None:
    prices = [priced(busy(count))["cost"] for count in (0, 10, 50, 200)]
    assert prices == sorted(prices)
    assert prices[0] < prices[-1]


def test_recent_prefill_makes_a_backend_dearer_for_a_while() -> None:
    row = busy(20)
    assert (
        priced(row, now=0.1)["congestion_s"]
        > 10 * priced(row, now=5 * CostSpec().congestion_window_s)["congestion_s"]
    )


def followed(cls: str, target_s: float, constants: CostSpec | None = None) -> float:
    """Price WANTED, of class coding, where requests of `cls` keep coming; return what they wait."""
    row = account()
    row.constants = constants or CostSpec(others_weight=0.15)
    row.arrivals.apply({"coding": 1 / 5.0, cls: 1 / target_s})
    for ident in range(20):
        row.place(ticket_for(query((f"u{ident}", 64), cls=cls, tail=0), row, ident), 0.0)
    want = demand(WANTED)
    want.routing = RoutingSpec(cost=row.constants)
    want.cls, want.ttft_slo_s = "coding", 5.0
    fill([row], [], want)
    cost.score([row], want, RNG)
    return row.terms[cost.TERMS.index("followers_s")]


def test_what_a_long_prefill_keeps_waiting_grows_with_its_square() -> None:
    row = busy(20, tokens=64)
    row.arrivals.apply({"chat": 1.0})
    row.arrivals.note("chat", 2.0, 1.0)
    prices = []
    for tokens in (2048, 8192):
        wanted = query(("q", tokens), tail=0)
        want = demand(wanted)
        want.cls = "chat"
        fill([row], [], want)
        cost.score([row], want, RNG)
        prices.append((row.terms[cost.TERMS.index("followers_s")], row.prefill_s))
    (short, short_pf), (long, long_pf) = prices
    assert long / short == pytest.approx((long_pf / short_pf) ** 2)


def test_other_classes_wait_at_a_weight_of_their_own_and_by_their_target() -> None:
    assert followed("chat", 1.0) == pytest.approx(5 * followed("chat", 5.0))
    assert followed("coding", 5.0) > 5 * followed("chat", 5.0)
    none = CostSpec(others_weight=0.0)
    assert followed("chat", 1.0, none) == 0.0
    assert followed("coding", 5.0, none) == pytest.approx(followed("coding", 5.0))


def test_what_waits_at_the_gateway_is_priced_between_its_whole_and_the_shorter_part() -> None:
    row = account()
    row.backlog = backlog = Backlog()
    for _ in range(4):
        backlog.add(1.0)
    row.held_s = 4.0
    terms = priced(row)
    assert terms["queue_s"] == pytest.approx(0.5 * (4.0 + 4 * terms["prefill_s"]))


def test_displacing_what_was_just_used_costs_more_than_displacing_old_prefixes() -> None:
    prices = []
    for last_used in (990.0, 500.0):
        row = account()
        row.oldest_use = last_used
        want = demand(WANTED, 1000.0)
        want.hit_share = 0.9
        fill([row], [], want)
        cost.score([row], want, RNG)
        prices.append(row.terms[cost.TERMS.index("eviction_s")])
    assert prices[0] > 100 * prices[1] > 0


def test_a_nearly_full_kv_cache_is_avoided() -> None:
    row = busy(10, tokens=39_936)
    assert priced(row)["kv_guard_s"] > 0
    assert priced(busy(10))["kv_guard_s"] == 0.0


def test_others_on_the_engine_count_like_our_own() -> None:
    own = priced(busy(40))
    shared = account()
    shared.other_in_flight = 40
    shared.other_context_tokens = 40 * 1024
    assert priced(shared)["decode_s"] == pytest.approx(own["decode_s"], rel=0.5)
    assert priced(shared)["stall_s"] > 0


def test_load_orders_idle_before_busy_backends() -> None:
    rows = [account(), busy(2), busy(2, prefilled=False), busy(60, prefilled=False)]
    for row in rows:
        cost.refresh(row, 0.0)
    loads = [row.load for row in rows]
    assert loads == sorted(loads)
    assert loads[0] == 0.0


def test_a_price_does_not_depend_on_who_looked_before() -> None:
    rows = [busy(20), busy(20)]
    for now in (0.001, 0.004, 0.0155):  # only the first backend is looked at
        fill(rows[:1], [], demand(WANTED, now))
    for now in (0.0156, 0.02, 1.0, 1.015):
        fill(rows, [], demand(WANTED, now))
        cost.score(rows, demand(WANTED, now), RNG)
        assert rows[0].cost == rows[1].cost


def test_prices_follow_the_books_without_being_told() -> None:
    row = busy(3, prefilled=False)
    told = priced(row)
    ticket = ticket_for(query(("late", 8192)), row, 99)
    row.place(ticket, 0.0)
    fill([row], [], demand(WANTED))
    cost.score([row], demand(WANTED), RNG)
    assert row.cost > told["cost"]
    row.prefilled(ticket)
    row.release(ticket)
    fill([row], [], demand(WANTED))
    assert row.queue_s == pytest.approx(told["queue_s"])


CONSTANTS = {
    "congestion_weight": ("congestion_s", 2.0),
    "followers_weight": ("followers_s", 2.0),
    "eviction_weight": ("eviction_s", 2.0),
    "stall_weight": ("stall_s", 2.0),
    "decode_weight": ("decode_s", 2.0),
    "tpot_weight": ("tpot_guard_s", 2.0),
}


def constant_priced(spec: CostSpec) -> dict[str, float]:
    """Price WANTED on one backend on which every part of the formula is above zero."""
    row = account(profile=EngineProfile(kv_tokens=40_000, max_sequences=40))
    row.constants = spec
    row.arrivals.apply({"chat": 1.0})
    for ident in range(39):
        ticket = ticket_for(query((f"u{ident}", 1024), tail=0), row, ident)
        row.place(ticket, 0.0)
        if ident % 3:
            row.prefilled(ticket)
    row.oldest_use = -30.0
    want = demand(WANTED, 2.0)
    want.routing = RoutingSpec(cost=spec)
    want.hit_share = 0.7
    want.tpot_slo_s = 0.012
    want.cls = "chat"
    fill([row], [(32, row.bit)], want)
    cost.score([row], want, RNG)
    return dict(zip(cost.TERMS, row.terms, strict=True))


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_a_weight_scales_its_own_term_and_no_other(name: str) -> None:
    term, factor = CONSTANTS[name]
    plain = constant_priced(CostSpec())
    assert all(plain.values())
    doubled = constant_priced(replace(CostSpec(), **{name: factor * getattr(CostSpec(), name)}))
    assert doubled.pop(term) == pytest.approx(factor * plain.pop(term))
    assert doubled == pytest.approx(plain)


@pytest.mark.parametrize(
    ("name", "value", "term"),
    [
        ("max_congestion", 0.05, "congestion_s"),
        ("congestion_window_s", 80.0, "congestion_s"),
        ("eviction_age_s", 10.0, "eviction_s"),
        ("tpot_share", 1.0, "tpot_guard_s"),
        ("kv_full_ratio", 1.1, "kv_guard_s"),
        ("slots_full_ratio", 0.95, "slot_guard_s"),
    ],
)
def test_a_milder_limit_makes_its_term_smaller(name: str, value: float, term: str) -> None:
    plain = constant_priced(CostSpec())
    milder = constant_priced(replace(CostSpec(), **{name: value}))
    assert milder[term] < 0.9 * plain[term]


def test_a_floor_makes_streams_count_that_are_far_from_their_target() -> None:
    row, floored = busy(30), busy(30)
    floored.constants = CostSpec(stall_floor=0.6)
    plain = priced(row)["stall_s"]
    want = demand(WANTED)
    want.routing = RoutingSpec(cost=floored.constants)
    fill([floored], [], want)
    cost.score([floored], want, RNG)
    assert floored.terms[cost.TERMS.index("stall_s")] > 2 * plain > 0
    assert floored.prefill_s * 0.1 * 30 * 0.6 == pytest.approx(
        floored.terms[cost.TERMS.index("stall_s")]
    )


def test_every_constant_of_cost_is_tested_here_or_by_what_it_decides() -> None:
    """`tie_ratio` and `hot_ratio` move no price: tests of the policies and of the chooser."""
    limits = {"max_congestion", "congestion_window_s", "eviction_age_s", "tpot_share"}
    limits |= {"kv_full_ratio", "slots_full_ratio", "tie_ratio", "hot_ratio"}
    limits |= {"others_weight", "stall_floor"}
    assert {field.name for field in fields(CostSpec)} == limits | set(CONSTANTS)
