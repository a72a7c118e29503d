"""The search: trial 0, determinism, what an interrupt leaves, the held-out check."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.sim.measure import Workers
from gateway.sim.tune import DEFAULTS, FOUND, REFERENCE, Check, Task, Trial, Tuner, Tuning
from gateway.sim.tune_goals import GPUS, OBJECTIVES, lost
from gateway.sim.tune_runs import Need, Part, Source, do
from gateway.sim.tune_space import knobs

GOALS = (OBJECTIVES["ttft_p95"], OBJECTIVES["goodput"])
TINY = Task(
    Source("synthetic:groups", 60),
    GOALS,
    knobs("cost", ["queue.owed_s", "routing.cost.eviction_weight", "routing.cost.stall_weight"]),
    rate=12.0,
    replicas=2,
    trials=10,
    seeds=1,
)


def silent(_: str) -> None:
    pass


def tuned(task: Task, jobs: int = 1, told: Callable[[str], None] = silent) -> Tuning:
    with Workers(jobs) as workers:
        tuner = Tuner(task, workers, told)
        tuner.run()
    return tuner.tuning


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return tuned(TINY)


def test_trial_0_is_the_defaults(tuning: Tuning) -> None:
    assert tuning.trials[0].values == ()
    assert [trial.number for trial in tuning.trials] == list(range(TINY.trials))
    assert len({trial.values for trial in tuning.trials}) == TINY.trials
    assert tuning.score_of(tuning.trials[0]) == pytest.approx(1.0)


def test_a_seed_gives_the_same_search_in_any_number_of_processes(tuning: Tuning) -> None:
    assert tuned(TINY, jobs=2) == tuning


def test_another_seed_gives_another_search(tuning: Tuning) -> None:
    other = tuned(replace(TINY, seed=2, trials=3))
    assert other.trials[1].values != tuning.trials[1].values


def test_trials_are_what_their_values_give_when_run_again(tuning: Tuning) -> None:
    tuner = Tuner(TINY, Workers(1), silent)
    for trial in tuning.trials[::4]:
        assert do(tuner._run(trial.values, TINY.seed)) == trial.row


def test_the_final_figures_are_from_traffic_that_was_not_searched(tuning: Tuning) -> None:
    assert tuning.check is not None
    rows = tuning.check.rows
    assert set(rows) - {FOUND} == {DEFAULTS, REFERENCE}
    assert rows[DEFAULTS]["requests"] > 2 * tuning.base["requests"]  # three runs
    again = Tuner(TINY, Workers(1), silent)
    seeds = range(TINY.seed, TINY.seed + 3)
    held = [do(again._run((), seed, part=Part.HELD, label=DEFAULTS)) for seed in seeds]
    assert rows[DEFAULTS]["ttft_p95_s"] == pytest.approx(
        sum(row["ttft_p95_s"] for row in held) / 3, abs=1e-4
    )


def test_an_interrupt_leaves_every_trial_that_was_finished() -> None:
    heard: list[str] = []

    def told(text: str) -> None:
        heard.append(text)
        if len(heard) == 4:  # trial 0, then three runs of the first eight
            raise KeyboardInterrupt

    with Workers(1) as workers:
        tuner = Tuner(TINY, workers, told)
        with pytest.raises(KeyboardInterrupt):
            tuner.run()
    assert [trial.number for trial in tuner.tuning.trials] == [0, 1, 2, 3]
    assert tuner.tuning.check is None
    assert tuner.tuning.front()


def test_defaults_outside_a_narrowed_range_are_trial_0_all_the_same() -> None:
    chosen = knobs("cost", ["queue.owed_s=1:4"])
    tuning = tuned(replace(TINY, knobs=chosen, trials=4))
    assert tuning.trials[0].values == ()
    assert all(1 <= dict(trial.values)["queue.owed_s"] <= 4 for trial in tuning.trials[1:])


def test_a_load_is_a_share_of_the_capacity() -> None:
    two = [tuned(replace(TINY, rate=None, load=load, trials=1)) for load in (0.4, 0.8)]
    assert two[1].task.rate == pytest.approx(2 * (two[0].task.rate or 0))


def test_auto_takes_the_fleet_the_defaults_need_and_counts_for_all() -> None:
    goals = (*GOALS, GPUS)
    task = replace(TINY, goals=goals, rate=30.0, replicas=None, trials=2, share=0.9, most=12)
    tuning = tuned(task)
    tuner = Tuner(task, Workers(1), silent)
    need = tuner._need((), guess=1)
    assert isinstance(need, Need)
    assert tuning.task.replicas == tuning.base["gpus"] == do(need)["gpus"]
    assert tuning.check is not None
    assert all("gpus" in row for row in tuning.check.rows.values())


def test_a_fleet_that_no_number_of_replicas_makes_is_told() -> None:
    task = replace(TINY, rate=200.0, replicas=None, most=2)
    with pytest.raises(ValueError, match=r"2 replicas do not keep 99\.0% within SLO"):
        tuned(task)


def trial(number: int, ttft: float, goodput: float, slo: float = 1.0) -> Trial:
    row: dict[str, Any] = {"ttft_p95_s": ttft, "goodput_rps": goodput, "slo_ratio": slo}
    return Trial(number, (("queue.owed_s", 1.0),), {**row, "classes": {}})


def test_found_is_what_gains_most_and_loses_nobody() -> None:
    tuning = Tuning(TINY, [trial(0, 1.0, 10.0)])
    assert tuning.found() is None
    tuning.trials += [trial(1, 0.9, 10.0), trial(2, 0.1, 20.0, slo=0.9), trial(3, 0.8, 10.5)]
    tuning.trials += [trial(4, 0.7, 6.0)]
    assert lost(tuning.trials[2].row, tuning.base) > 0
    assert tuning.found() is tuning.trials[3]
    assert [one.number for one in tuning.front()] == [4, 3]


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        (Check({}, 0.9, 3), True),
        (Check({}, 0.9, 1), False),  # by one lucky run
        (Check({}, 0.995, 3), False),  # not worth it
        (Check({}, 0.9, 3, worse_slo=True), False),
        (Check({}), False),  # nothing was found
    ],
)
def test_a_setting_holds_if_it_is_clearly_better_on_most_runs(check: Check, holds: bool) -> None:
    assert check.holds is holds
