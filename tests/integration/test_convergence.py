"""What is believed of a cache meets what it holds: after twenty requests, whatever happened to it.

Simulated engines in virtual time, each with a surprise. The bound is on sums: predicted hits of the
requests after the first twenty against those the engine reported.
"""

from collections.abc import Iterable, Iterator
from random import Random

import pytest

from gateway.sim.engine import Engine, Job
from tests.integration.convergence_rig import Ask, Bench, Replica, blocks, sized

CLAIMED = 100_000
MEASURED = 60
WITHIN = 20
BOUND = 0.05

TOLD = pytest.mark.parametrize("told", [True, False], ids=["usage", "counters"])


def conversations(count: int, tokens: int = 5000) -> list[list[int]]:
    return [blocks(f"conversation {index}", tokens) for index in range(count)]


def drawn(items: list[list[int]], count: int, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """`count` requests, each one of `items` with an end of its own."""
    rng = Random(seed)
    for index in range(count):
        yield rng.choice(items) + blocks(f"{seed} {index}", 64), []


def bench(told: bool, *, holds: int, claims: int = CLAIMED) -> Bench:
    return Bench([Replica(Engine(sized(holds)), claims)], told=told)


def surprised(run: Bench, items: list[list[int]], *, seed: int) -> None:
    """Serve until a prediction is off for the first time: before that, nothing can be learnt."""
    for request in drawn(items, 500, seed):
        run.one_by_one([request])
        seen = run.seen[-1]
        if abs(seen.predicted - seen.reported) > 1000:
            return
    raise AssertionError("nothing unexpected happened")


def measured(run: Bench, items: list[list[int]], *, seed: int) -> float:
    """Let twenty requests teach, and return the error over the next sixty."""
    run.one_by_one(drawn(items, WITHIN, seed))
    before = len(run.seen)
    run.one_by_one(drawn(items, MEASURED, seed + 1))
    shown = run.seen[before:]
    assert len(shown) == MEASURED
    assert sum(seen.reported for seen in shown) > 50_000  # there were hits to predict
    return run.error(MEASURED)


@TOLD
def test_a_truthful_replica_is_predicted_to_the_token(told: bool) -> None:
    run = bench(told, holds=CLAIMED)
    assert measured(run, conversations(16), seed=1) == 0.0


@TOLD
@pytest.mark.parametrize("seed", [*range(10, 40, 3), 1008, 1015, 1097])
def test_a_replica_that_forgets_everything_unannounced(told: bool, seed: int) -> None:
    run = bench(told, holds=CLAIMED)
    run.one_by_one(drawn(conversations(16), 60, seed))
    run.replicas["b0"].engine.reset_prefix_cache()
    assert measured(run, conversations(16), seed=seed + 1) < BOUND


def crowd(run: Bench, tokens: int, label: str) -> None:
    """Let somebody else's request take `tokens` of the cache."""
    engine = run.replicas["b0"].engine
    engine.submit(Job(label, tokens, 8, blocks(label, tokens)), run.now)
    run.until(run.now + 30.0)
    engine.advance(run.now)
    assert engine.running == 0


@TOLD
@pytest.mark.parametrize("seed", range(10, 40, 3))
def test_a_replica_whose_cache_others_fill_behind_our_back(told: bool, seed: int) -> None:
    run = bench(told, holds=CLAIMED)
    run.one_by_one(drawn(conversations(16), 60, seed))
    crowd(run, 60_000, "others")
    assert measured(run, conversations(16), seed=seed + 1) < BOUND


@TOLD
def test_a_replica_that_restarts_is_forgotten_at_once(told: bool) -> None:
    run = bench(told, holds=CLAIMED)
    run.one_by_one(drawn(conversations(16), 60, 1))
    run.restart("b0")
    before = len(run.seen)
    assert measured(run, conversations(16), seed=2) == 0.0
    assert run.seen[before].predicted == run.seen[before].reported == 0


@TOLD
@pytest.mark.parametrize("seed", range(10, 40, 3))
def test_a_replica_with_half_the_claimed_cache(told: bool, seed: int) -> None:
    run = bench(told, holds=CLAIMED // 2)
    surprised(run, conversations(16), seed=seed)
    assert measured(run, conversations(16), seed=seed + 1) < BOUND


@TOLD
@pytest.mark.parametrize("seed", range(10, 40, 3))
def test_a_replica_that_offloads_and_holds_three_times_its_claim(told: bool, seed: int) -> None:
    run = bench(told, holds=3 * CLAIMED)
    surprised(run, conversations(26), seed=seed)
    assert measured(run, conversations(26), seed=seed + 1) < BOUND


@TOLD
def test_a_replica_that_caches_nothing_is_expected_to_hold_nothing(told: bool) -> None:
    run = bench(told, holds=CLAIMED)
    run.one_by_one(nothing_kept(run, WITHIN))
    before = len(run.seen)
    run.one_by_one(nothing_kept(run, MEASURED))
    shown = run.seen[before:]
    assert sum(seen.reported for seen in shown) == 0
    assert sum(seen.predicted for seen in shown) < BOUND * sum(seen.prompt for seen in shown)


def nothing_kept(run: Bench, count: int) -> Iterator[tuple[list[int], list[int]]]:
    for request in drawn(conversations(4), count, 9):
        run.replicas["b0"].engine.reset_prefix_cache()
        yield request


def grouped(count: int, rate: float, output: int) -> Iterable[Ask]:
    """150 groups of five users: 6,000 common and 1,200 own tokens each; Poisson arrivals."""
    rng = Random(5)
    groups = [blocks(f"group {index}", 6000) for index in range(150)]
    own = [[blocks(f"user {index} {user}", 1200) for user in range(5)] for index in range(150)]
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        group = rng.randrange(150)
        prompt = groups[group] + own[group][rng.randrange(5)]
        yield Ask(prompt, blocks(f"answer {number}", output), now)


@TOLD
def test_hit_rate_under_cache_pressure_is_predicted_within_three_points(told: bool) -> None:
    # all prompts are 1.8 M tokens, 73 % of what eight replicas hold; the answers come on top
    run = Bench([Replica(Engine(sized(307_328)), 307_328) for _ in range(8)], told=told)
    run.serve(grouped(3000, 20.0, 512))
    shown = run.seen[1000:]
    prompt = sum(seen.prompt for seen in shown)
    predicted = sum(seen.predicted for seen in shown) / prompt
    engines = sum(seen.reported for seen in shown) / prompt
    assert 0.7 < engines < 0.99
    assert abs(predicted - engines) < 0.03
