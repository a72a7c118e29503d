"""The fit of the simulator's check, and its comparison of two runs."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim_fit import (
    Alone,
    Decode,
    Fit,
    among,
    fit,
    least_squares,
    likeness,
    pearson,
    ranks,
    usual,
)

STEP_TOKENS = 512
TRUTH = {
    "overhead_s": 4e-3,
    "step_s": 11e-3,
    "prefill_token_s": 80e-6,
    "attention_s": 20e-9,
    "sequence_s": 700e-6,
    "context_s": 300e-9,
}


def measured(truth: dict[str, float], noise: float = 0.0) -> list[Alone | Decode]:
    rng = Random(7)
    kinds: list[Alone | Decode] = [Alone(n, 0, 0.0) for n in (64, 256, 500, 1000, 2500, 3500)]
    kinds += [Alone(200, 1024, 0.0), Alone(900, 2048, 0.0)]
    kinds += [Decode(m, m * each, 0.0) for m, each in ((1, 84), (1, 1520), (4, 900), (8, 84))]
    made: list[Alone | Decode] = []
    for one in kinds:
        terms = zip(truth.values(), one.terms(STEP_TOKENS), strict=True)
        seconds = sum(each * count for each, count in terms) * (1 + rng.uniform(-noise, noise))
        made.append(
            Alone(one.uncached, one.cached, seconds)
            if isinstance(one, Alone)
            else Decode(one.sequences, one.context, seconds)
        )
    return made


def told(fitted: Fit) -> dict[str, float]:
    return {name: getattr(fitted, name) for name in TRUTH}


def test_measurements_without_noise_give_the_model_they_were_made_with() -> None:
    fitted = fit(measured(TRUTH), STEP_TOKENS)

    assert told(fitted) == pytest.approx(TRUTH, rel=1e-6)
    assert fitted.worst_error < 1e-9
    assert fitted.measurements == 12


def test_noise_of_three_percent_leaves_the_big_terms_within_a_fifth() -> None:
    fitted = fit(measured(TRUTH, noise=0.03), STEP_TOKENS)

    assert fitted.step_s == pytest.approx(TRUTH["step_s"], rel=0.2)
    assert fitted.prefill_token_s == pytest.approx(TRUTH["prefill_token_s"], rel=0.2)
    assert 0 < fitted.median_error < 0.03


def test_a_term_that_costs_nothing_is_never_fitted_below_zero() -> None:
    truth = TRUTH | {"attention_s": 0.0, "context_s": 0.0}

    for noise in (0.0, 0.05, 0.2):
        assert min(told(fit(measured(truth, noise), STEP_TOKENS)).values()) >= 0


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot tell 6 terms apart"):
        fit(measured(TRUTH)[:5], STEP_TOKENS)


def test_a_chunked_prefill_counts_a_step_for_each_chunk_and_context_once() -> None:
    assert Alone(1025, 0, 1.0).terms(512) == [1, 3, 1025, 1025 * 1025 / 2, 3, 0]
    assert Alone(512, 64, 1.0).terms(512) == [1, 1, 512, 512 * (64 + 256), 1, 0]


@given(st.integers(0, 2**32))
def test_no_small_change_of_the_least_squares_answer_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, wanted = rng.normal(size=(8, 3)), rng.normal(size=8)

    found = least_squares(rows, wanted)

    def error(x: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
        left = rows @ x - wanted
        return float(left @ left)

    assert found.min() >= 0
    for column in range(3):
        for change in (1e-3, -1e-3):
            moved = found.copy()
            moved[column] = max(0.0, moved[column] + change)
            assert error(moved) >= error(found) - 1e-12


def test_equal_values_share_their_rank() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0, 2.5, 1]


def test_a_run_in_the_same_order_correlates_by_rank_whatever_its_scale() -> None:
    real = [0.1, 0.2, 0.4, 3.0]

    like = likeness(real, [value**3 * 2 for value in real])

    assert like.spearman == pytest.approx(1)
    assert like.pearson < 1
    assert likeness(real, [-value for value in real]).spearman == pytest.approx(-1)


def test_errors_are_relative_to_the_real_run() -> None:
    like = likeness([1.0, 2.0, 4.0, 8.0, 10.0], [1.5, 3.0, 6.0, 12.0, 15.0])

    assert (like.median_error, like.p90_error, like.bias) == (0.5, 0.5, 1.5)
    assert like.pearson == pytest.approx(1)


def test_figures_that_never_vary_correlate_with_nothing() -> None:
    assert pearson(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])) == 0


@pytest.mark.parametrize("real", [[1.0, 2.0], [1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_what_cannot_be_compared_is_refused(real: list[float]) -> None:
    with pytest.raises(ValueError, match="three requests"):
        likeness(real, [1.0, 2.0, 3.0])


def test_one_slow_run_of_three_leaves_each_requests_usual_time() -> None:
    assert usual([[1.0, 2.0, 3.0], [9.0, 2.5, 3.0], [1.5, 2.0, 8.0]]) == [1.5, 2.0, 3.0]


def test_runs_are_compared_with_the_median_of_the_others() -> None:
    steady = [1.0, 2.0, 3.0, 4.0]

    assert among([steady, steady, steady]).spearman == pytest.approx(1)
    assert among([steady, steady, steady]).p90_error == 0
    assert among([steady, steady[::-1], steady, steady]).spearman == pytest.approx((3 - 1) / 4)
    with pytest.raises(ValueError, match="no other"):
        among([steady])
