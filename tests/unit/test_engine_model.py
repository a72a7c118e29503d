from dataclasses import replace
from random import Random

import pytest

from gateway.core.engine_model import (
    MAX_BESIDE,
    MIN_PREFILL_TOKENS,
    MIN_SAMPLES,
    EngineModel,
    calibrate,
)
from gateway.core.settings import EngineProfile

PRIOR = EngineProfile()


def fleet(count: int = 4) -> list[EngineModel]:
    return [EngineModel(PRIOR) for _ in range(count)]


def prefill(engine: EngineModel, factor: float, times: int = MIN_SAMPLES) -> None:
    """Show `times` lone prefills of 4,000 tokens, `factor` times as long as the prior's."""
    plain = EngineModel(PRIOR).prefill_s(4000, 4000)
    for _ in range(times):
        assert engine.saw_prefill(factor * plain + 1.5 * engine.step(1, 0), 4000, 4000, 1)


def decode(engine: EngineModel, factor: float, times: int = MIN_SAMPLES) -> None:
    step = EngineModel(PRIOR).step(4, 8000)
    for _ in range(times):
        engine.saw_tpot(factor * step, 4, 8000, 1.0)


def test_an_8k_prompt_alone_takes_the_published_time() -> None:
    # results.md: TTFT 0.290 s, one decode step included
    engine = EngineModel(PRIOR)
    assert engine.prefill_s(8000, 8000) + engine.step(1, 8000) == pytest.approx(0.290, rel=0.02)


def test_cached_tokens_cost_attention_but_no_prefill() -> None:
    engine = EngineModel(PRIOR)
    assert engine.prefill_s(100, 8000) < 0.05 * engine.prefill_s(8000, 8000)
    assert engine.prefill_s(100, 8000) > engine.prefill_s(100, 100)


def test_a_fleet_that_showed_nothing_keeps_the_priors() -> None:
    engines = fleet()
    calibrate(engines)
    assert {e.prefill_token_s for e in engines} == {PRIOR.prefill_token_s}
    assert {e.step_s for e in engines} == {PRIOR.step_s}


def test_a_slow_gpu_is_learnt_from_its_lone_prefills() -> None:
    engines = fleet()
    for engine in engines:
        prefill(engine, 1.0)
    prefill(engines[0], 3.0, times=300)
    calibrate(engines)
    assert engines[0].prefill_token_s == pytest.approx(3 * PRIOR.prefill_token_s, rel=0.05)
    assert engines[1].prefill_token_s == pytest.approx(PRIOR.prefill_token_s, rel=0.01)


def test_a_whole_fleet_of_other_hardware_is_learnt_in_seconds() -> None:
    engines = fleet()
    for engine in engines:
        prefill(engine, 300.0)
        decode(engine, 20.0)
    calibrate(engines)
    assert engines[0].prefill_token_s == pytest.approx(300 * PRIOR.prefill_token_s, rel=0.05)
    assert engines[0].step_s == pytest.approx(20 * PRIOR.step_s, rel=0.05)


def test_nearly_equal_engines_get_equal_prices() -> None:
    engines = fleet()
    for index, engine in enumerate(engines):
        prefill(engine, 1.0 + 0.05 * index)
        decode(engine, 1.0 + 0.05 * index)
    calibrate(engines)
    assert len({e.prefill_token_s for e in engines}) == 1
    assert len({e.step_s for e in engines}) == 1


def test_a_slow_decoder_is_priced_slower_but_at_most_six_times() -> None:
    engines = fleet()
    for engine in engines:
        decode(engine, 1.0)
    decode(engines[0], 2.0, times=60)
    calibrate(engines)
    assert engines[0].slow == pytest.approx(2.0, rel=0.05)
    decode(engines[0], 50.0, times=200)
    calibrate(engines)
    assert engines[0].slow == 6.0


def test_a_new_backend_is_taken_for_a_typical_one() -> None:
    engines = fleet()
    for engine in engines[1:]:
        prefill(engine, 10.0)
    calibrate(engines)
    assert engines[0].prefill_token_s == pytest.approx(10 * PRIOR.prefill_token_s, rel=0.05)


def test_few_samples_move_nothing() -> None:
    engines = fleet()
    prefill(engines[0], 50.0, times=MIN_SAMPLES - 1)
    decode(engines[0], 50.0, times=MIN_SAMPLES - 1)
    calibrate(engines)
    assert engines[0].prefill_token_s == PRIOR.prefill_token_s
    assert engines[0].step_s == PRIOR.step_s


def test_short_prompts_and_impossible_times_teach_nothing() -> None:
    engine = EngineModel(PRIOR)
    assert not engine.saw_prefill(1.0, MIN_PREFILL_TOKENS - 1, 10_000, 1)
    assert not engine.saw_prefill(0.0, 5000, 5000, 1)
    assert not engine.saw_prefill(1.0, 5000, 5000, MAX_BESIDE + 1)
    assert not engine.saw_tpot(0.0, 1, 1, 1.0)
    assert engine.prefill_samples == engine.tpot_samples == 0


def test_load_that_explains_a_slow_stream_is_not_taken_for_a_slow_engine() -> None:
    engines = fleet()
    for engine in engines:
        decode(engine, 1.0)
    busy = engines[0]
    for _ in range(100):
        busy.saw_tpot(2.5 * busy.step(100, 200_000), 100, 200_000, stretch=2.5)
    calibrate(engines)
    assert busy.slow == 1.0


def test_one_absurd_sample_cannot_make_a_backend_free_or_unpayable() -> None:
    engines = fleet(2)
    for engine in engines:
        prefill(engine, 1.0, times=30)
    engines[0].saw_prefill(1e9, 5000, 5000, 1)
    engines[1].saw_prefill(1e-9, 5000, 5000, 1)
    calibrate(engines)
    assert all(0.8 < e.prefill_ratio < 1.2 for e in engines)


