"""Objectives, dominance, and what a better setting may not cost."""

from typing import Any

import pytest

from gateway.sim.tune_goals import OBJECTIVES, SLACK, front, lost, objective, score

TTFT, GOODPUT = OBJECTIVES["ttft_p95"], OBJECTIVES["goodput"]


def row(ttft: float | None, goodput: float, slo: float = 1.0, **classes: float) -> dict[str, Any]:
    return {
        "ttft_p95_s": ttft,
        "goodput_rps": goodput,
        "slo_ratio": slo,
        "classes": {name: {"slo_ratio": share} for name, share in classes.items()},
    }


BASE = row(1.0, 10.0)


def test_a_score_below_one_is_better_whichever_way_a_figure_goes() -> None:
    assert score(row(0.5, 10.0), BASE, [TTFT]) == pytest.approx(0.5)
    assert score(row(1.0, 20.0), BASE, [GOODPUT]) == pytest.approx(0.5)
    assert score(row(0.5, 5.0), BASE, [TTFT, GOODPUT]) == pytest.approx(1.0)
    assert score(BASE, BASE, [TTFT, GOODPUT]) == pytest.approx(1.0)


def test_a_run_that_answered_nobody_is_the_worst() -> None:
    assert score(row(None, 0.0), BASE, [TTFT]) > 1000
    assert score(row(None, 0.0), BASE, [GOODPUT]) > 1000


def test_a_class_that_pays_for_the_others_counts_as_lost() -> None:
    base = row(1.0, 10.0, 0.95, chat=0.99, coding=0.9)
    assert lost(base, base) == pytest.approx(-SLACK)
    assert lost(row(0.1, 20.0, 0.97, chat=0.9, coding=1.0), base) == pytest.approx(0.09 - SLACK)
    assert lost(row(0.1, 20.0, 0.96, chat=1.0, coding=0.895), base) <= 0
    assert lost(row(0.1, 20.0, 0.97, chat=1.0), base) == pytest.approx(0.9 - SLACK)  # none at all


def test_the_front_has_what_nothing_beats_once_and_in_order() -> None:
    rows = [
        row(1.0, 10.0),
        row(2.0, 12.0),
        row(1.0, 10.0),  # the same as the first
        row(2.0, 11.0),  # beaten by the second
        row(0.5, 9.0),
        row(0.5, 8.0),  # beaten by the one before
    ]
    kept = front(range(len(rows)), rows.__getitem__, [TTFT, GOODPUT])
    assert kept == [4, 0, 1]
    assert front(range(len(rows)), rows.__getitem__, [GOODPUT]) == [1]


def test_an_objective_can_be_one_classs() -> None:
    figures = {"ttft_p95_s": 1.0, "classes": {"coding": {"ttft_p95_s": 3.0}}}
    assert objective("coding.ttft_p95").of(figures) == 3.0
    assert objective("chat.ttft_p95").of(figures) > 1000
    assert objective("coding.ttft_p95").title == "coding TTFT p95"


@pytest.mark.parametrize("name", ["speed", "coding.", "coding.speed", "coding.gpus"])
def test_unknown_objectives_are_told(name: str) -> None:
    with pytest.raises(ValueError, match="one of ttft_p95, ttft_mean"):
        objective(name)
