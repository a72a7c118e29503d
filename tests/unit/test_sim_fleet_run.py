"""A fleet behind the live core on virtual time: what it is for, and that it is honest."""

from array import array
from dataclasses import replace

import pytest

from gateway.core.settings import CoreSettings
from gateway.core.types import Snapshot
from gateway.sim.cells import Setting, run_cell
from gateway.sim.faults_at import Fault, Happening
from gateway.sim.fleet_run import FleetRun, FleetSpec, core_settings
from gateway.sim.generators import MAKERS, synthetic
from gateway.sim.profiles import H100_8B
from gateway.sim.report import Record, Result
from gateway.sim.traffic import CHAT_SLO, CODING_SLO, Ask, Dialogue, Workload

SMALL = 300


def fleet_run(workload: Workload, fleet: FleetSpec, policy: str = "cost") -> FleetRun:
    return FleetRun(workload, fleet, core_settings(workload, fleet, policy))


def asked(workload: Workload) -> int:
    return sum(len(dialogue.asks) for dialogue in workload.dialogues)


def one(*asks: Ask, start: float = 0.0, cls: str | None = "chat") -> Workload:
    tokens = sum(asks[-1][:2])
    hashes = array("Q", range(1, tokens // 16 + 1))
    dialogue = Dialogue(start, cls, hashes, asks)
    slos = {"coding": CODING_SLO, "chat": CHAT_SLO}
    return Workload("one", [dialogue], 1000.0, 0.0, slos, 1.0)


def test_a_lone_long_prompt_takes_what_was_published() -> None:
    (record,) = fleet_run(one(Ask(8000, 100)), FleetSpec()).run()
    assert record.ttft_s == pytest.approx(0.290, abs=0.002)  # results.md, Engine model and profiles
    assert record.tpot_s == pytest.approx(6.98e-3, abs=0.01e-3)


def test_the_next_turn_comes_after_the_answer_and_finds_it_cached() -> None:
    run = fleet_run(one(Ask(1600, 160), Ask(1856, 10, think_s=3.0)), FleetSpec())
    first, second = run.run()
    assert second.sent_at == pytest.approx(first.sent_at + (first.total_s or 0.0) + 3.0)
    assert second.cached_tokens == 1744  # all full blocks of 1,600 + 159 computed tokens
    assert second.backend == first.backend


@pytest.mark.parametrize("name", MAKERS)
def test_every_request_ends_and_nothing_is_owed(name: str) -> None:
    workload = synthetic(name, requests=SMALL)(6.0, 3)
    run = fleet_run(workload, FleetSpec(replicas=3))
    records = run.run()
    assert {record.result for record in records} == {Result.OK}
    singles = all(len(dialogue.asks) == 1 for dialogue in workload.dialogues)
    assert len(records) == asked(workload) if singles else 0 < len(records) <= asked(workload)
    for shown in run.core.backends(1e6):
        assert (shown.in_flight, shown.owed_prefill_s, shown.context_tokens) == (0, 0.0, 0)
    for replica in run.replicas.values():
        assert replica.engine.pool.free == replica.engine.pool.total


def test_the_same_seed_gives_the_same_figures() -> None:
    first = run_cell(synthetic("mix", requests=SMALL)(6.0, 3), "cost", FleetSpec(replicas=3))
    again = run_cell(synthetic("mix", requests=SMALL)(6.0, 3), "cost", FleetSpec(replicas=3))
    assert first == again


def test_other_seeds_give_other_traffic() -> None:
    traffic = synthetic("chat", requests=SMALL)
    assert traffic(6.0, 1).dialogues[0] != traffic(6.0, 2).dialogues[0]


def test_groups_are_kept_together_by_cost_and_not_by_round_robin() -> None:
    workload = synthetic("groups", requests=1500)(15.0, 1)
    ours = run_cell(workload, "cost")
    theirs = run_cell(workload, "round_robin")
    assert ours["hit_rate"] > theirs["hit_rate"] + 0.2
    assert ours["ttft_mean_s"] < 0.5 * theirs["ttft_mean_s"]


def test_a_class_without_a_name_is_the_gateways_to_tell() -> None:
    (record,) = fleet_run(one(Ask(500, 4), cls=None), FleetSpec()).run()
    assert record.cls == "chat"


def test_what_is_adjusted_is_what_runs() -> None:
    workload = synthetic("groups", requests=SMALL)(15.0, 1)
    tiny = Setting("cost", lambda s: _with_index_of(s, 4096), label="forgetful")
    figures = run_cell(workload, tiny)
    assert figures["policy"] == "forgetful"
    assert figures["hit_rate"] < run_cell(workload, "cost")["hit_rate"]


def _with_index_of(settings: CoreSettings, index_bytes: int) -> CoreSettings:
    return replace(settings, index_bytes=index_bytes)


def test_snapshots_come_as_late_as_asked() -> None:
    workload = synthetic("unique", requests=SMALL)(30.0, 1)
    run = fleet_run(workload, FleetSpec(poll_s=1.0, age_s=2.0))
    seen: list[tuple[float, float]] = []
    observe = run.core.observe

    def spy(backend: str, snapshot: Snapshot, now: float) -> None:
        seen.append((now, snapshot.at))
        observe(backend, snapshot, now)

    run.core.observe = spy  # type: ignore[method-assign]
    run.run()
    assert seen
    assert all(now - at == pytest.approx(2.0) for now, at in seen)


def results(records: list[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.result] = counts.get(record.result, 0) + 1
    return counts


def test_a_dead_backend_costs_only_the_answers_it_had_begun() -> None:
    workload = synthetic("unique", requests=600)(20.0, 1)
    run = fleet_run(workload, FleetSpec(faults=(Fault(10.0, Happening.DIES, 2),)))
    records = run.run()
    failed = [record for record in records if record.result is Result.FAILED]
    assert len(records) == asked(workload)
    assert 0 < len(failed) < 40  # what was decoding there
    assert all(record.sent_at <= 10.0 for record in failed)
    late = [record for record in records if record.sent_at > 12.0]
    assert "b2" not in {record.backend for record in late}


def test_a_restarted_backend_comes_back_empty_and_is_known_to_be() -> None:
    workload = synthetic("groups", requests=1200)(12.0, 1)
    fault = Fault(40.0, Happening.RESTARTS, 0, down_s=10.0)
    run = fleet_run(workload, FleetSpec(replicas=4, faults=(fault,)))
    records = run.run()
    back = [r for r in records if r.backend == "b0" and r.sent_at > 51.0]
    assert back
    assert run.replicas["b0"].started_at == 50.0
    shown = {backend.name: backend for backend in run.core.backends(1e6)}
    # it was not believed to hold what it held before: predictions stay honest
    assert shown["b0"].hit_tokens_predicted <= 1.1 * shown["b0"].hit_tokens_reported


def test_a_backend_that_joins_gets_its_share() -> None:
    workload = synthetic("unique", requests=900)(12.0, 1)
    run = fleet_run(workload, FleetSpec(replicas=3, faults=(Fault(5.0, Happening.JOINS, 3),)))
    records = run.run()
    late = [record for record in records if record.sent_at > 10.0]
    share = sum(record.backend == "b3" for record in late) / len(late)
    assert 0.15 < share < 0.35


def test_a_slow_backend_gets_less() -> None:
    workload = synthetic("unique", requests=1200)(20.0, 1)
    run = fleet_run(workload, FleetSpec(replicas=4, faults=(Fault(5.0, Happening.SLOWS, 1),)))
    records = run.run()
    late = [record for record in records if record.sent_at > 20.0]
    share = sum(record.backend == "b1" for record in late) / len(late)
    assert share < 0.18


def test_a_job_too_large_for_the_cache_fails_and_blocks_nobody() -> None:
    workload = one(Ask(H100_8B.engine.kv_tokens + 1, 4))
    (record,) = fleet_run(workload, FleetSpec(replicas=2)).run()
    assert record.result is Result.FAILED