def test_load_nobody_told_us_of_does_not_look_like_slow_hardware() -> None:
    engines = fleet()
    rng = Random(1)
    for engine in engines:
        for _ in range(300):
            decode(engine, 1.0 + rng.expovariate(1.0), times=1)
            prefill(engine, 1.0 + rng.expovariate(1.0), times=1)
    calibrate(engines)
    assert engines[0].step_s == PRIOR.step_s
    assert engines[0].prefill_token_s < 1.6 * PRIOR.prefill_token_s


def test_a_backend_thought_slow_is_tried_again_and_its_word_counts_at_once() -> None:
    fast, slow = fleet(2)
    prefill(fast, 1.0, 2 * MIN_SAMPLES)
    prefill(slow, 3.0, 2 * MIN_SAMPLES)
    calibrate([fast, slow])
    believed = slow.prefill_token_s / fast.prefill_token_s
    for _ in range(8):
        prefill(fast, 1.0, 1)
        calibrate([fast, slow])
    doubted = slow.prefill_token_s / fast.prefill_token_s
    prefill(slow, 3.0, 1)

    assert believed > 1.4
    assert doubted < 1.05
    assert slow.prefill_token_s / fast.prefill_token_s == pytest.approx(believed, rel=0.05)


def test_a_slow_backend_that_gets_requests_keeps_its_price() -> None:
    fast, slow = fleet(2)
    prefill(fast, 1.0, 2 * MIN_SAMPLES)
    prefill(slow, 3.0, 2 * MIN_SAMPLES)
    for _ in range(20):
        calibrate([fast, slow])
        assert slow.prefill_token_s > 1.4 * fast.prefill_token_s
        prefill(fast, 1.0, 1)
        prefill(slow, 3.0, 1)


def believed(engines: list[EngineModel]) -> tuple[float, float]:
    """How much slower than the second the first is priced: prefill, decode."""
    calibrate(engines)
    slow, other = engines[:2]
    return slow.prefill_token_s / other.prefill_token_s, slow.step_s / other.step_s


def test_a_gpu_that_slows_down_is_recognised_within_fifty_requests_and_forgiven_as_fast() -> None:
    engines = fleet()
    for engine in engines:
        prefill(engine, 1.0, times=200)
        decode(engine, 1.0, times=200)
    assert believed(engines) == (1.0, 1.0)
    for engine in engines:
        factor = 3.0 if engine is engines[0] else 1.0
        prefill(engine, factor, times=50)
        decode(engine, factor, times=50)
    slow_prefill, slow_decode = believed(engines)
    assert 2.0 < slow_prefill <= 3.05
    assert 2.7 < slow_decode <= 3.05
    for engine in engines:
        prefill(engine, 1.0, times=50)
        decode(engine, 1.0, times=50)
    assert believed(engines) == (1.0, 1.0)


def test_a_gpu_that_only_decodes_slowly_is_not_believed_where_its_prefills_prove_otherwise() -> (
    None
):
    engines = fleet()
    for engine in engines:
        prefill(engine, 1.0, times=50)
        decode(engine, 3.0 if engine is engines[0] else 1.0, times=50)
    slow_prefill, slow_decode = believed(engines)
    assert slow_prefill == 1.0
    assert slow_decode == pytest.approx(3.0, rel=0.05)


def test_a_backend_whose_prefills_nobody_saw_alone_is_as_slow_as_its_streams() -> None:
    engines = fleet()
    for engine in engines:
        decode(engine, 3.0 if engine is engines[0] else 1.0, times=50)
    slow_prefill, slow_decode = believed(engines)
    assert slow_prefill == slow_decode == pytest.approx(3.0, rel=0.05)


def test_streams_that_go_on_being_slow_keep_a_backend_from_being_thought_fast() -> None:
    engines = fleet()
    slow_prefill = 0.0
    for _ in range(10):  # no prefill is ever seen alone
        for engine in engines:
            decode(engine, 3.0 if engine is engines[0] else 1.0, times=4)
        slow_prefill, _ = believed(engines)
    assert slow_prefill == pytest.approx(3.0, rel=0.05)
    for _ in range(4):  # it gets nothing more
        slow_prefill, _ = believed(engines)
    assert slow_prefill < 1.05


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_priors_wrong_by_two_are_corrected_at_every_length(scale: float) -> None:
    truth = EngineModel(PRIOR)
    wrong = replace(
        PRIOR,
        prefill_token_s=scale * PRIOR.prefill_token_s,
        attention_s=scale * PRIOR.attention_s,
    )
    engine = EngineModel(wrong)
    rng = Random(2)
    for _ in range(3 * MIN_SAMPLES):
        prompt = rng.randrange(1000, 20_000)
        uncached = rng.randrange(800, prompt)
        took = truth.prefill_s(uncached, prompt) + 1.5 * truth.step(2, 0)
        engine.saw_prefill(took, uncached, prompt, 2)
    calibrate([engine])
    for uncached, prompt in ((500, 500), (4000, 4000), (1000, 30_000), (60_000, 60_000)):
        expected = truth.prefill_s(uncached, prompt)
        assert engine.prefill_s(uncached, prompt) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_outliers_hardly_move_what_is_learnt(share: float) -> None:
    engines = fleet()
    rng = Random(3)
    for engine in engines:
        for _ in range(200):
            factor = 20.0 if rng.random() < share and engine is engines[0] else 1.0
            prefill(engine, factor, times=1)
    slow_prefill, _ = believed(engines)
    assert slow_prefill < 1.5
