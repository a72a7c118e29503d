"""What a search came to, as text, as JSON and as a picture.

Says plainly when nothing better was found, and what was not checked. Never prints, never searches.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gateway.extras import load_figure
from gateway.sim import measure
from gateway.sim.tune import DEFAULTS, FOUND, Trial, Tuning
from gateway.sim.tune_goals import OBJECTIVES, Objective
from gateway.sim.tune_runs import HELD_SEEDS_FROM, SEARCH_SHARE
from gateway.sim.tune_space import fragment

_SHOWN = 8  # of the front in text; JSON has all of it
_LABEL = 36
# Twenty requests beyond a 95th percentile.
_ENOUGH = 400


def text(tuning: Tuning) -> str:
    """Return everything for people; the configuration fragment last."""
    parts = [_title(tuning), _front_table(tuning), _values_table(tuning)]
    parts += [_check_table(tuning), _gpus(tuning), config(tuning)]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def verdict(tuning: Tuning) -> str:
    """Return in one line whether there is anything to change."""
    check, best = tuning.check, tuning.found()
    if best is None:
        return f"nothing better than {_zero(tuning)} was found"
    if check is None or check.score is None:
        return f"trial {best.number}, interrupted before it was checked on held-out traffic"
    measured = (
        f"score {check.score:.3f} (1 = {_zero(tuning)}), "
        f"better on {check.better_on} of {check.runs} runs"
    )
    if check.worse_slo:
        measured += ", but fewer requests of some class within SLO"
    if check.holds:
        return f"trial {best.number} holds on held-out traffic: {measured}"
    return (
        f"keep {_zero(tuning)}: trial {best.number} does not hold on held-out traffic: {measured}"
    )


def _zero(tuning: Tuning) -> str:
    return "the defaults" if tuning.task.config is None else "your configuration"


def warning(tuning: Tuning) -> str:
    """Return what makes the check weak; empty = nothing."""
    check = tuning.check
    if check is None:
        return ""
    each = check.rows[DEFAULTS]["requests"] // check.runs
    if each >= _ENOUGH:
        return ""
    return f"Only {each} requests are counted in a held-out run: percentiles are rough, use more."


def config(tuning: Tuning) -> str:
    """Return YAML to put into a configuration: what was found if it held, else no change."""
    best, check = tuning.found(), tuning.check
    use = best is not None and (check is None or check.holds)
    values = best.values if best is not None and use else ()
    notes = [f"radixgate tune {tuning.task.source.trace}: {verdict(tuning)}"]
    return fragment(tuning.task.policy, values, notes, tuning.task.config)


def as_json(tuning: Tuning, *, interrupted: bool) -> dict[str, Any]:
    """Return everything for programs."""
    task, check, best = tuning.task, tuning.check, tuning.found()
    return {
        "trace": task.source.trace,
        "policy": task.policy,
        "load": task.load,
        "rate": task.rate,
        "replicas": task.replicas,
        "profile": task.profile,
        "objectives": [goal.name for goal in task.goals],
        "slo_share": task.share,
        "interrupted": interrupted,
        "trials": [_trial(tuning, trial) for trial in tuning.trials],
        "front": [trial.number for trial in tuning.front()] if tuning.trials else [],
        "found": None if best is None else best.number,
        "held_out": None
        if check is None
        else {
            "rows": check.rows,
            "score": check.score,
            "better_on": check.better_on,
            "runs": check.runs,
            "holds": check.holds,
        },
        "verdict": verdict(tuning),
        "warning": warning(tuning),
        "config": config(tuning),
    }


def _trial(tuning: Tuning, trial: Trial) -> dict[str, Any]:
    values = {knob.key: knob.default for knob in tuning.task.knobs} | dict(trial.values)
    score = round(tuning.score_of(trial), 4)
    return {"number": trial.number, "score": score, "values": values, "figures": trial.row}


def _title(tuning: Tuning) -> str:
    task = tuning.task
    load = "" if task.load is None else f"{task.load:.0%} of capacity, "
    rate = "" if task.rate is None else f"rate {task.rate:g}, "
    return (
        f"{task.source.trace}: {load}{rate}{task.replicas} replicas, policy {task.policy}, "
        f"{len(tuning.trials)} trials of {task.seeds} runs"
    )


def _front_table(tuning: Tuning) -> str:
    """Return the front with the defaults first, whether they are on it or not."""
    if not tuning.trials:
        return "no trial was finished"
    goals = [*tuning.task.goals]
    if OBJECTIVES["slo"] not in goals:
        goals.append(OBJECTIVES["slo"])
    found = tuning.found()
    lines = [
        f"Pareto front, on what was searched (trial 0 = {_zero(tuning)}; score: lower is better)",
        f"{'trial':>5}" + "".join(f"{g.title:>{_width(g)}}" for g in goals) + f"{'score':>9}",
    ]
    for trial in _listed(tuning):
        cells = "".join(f"{_figure(g, trial.row):>{_width(g)}}" for g in goals)
        mark = "  <- found" if trial is found else ""
        lines.append(f"{trial.number:>5}{cells}{tuning.score_of(trial):>9.3f}{mark}")
    left = len(tuning.front()) - sum(trial in tuning.front() for trial in _listed(tuning))
    return "\n".join([*lines, f"      and {left} more (--json has all)"] if left else lines)


def _listed(tuning: Tuning) -> list[Trial]:
    """Return the defaults, and as much of the front as fits: what scores best, in its order."""
    front = [trial for trial in tuning.front() if trial.number]
    best = sorted(front, key=tuning.score_of)[:_SHOWN]
    return [tuning.trials[0], *(trial for trial in front if trial in best)]


def _values_table(tuning: Tuning) -> str:
    """Return what the settings of the front are."""
    listed = _listed(tuning)[1:] if tuning.trials else []
    if not listed:
        return ""
    columns = [dict(trial.values) for trial in listed]
    lines = [f"{'':{_LABEL}}{'defaults':>10}" + "".join(f"{f'#{t.number}':>8}" for t in listed)]
    for knob in tuning.task.knobs:
        cells = "".join(f"{column[knob.key]:>8g}" for column in columns)
        lines.append(f"{knob.key:{_LABEL}}{knob.default:>10g}{cells}")
    return "\n".join(lines)


def _check_table(tuning: Tuning) -> str:
    check, task = tuning.check, tuning.task
    if check is None:
        return "Interrupted: not checked on traffic the search has not seen."
    first = task.seed + HELD_SEEDS_FROM
    where = (
        f"seeds {first} to {first + check.runs - 1}"
        if task.source.by_seed
        else f"the last {1 - SEARCH_SHARE:.0%} of its requests"
    )
    head = f"Held-out traffic ({where}), means of {check.runs} runs"
    rows = [{**row, "policy": label} for label, row in check.rows.items()]
    lines = [head, measure.table(rows), verdict(tuning), warning(tuning)]
    return "\n".join(line for line in lines if line)


def _gpus(tuning: Tuning) -> str:
    check, task = tuning.check, tuning.task
    if check is None or not task.counts_gpus:
        return ""
    needs = ", ".join(
        f"{label} {_count(row['gpus'], task.most)}" for label, row in check.rows.items()
    )
    return f"Replicas that keep {task.share:.1%} within SLO on held-out traffic: {needs}"


def _count(gpus: int | None, most: int) -> str:
    return f"more than {most}" if gpus is None else str(gpus)


def _width(goal: Objective) -> int:
    return max(12, len(goal.title) + 2)


def _figure(goal: Objective, row: dict[str, Any]) -> str:
    value = goal.of(row)
    forms = {"s": f"{value:.3f} s", "%": f"{value:.2%}", "f": f"{value:.3f}", "d": f"{value:.0f}"}
    return forms[goal.form]


def picture(tuning: Tuning, path: Path) -> None:
    """Draw trials and front over the first two objectives (over the score, if there is but one).

    Raises:
        MissingExtra: the packages of the `tune` extra are not installed.
        OSError, ValueError: the file cannot be written, or its ending is no picture's.
    """
    goals = tuning.task.goals
    across = goals[0]

    def up(trial: Trial) -> float:
        return goals[1].of(trial.row) if len(goals) > 1 else tuning.score_of(trial)

    def points(trials: Iterable[Trial]) -> tuple[list[float], list[float]]:
        chosen = list(trials)
        return [across.of(trial.row) for trial in chosen], [up(trial) for trial in chosen]

    figure = load_figure("--png").Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*points(tuning.trials), s=18, color="0.7", label="trials")
    axes.plot(*points(tuning.front()), "o-", ms=5, lw=1, color="tab:blue", label="Pareto front")
    _name(axes, tuning.front(), points)
    axes.scatter(*points(tuning.trials[:1]), s=90, marker="D", color="tab:red", label=DEFAULTS)
    best = tuning.found()
    if best is not None:
        axes.scatter(*points([best]), s=190, marker="*", color="tab:green", label=FOUND, zorder=3)
    axes.set_xlabel(_axis(across))
    axes.set_ylabel(_axis(goals[1]) if len(goals) > 1 else "score (lower is better)")
    axes.set_title(f"{_title(tuning)}\n{verdict(tuning)}", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def _name(axes: Any, trials: Sequence[Trial], points: Any) -> None:
    for trial, x, y in zip(trials, *points(trials), strict=True):
        axes.annotate(
            f"#{trial.number}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=7
        )


def _axis(goal: Objective) -> str:
    unit = ", s" if goal.form == "s" else ""
    return f"{goal.title}{unit} ({'higher' if goal.larger else 'lower'} is better)"
