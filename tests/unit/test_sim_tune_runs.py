"""The runs of a search: parts of the traffic, one run, how many replicas are needed."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import build
from gateway.config.load import load
from gateway.core.settings import Slo
from gateway.sim.cells import run_cell
from gateway.sim.fleet_run import core_settings
from gateway.sim.measure import traffic_of
from gateway.sim.tune_runs import SEARCH_SHARE, Limit, Need, Part, Run, Source, do, least, mean

SHIPPED = Source(str(Path(__file__).parents[1] / "traces" / "mix.jsonl.gz"))
UNIQUE = Source("synthetic:unique", 150)
RUN = Run(UNIQUE, Part.SEARCH, 20.0, 1, 2, "h100_8b", "cost")


def test_every_request_of_a_trace_counts_in_one_part_and_its_past_warms_the_held_out_one() -> None:
    whole = traffic_of(SHIPPED.trace)(2.0, 1)
    search, held = (SHIPPED.traffic(part)(2.0, 1) for part in Part)
    counted = [d for d in held.dialogues if d.start_s >= held.warm_s]
    warming = len(held.dialogues) - len(counted)
    apart = [d.hashes for d in (*search.dialogues, *counted)]
    assert apart == [d.hashes for d in whole.dialogues]
    assert len(search.dialogues) == int(SEARCH_SHARE * len(whole.dialogues))
    assert [d.hashes for d in held.dialogues[:warming]] == [
        d.hashes for d in search.dialogues[-warming:]
    ]
    assert 0 < warming < len(search.dialogues)
    assert held.dialogues[0].start_s == 0.0
    assert search.seconds + held.seconds - held.warm_s == pytest.approx(whole.seconds)


def test_parts_of_synthetic_traffic_share_no_prompt() -> None:
    search, held = (UNIQUE.traffic(part)(20.0, 1) for part in Part)
    seen = {block for d in search.dialogues for block in d.hashes}
    assert seen
    assert seen.isdisjoint(block for d in held.dialogues for block in d.hashes)


def test_a_trace_too_short_for_two_parts_is_told() -> None:
    few = Source(SHIPPED.trace, 1)
    with pytest.raises(ValueError, match="too few requests"):
        few.traffic(Part.SEARCH)(1.0, 1)


def test_own_targets_replace_the_workloads() -> None:
    strict = replace(UNIQUE, slos=(("chat", Slo(0.001, 0.1)),))
    assert do(RUN)["slo_ratio"] > 0.5
    assert do(replace(RUN, source=strict))["slo_ratio"] == 0.0


def test_a_run_of_the_defaults_is_replays() -> None:
    plain = run_cell(traffic_of(UNIQUE.trace, 150)(20.0, 1), "cost", RUN.fleet, seed=1)
    assert do(RUN) == plain


def test_values_change_what_is_run_and_nothing_is_left_of_them() -> None:
    before = do(RUN)
    held_longer = replace(RUN, rate=60.0, values=(("queue.owed_s", 4.0),))
    assert do(held_longer) != do(replace(RUN, rate=60.0))
    assert do(RUN) == before


def test_an_own_configuration_takes_the_place_of_the_defaults() -> None:
    text = ["classes.chat.max_wait_s=0.5", "queue.owed_s=0.3", "routing.cost.stall_weight=0.7"]
    own = build.core_settings(load(backends=["http://h:1"], overrides=text).config, {})
    run = replace(RUN, own=own, values=(("queue.steal_s", 0.25),))
    plain = core_settings(run.workload(), run.fleet, "cost")
    ran = run.changed(plain)
    assert (ran.queue.owed_s, ran.queue.steal_s) == (0.3, 0.25)
    assert ran.routing.cost.stall_weight == 0.7
    waits = {spec.name: spec.max_wait_s for spec in ran.classes}
    assert waits == {**{spec.name: spec.max_wait_s for spec in plain.classes}, "chat": 0.5}
    assert [spec.slo for spec in ran.classes] == [spec.slo for spec in plain.classes]
    assert ran.models == plain.models
    assert not replace(run, policy="weights").changed(plain).queue.enabled


@pytest.mark.parametrize("guess", [1, 2, 5, 16, 40])
def test_the_least_that_is_kept_is_found_from_any_guess(guess: int) -> None:
    for needed in range(1, 17):
        asked: list[int] = []

        def keeps(count: int, needed: int = needed, asked: list[int] = asked) -> bool:
            asked.append(count)
            return count >= needed

        assert least(keeps, guess, 16) == needed
        assert len(asked) == len(set(asked)) <= 10
        assert all(1 <= count <= 16 for count in asked)
    assert least(lambda count: count > 16, guess, 16) is None


def test_the_replicas_needed_are_just_enough() -> None:
    need = Need(replace(RUN, rate=60.0), (1, 2), 0.9, guess=1, most=16)
    gpus = do(need)["gpus"]
    assert 1 < gpus < 16
    for count, enough in ((gpus, True), (gpus - 1, False)):
        shares = [
            do(replace(need.run, replicas=count, seed=seed))["slo_ratio"] for seed in need.seeds
        ]
        assert (min(shares) >= 0.9) is enough
    assert do(replace(need, most=gpus - 1))["gpus"] is None


def test_a_limit_is_the_capacity_of_the_searched_part() -> None:
    one = replace(RUN, replicas=1)
    two = do(Limit(RUN))["rate"]
    assert 1.5 * do(Limit(one))["rate"] < two < 3 * do(Limit(one))["rate"]


def test_a_mean_sums_counts_and_keeps_gaps() -> None:
    rows = [
        {"policy": "cost", "requests": 2, "rate": 3.0, "ttft_p95_s": 1.0, "hit_rate": None},
        {"policy": "cost", "requests": 4, "rate": 3.0, "ttft_p95_s": 2.0, "hit_rate": 0.5},
    ]
    parts = [{**rows[0], "classes": {"a": {"requests": 1}, "b": {"requests": 1}}}]
    parts += [{**rows[1], "classes": {"a": {"requests": 4}}}]
    assert mean(parts) == {
        "policy": "cost",
        "requests": 6,
        "rate": 3.0,
        "ttft_p95_s": 1.5,
        "hit_rate": None,
        "classes": {"a": {"requests": 5}},
    }
