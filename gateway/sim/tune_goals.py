"""What a search is for: objectives, who beats whom, and what a better setting may not cost.

Pure arithmetic on figures.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, TypeVar

# A setting that keeps fewer within SLO than the defaults, in total or in a class, by more than this
# is no better for whatever else it is: it has refused or starved somebody.
SLACK = 0.01
_LEAST = 1e-4  # figures have four digits
_WORST_S = 1e6  # nobody got a first token

_T = TypeVar("_T")


@dataclass(slots=True, frozen=True)
class Objective:
    """A figure that is to be small, or large; `cls` = of that class alone."""

    name: str
    title: str
    key: str
    form: str
    larger: bool = False
    cls: str | None = None

    def of(self, row: dict[str, Any]) -> float:
        """Return the figure, the worst there can be where a run has none."""
        part = row if self.cls is None else row["classes"].get(self.cls, {})
        value = part.get(self.key)
        if value is None:
            return 0.0 if self.larger else _WORST_S
        return float(value)

    def ratio(self, row: dict[str, Any], base: dict[str, Any]) -> float:
        """Return how many times the base's figure it is: below 1 is better, either way."""
        ours, theirs = max(self.of(row), _LEAST), max(self.of(base), _LEAST)
        return theirs / ours if self.larger else ours / theirs


GPUS = Objective("gpus", "GPUs", "gpus", "d")
OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective("ttft_p95", "TTFT p95", "ttft_p95_s", "s"),
        Objective("ttft_mean", "TTFT mean", "ttft_mean_s", "s"),
        Objective("ttft_p99", "TTFT p99", "ttft_p99_s", "s"),
        Objective("tpot_p95", "TPOT p95", "tpot_p95_s", "s"),
        Objective("goodput", "goodput/s", "goodput_rps", "f", larger=True),
        Objective("slo", "in SLO", "slo_ratio", "%", larger=True),
        Objective("hit_rate", "hit rate", "hit_rate", "%", larger=True),
        GPUS,
    )
}


def objective(name: str) -> Objective:
    """Return what `ttft_p95` or `coding.ttft_p95` means.

    Raises:
        ValueError: no such figure.
    """
    cls, _, figure = name.rpartition(".")
    found = OBJECTIVES.get(figure)
    if found is None or (cls and found is GPUS):
        raise ValueError(f"unknown objective {name!r}: one of {', '.join(OBJECTIVES)}")
    if not cls:
        return found
    return Objective(name, f"{cls} {found.title}", found.key, found.form, found.larger, cls)


def score(row: dict[str, Any], base: dict[str, Any], goals: Sequence[Objective]) -> float:
    """Return the geometric mean of the ratios to the base: below 1 is better."""
    return exp(sum(log(goal.ratio(row, base)) for goal in goals) / len(goals))


def lost(row: dict[str, Any], base: dict[str, Any]) -> float:
    """Return how far it falls short of the base's share within SLO, in its worst class.

    Above 0 = by more than may be.
    """
    pairs = [(row, base)]
    pairs += [(row["classes"].get(name, {}), part) for name, part in base["classes"].items()]
    shares = [(ours.get("slo_ratio") or 0.0, theirs["slo_ratio"] or 0.0) for ours, theirs in pairs]
    return max(theirs - ours for ours, theirs in shares) - SLACK


def front(
    items: Iterable[_T], row: Callable[[_T], dict[str, Any]], goals: Sequence[Objective]
) -> list[_T]:
    """Return those that no other is at least as good as in everything and better in something.

    Of equals, the first is kept. In order of the first objective, best first.
    """
    points = [(item, _point(row(item), goals)) for item in items]
    kept: list[tuple[_T, tuple[float, ...]]] = []
    for item, point in points:
        beaten = any(_beats(other, point) for _, other in points)
        if not beaten and all(other != point for _, other in kept):
            kept.append((item, point))
    return [item for item, _ in sorted(kept, key=lambda pair: pair[1])]


def _point(row: dict[str, Any], goals: Sequence[Objective]) -> tuple[float, ...]:
    return tuple(-goal.of(row) if goal.larger else goal.of(row) for goal in goals)


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(ours <= theirs for ours, theirs in zip(one, other, strict=True))
