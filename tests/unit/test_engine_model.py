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
