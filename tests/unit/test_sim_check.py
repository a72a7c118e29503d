"""What the simulator's check measures a step by, and when it says the simulator is off."""

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gateway.sim.profiles import Profile
from loadtest import sim_check, sim_play, sim_vllm
from loadtest.sim_check import Compared
from loadtest.sim_fit import Alone, Decode, Fit
from loadtest.sim_play import Run, Streamed

FIT = Fit(
    overhead_s=4e-3,
    step_s=10e-3,
    prefill_token_s=50e-6,
    attention_s=10e-9,
    sequence_s=500e-6,
    context_s=100e-9,
    median_error=0.0,
    worst_error=0.0,
    measurements=12,
)
PROFILE: Profile = sim_vllm.profile_of(FIT)


def played(lanes: list[sim_play.Lane], profile: Profile = PROFILE) -> Run:
    answers = {
        (number, index): list(range(turn.output_tokens))
        for number, lane in enumerate(lanes)
        for index, turn in enumerate(lane.turns)
    }
    return sim_play.simulate(lanes, profile, FIT.overhead_s, answers)


def compared(name: str, profile: Profile = PROFILE) -> Compared:
    """A list, its "real" runs simulated with `profile`, beside the fitted simulator."""
    lanes = (
        sim_play.one_by_one(Random(2), 40)
        if name == "one by one"
        else sim_play.stretched(sim_play.arrivals(Random(2), 40, 10), 0.2)
    )
    real = played(lanes, profile)
    free = played(lanes, sim_check.unbounded(PROFILE))
    return sim_check.compare(name, [real, real], played(lanes), free)


def answer(times: list[float], counts: list[int]) -> Streamed:
    return Streamed(0.0, list(zip(times, counts, strict=True)))


def test_a_step_is_timed_while_all_sequences_decode_even_if_chunks_hold_two_tokens() -> None:
    singles = answer([1.0 + 0.1 * i for i in range(31)], [1] * 31)  # 1.0 .. 4.0
    doubles = answer([2.0 + 0.2 * i for i in range(16)], [2] * 16)  # 2.0 .. 5.0

    step = sim_vllm.step_of([singles, doubles], 100)

    assert step is not None
    assert step.sequences == 2
    assert step.seconds == pytest.approx(0.1)
    assert step.context == 2 * (100 + sim_vllm.DECODED / 2)


def test_sequences_that_hardly_met_measure_nothing() -> None:
    early = answer([1.0 + 0.1 * i for i in range(20)], [1] * 20)
    late = answer([2.5 + 0.1 * i for i in range(20)], [1] * 20)

    assert sim_vllm.step_of([early, late], 100) is None


def test_repeats_of_a_measurement_count_once_by_their_median() -> None:
    measured = [Alone(64, 0, 1.0), Alone(64, 0, 9.0), Alone(64, 0, 2.0), Alone(64, 32, 5.0)]

    kept = sim_vllm.middle([*measured, Decode(1, 84.0, 3.0)])

    assert kept == [Alone(64, 0, 2.0), Alone(64, 32, 5.0), Decode(1, 84.0, 3.0)]


def test_the_simulators_cache_is_one_block_smaller_as_vllm_keeps_one() -> None:
    assert PROFILE.blocks == sim_vllm.BLOCKS - 1
    assert PROFILE.engine.context_token_s == FIT.context_s


def test_capacity_is_that_of_the_list_sent_at_once() -> None:
    lanes = sim_play.arrivals(Random(2), 40, 10)

    slower = replace(PROFILE, engine=replace(PROFILE.engine, step_s=20e-3))

    assert sim_check.capacity(lanes, PROFILE) > sim_check.capacity(lanes, slower) > 0
    assert sim_check.capacity(sim_play.stretched(lanes, 9.0), PROFILE) == pytest.approx(
        sim_check.capacity(lanes, PROFILE)
    )


@pytest.mark.parametrize("name", ["one by one", "arrivals"])
def test_an_engine_like_the_simulator_is_within_bounds(name: str) -> None:
    found = compared(name)

    assert found.faults() == []
    assert found.hits_equal == found.requests == 40
    assert found.hits_real == [found.hits_sim] * 2
    assert 0 < found.hits_sim < found.hits_unbounded
    assert found.ttft.spearman == pytest.approx(1)


def test_a_cache_of_another_size_is_found_by_its_hits() -> None:
    half = replace(PROFILE, engine=replace(PROFILE.engine, kv_tokens=4096))

    (alone, *_) = compared("one by one", half).faults()

    assert "differ in hit tokens" in alone
    assert any("hit tokens, wanted" in fault for fault in compared("arrivals", half).faults())


def test_one_differing_request_is_a_fault_only_where_nothing_depends_on_timing() -> None:
    alone = replace(compared("one by one"), hits_equal=39)
    together = replace(compared("arrivals"), hits_equal=20)

    assert alone.faults() == ["one by one: 1 requests differ in hit tokens"]
    assert together.faults() == []


def test_ttft_that_does_not_follow_is_a_fault_unless_vllm_does_not_follow_itself() -> None:
    found = compared("arrivals")
    wrong = replace(found, ttft=replace(found.ttft, spearman=0.3))
    noisy = replace(wrong, noise=replace(found.noise, spearman=0.4))
    rough = replace(
        wrong,
        ttft=replace(found.ttft, spearman=0.5),
        noise=replace(found.noise, spearman=0.6),
    )

    assert wrong.faults() == ["arrivals: TTFT rank correlation 0.30, wanted 0.70"]
    assert noisy.faults() == []
    assert not noisy.judged
    assert rough.faults() == []


@pytest.mark.parametrize("bias", [0.3, 3.0])
def test_ttft_of_another_size_in_the_same_order_is_a_fault(bias: float) -> None:
    found = compared("arrivals")
    wrong = replace(found, ttft=replace(found.ttft, bias=bias))

    assert wrong.faults() == [f"arrivals: TTFT {bias:.2f} times vLLM's, wanted 0.4 to 2.5"]
    assert replace(wrong, noise=replace(found.noise, spearman=0.4)).faults() == []


def test_the_printed_report_has_both_sides_of_every_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared("arrivals")

    sim_check.show(FIT, [replace(found, noise=replace(found.noise, spearman=0.1))])

    told = capsys.readouterr().out
    assert "step 10.00 ms, prefill 50.0 us a token" in told
    rate = f"{found.hits_sim / found.prompt_tokens:.2%}"
    assert f"vLLM {rate}, {rate}; simulator {rate} (" in told
    assert "the times of this list judge nothing" in told


def test_without_vllm_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["sim_check", "--vllm-python", str(tmp_path / "python")])

    sim_check.main()

    assert capsys.readouterr().out.startswith("skipped: vLLM is not installed here")
