"""Cells and the capacity they are measured against."""

import pytest

from gateway.sim.cells import WITHIN, YARDSTICK, capacity, run_cell
from gateway.sim.fleet_run import FleetRun, FleetSpec, core_settings
from gateway.sim.generators import synthetic

ONE = FleetSpec(replicas=1)
UNIQUE = synthetic("unique", requests=400)


def test_the_capacity_is_just_kept_and_a_little_more_is_not() -> None:
    most = capacity(UNIQUE, ONE)
    kept = run_cell(UNIQUE(most, 1), YARDSTICK, ONE)
    lost = run_cell(UNIQUE(most * 1.04, 1), YARDSTICK, ONE)
    assert kept["slo_ratio"] >= WITHIN > lost["slo_ratio"]


def test_two_replicas_can_bear_about_twice_as_much() -> None:
    one, two = (capacity(UNIQUE, FleetSpec(replicas=n)) for n in (1, 2))
    assert 1.7 * one < two < 2.6 * one


def test_a_run_that_has_missed_enough_ends_early() -> None:
    workload = UNIQUE(40.0, 1)
    settings = core_settings(workload, ONE, YARDSTICK)
    whole = FleetRun(workload, ONE, settings).run()
    part = FleetRun(workload, ONE, settings).run(most_missed=10)
    missed = [
        r for r in part if r.sent_at >= workload.warm_s and not r.within(workload.slos[r.cls])
    ]
    assert 11 <= len(missed) < 20  # several can end in one step
    assert len(part) < len(whole)
    assert part == whole[: len(part)]


def test_only_our_own_policy_has_a_queue_of_its_own() -> None:
    workload = UNIQUE(4.0, 1)
    assert core_settings(workload, ONE, "cost").queue.enabled
    assert not core_settings(workload, ONE, "lmetric").queue.enabled


def test_figures_tell_what_was_run() -> None:
    figures = run_cell(UNIQUE(4.0, 1), "lmetric", ONE, load=0.5)
    assert {key: figures[key] for key in ("trace", "policy", "load", "rate", "replicas")} == {
        "trace": "synthetic:unique",
        "policy": "lmetric",
        "load": 0.5,
        "rate": 4.0,
        "replicas": 1,
    }
    assert set(figures["classes"]) == {"chat"}


def test_a_fleet_that_bears_anything_has_no_capacity() -> None:
    with pytest.raises(ValueError, match="no rate"):
        capacity(lambda _, seed: UNIQUE(1.0, seed), ONE)
