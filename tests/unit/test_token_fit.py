import pytest

from gateway.core.token_fit import DEFAULT_RATIO, MAX_OVERHEAD, TokenFit


def estimate(fit: TokenFit, size: int) -> float:
    return fit.overhead + size * fit.slope


def test_an_untaught_fit_is_the_default_ratio() -> None:
    assert estimate(TokenFit(), 8000) == 8000 / DEFAULT_RATIO


def test_a_long_prompt_alone_is_taken_as_it_is() -> None:
    fit = TokenFit()
    fit.learn(10_000, 3000)
    assert estimate(fit, 20_000) == pytest.approx(6000)


def test_short_prompts_teach_the_overhead_and_not_the_ratio() -> None:
    fit = TokenFit()
    for size in (40, 60, 80):
        fit.learn(size, 36 + size / 4)
    assert (fit.overhead, fit.slope) == (36, 1 / DEFAULT_RATIO)


def test_short_and_long_prompts_together_find_both() -> None:
    fit = TokenFit()
    for turn in range(60):
        fit.learn(100 + turn, 40 + (100 + turn) / 3)
        fit.learn(5000 + 100 * turn, 40 + (5000 + 100 * turn) / 3)
    assert fit.overhead == pytest.approx(40, abs=0.5)
    assert fit.slope == pytest.approx(1 / 3, rel=0.001)


def test_what_lies_beside_a_short_text_is_no_ratio_and_at_most_a_template() -> None:
    fit = TokenFit()
    for _ in range(100):
        fit.learn(100, 1200)  # an image
    assert (fit.overhead, fit.slope) == (MAX_OVERHEAD, 1 / DEFAULT_RATIO)


def test_middling_prompts_teach_a_ratio_that_no_template_explains() -> None:
    fit = TokenFit()
    fit.learn(2000, 1000)
    assert fit.slope == pytest.approx((1000 - MAX_OVERHEAD) / 2000)


def test_few_tokens_never_give_a_negative_slope() -> None:
    fit = TokenFit()
    fit.learn(100, 90)
    fit.learn(600, 600 / 64)
    assert fit.slope >= 1 / 65
    assert estimate(fit, 10_000) > 0
