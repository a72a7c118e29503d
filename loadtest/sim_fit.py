"""The pure half of the simulator's check: a step-time fit by least squares, and how two runs compare.

Never talks to an engine, reads a clock or prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TERMS: Final = ("overhead_s", "step_s", "prefill_token_s", "attention_s", "sequence_s", "context_s")


@dataclass(frozen=True)
class Alone:
    """The TTFT of a request nothing runs beside: `uncached` tokens to prefill after `cached` ones."""

    uncached: int
    cached: int
    seconds: float

    def terms(self, step_tokens: int) -> list[float]:
        """Return how often each of `TERMS` is in it."""
        steps = ceil(self.uncached / step_tokens)
        attention = self.uncached * (self.cached + self.uncached / 2)
        return [1, steps, self.uncached, attention, steps, 0]


@dataclass(frozen=True)
class Decode:
    """The seconds of one step that decodes `sequences`, which have `context` tokens together."""

    sequences: int
    context: float
    seconds: float

    def terms(self, _step_tokens: int) -> list[float]:
        """Return how often each of `TERMS` is in it."""
        return [0, 1, 0, 0, self.sequences, self.context]


@dataclass(frozen=True)
class Fit:
    """The terms of `core.settings.EngineProfile`, and what a request costs outside the engine.

    `median_error` and `worst_error` are relative, over the measurements it was made from.
    """

    overhead_s: float
    step_s: float
    prefill_token_s: float
    attention_s: float
    sequence_s: float
    context_s: float
    median_error: float
    worst_error: float
    measurements: int


def fit(measured: Sequence[Alone | Decode], step_tokens: int) -> Fit:
    """Return the terms, none below zero, with the least squared relative error.

    Raises:
        ValueError: fewer measurements than terms.
    """
    if len(measured) < len(TERMS):
        raise ValueError(f"{len(measured)} measurements cannot tell {len(TERMS)} terms apart")
    seconds = np.array([one.seconds for one in measured])
    # each row by its own seconds: a long prefill must not outweigh every decode step
    rows = np.array([one.terms(step_tokens) for one in measured]) / seconds[:, None]
    found = least_squares(rows, np.ones(len(measured)))
    errors = np.abs(rows @ found - 1)
    overhead, step, prefill, attention, sequence, context = map(float, found)
    return Fit(
        overhead_s=overhead,
        step_s=step,
        prefill_token_s=prefill,
        attention_s=attention,
        sequence_s=sequence,
        context_s=context,
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        measurements=len(measured),
    )


def least_squares(rows: Array, wanted: Array) -> Array:
    """Return x >= 0 for the least |rows x - wanted|: every set of columns tried, at most a few dozen.

    Exact, where dropping negative terms one by one may end at a worse set.
    """
    columns = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best, least = np.zeros(columns), float(wanted @ wanted)
    for kept in range(1, 1 << columns):
        chosen = [column for column in range(columns) if kept >> column & 1]
        part, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
        if part.min() < 0:
            continue
        left = scaled[:, chosen] @ part - wanted
        error = float(left @ left)
        if error < least:
            best, least = np.zeros(columns), error
            best[chosen] = part
    return np.asarray(best / scale, dtype=np.float64)


@dataclass(frozen=True)
class Likeness:
    """How a run's figures follow a real one's, request by request.

    Errors are |run - real| / real; `bias` is the median of run / real.
    """

    spearman: float
    pearson: float
    median_error: float
    p90_error: float
    bias: float


def likeness(real: Sequence[float], run: Sequence[float]) -> Likeness:
    """Compare two runs of one list, in the same order.

    Raises:
        ValueError: fewer than three requests, lists of different lengths, or a real figure of zero.
    """
    if len(real) != len(run) or len(real) < 3 or min(real) <= 0:
        raise ValueError("comparing takes three requests or more, all with times above zero")
    truth, told = np.array(real), np.array(run)
    errors = np.abs(told - truth) / truth
    return Likeness(
        spearman=pearson(ranks(truth), ranks(told)),
        pearson=pearson(truth, told),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        bias=float(np.median(told / truth)),
    )


def usual(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return each request's median over the runs of one list, which are in the same order."""
    return [float(value) for value in np.median(np.array(runs), axis=0)]


def among(runs: Sequence[Sequence[float]]) -> Likeness:
    """Return how each run of a list follows the median of the others, on average.

    Raises:
        ValueError: fewer than two runs, or what `likeness` refuses.
    """
    if len(runs) < 2:
        raise ValueError("one run has no other to be like")
    found = [
        likeness(usual([*runs[:number], *runs[number + 1 :]]), run)
        for number, run in enumerate(runs)
    ]
    names = [field.name for field in fields(Likeness)]
    return Likeness(
        **{name: float(np.mean([getattr(like, name) for like in found])) for name in names}
    )


def ranks(values: Array) -> Array:
    """Return each value's rank from 0; equal values share the mean of theirs."""
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, side="left")
    last = np.searchsorted(ordered, values, side="right") - 1
    return np.asarray((first + last) / 2, dtype=np.float64)


def pearson(one: Array, other: Array) -> float:
    """Return the correlation; 0 if either never varies."""
    a, b = one - one.mean(), other - other.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0
