from typing import Any

from gateway.cli.explain import render


def test_a_term_that_is_rounding_noise_is_shown_as_nothing() -> None:
    backend: dict[str, Any] = {
        "name": "a",
        "hit_tokens": 0,
        "uncached_tokens": 7,
        "in_flight": 0,
        "owed_prefill_s": 0.0,
        "cost_s": 0.01,
        "eligible": True,
        "terms": {"prefill_s": 0.00021, "congestion_s": 1.804e-11, "bonus": -0.5},
    }
    answer = {
        "class": "chat",
        "class_rule": "default",
        "prompt_tokens": 7,
        "prompt_tokens_exact": False,
        "policy": "cost",
        "winner": "a",
        "reason": "lowest cost",
        "backends": [backend],
    }

    assert render(answer).endswith("  prefill_s=0.00021 congestion_s=0 bonus=-0.5")
