"""Search for a better setting of a policy on given traffic, and a check on traffic it has not seen.

Trial 0 is the defaults. The same seed gives the same trials, however many processes run them: as
many are drawn at a time whatever the number of those. Needs the `tune` extra, imported when a
search begins. Never prints; progress goes to a callback.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gateway.config import build
from gateway.config.schema import Config
from gateway.core.settings import CoreSettings
from gateway.extras import load_optuna
from gateway.sim.measure import Workers
from gateway.sim.tune_goals import GPUS, Objective, front, lost, score
from gateway.sim.tune_runs import Job, Limit, Need, Part, Run, Source, do, mean
from gateway.sim.tune_space import Knob, Values, as_values

if TYPE_CHECKING:
    import optuna

REFERENCE = "round_robin"
DEFAULTS, FOUND = "defaults", "found"
# Drawn together, so that processes have something to share; more would learn less from each other.
BATCH = 8
HELD_RUNS = 3
# Less than this better is what another seed does, too.
WORTH = 0.99


@dataclass(slots=True, frozen=True)
class Task:
    """What is tuned on what. `replicas` None = as many as the defaults need for `share` within SLO.

    `rate` None = `load` of the fleet's capacity. `seeds` is how many each trial is run with. `config`
    takes the place of the defaults: what it says of routing, queue and classes.
    """

    source: Source
    goals: tuple[Objective, ...]
    knobs: tuple[Knob, ...]
    policy: str = "cost"
    rate: float | None = None
    load: float | None = None
    replicas: int | None = 8
    profile: str = "h100_8b"
    seed: int = 1
    seeds: int = 2
    trials: int = 40
    share: float = 0.99
    most: int = 64
    config: Config | None = None

    @property
    def own(self) -> CoreSettings | None:
        """Return what the configuration makes of the core; None = the defaults are tuned."""
        return None if self.config is None else build.core_settings(self.config, {})

    @property
    def counts_gpus(self) -> bool:
        """Whether it is asked how many replicas are needed."""
        return self.replicas is None or GPUS in self.goals

    @property
    def figured(self) -> tuple[Objective, ...]:
        """Return the objectives that every single run has a figure for."""
        return tuple(goal for goal in self.goals if goal is not GPUS)


@dataclass(slots=True)
class Trial:
    """One setting and its mean figures over the seeds."""

    number: int
    values: Values
    row: dict[str, Any]


@dataclass(slots=True)
class Check:
    """Defaults, found and reference on held-out traffic: mean figures by label.

    `score` of the found one against the defaults: below 1 is better; `better_on` how many of the
    `runs` it was.
    """

    rows: dict[str, dict[str, Any]]
    score: float | None = None
    better_on: int = 0
    runs: int = HELD_RUNS
    worse_slo: bool = False

    @property
    def holds(self) -> bool:
        """Whether the found setting is worth a change."""
        return (
            self.score is not None
            and self.score <= WORTH
            and 2 * self.better_on > self.runs
            and not self.worse_slo
        )


@dataclass(slots=True)
class Tuning:
    """A search under way or at its end; all there is when it is interrupted."""

    task: Task
    trials: list[Trial] = field(default_factory=list)
    check: Check | None = None

    @property
    def base(self) -> dict[str, Any]:
        """Return the defaults' figures."""
        return self.trials[0].row

    def allowed(self) -> list[Trial]:
        """Return the trials that lose nobody to win something."""
        return [trial for trial in self.trials if lost(trial.row, self.base) <= 0]

    def front(self) -> list[Trial]:
        """Return the allowed trials none of the others beats."""
        return front(self.allowed(), lambda trial: trial.row, self.task.goals)

    def found(self) -> Trial | None:
        """Return the one that gains most over the defaults in all objectives; None = no one does."""
        if not self.trials:
            return None
        best = min(self.front(), key=self.score_of)
        return best if self.score_of(best) < 1 else None

    def score_of(self, trial: Trial) -> float:
        """Return a trial's score on what was searched."""
        return score(trial.row, self.base, self.task.goals)


class Tuner:
    """Runs a task. `tuning` can be read at any time, after an interrupt too."""

    def __init__(self, task: Task, workers: Workers, told: Callable[[str], None]) -> None:
        self.tuning = Tuning(task)
        self._workers = workers
        self._told = told

    def run(self) -> None:
        """Find rate and fleet where they are left open, search, and check what was found.

        Raises:
            MissingExtra: the packages of the `tune` extra are not installed.
            OSError, ValueError: no such traffic, or no capacity or fleet to be found.
        """
        library = load_optuna("radixgate tune")
        self._settle()
        study = self._study(library)
        self._evaluate([(0, ())])
        task = self.tuning.task
        if all(knob.low <= knob.default <= knob.high for knob in task.knobs):
            self._teach_defaults(library, study)
        while (done := len(self.tuning.trials)) < task.trials:
            self._round(study, done, min(BATCH, task.trials - done))
        self.tuning.check = self._check()

    # -- before the search ----------------------------------------------------------------------

    def _settle(self) -> None:
        """Put numbers for what the task leaves open."""
        task = self.tuning.task
        if task.rate is None:
            limit = Limit(self._run((), task.seed, rate=1.0))
            found = self._all([limit], "looking for the capacity")[0]["rate"]
            task = replace(task, rate=found * (task.load or 1.0))
            self.tuning.task = task
        if task.replicas is None:
            need = self._need((), guess=1)
            replicas = self._all([need], "looking for the fleet the defaults need")[0]["gpus"]
            if replicas is None:
                raise ValueError(
                    f"{task.most} replicas do not keep {task.share:.1%} within SLO at this rate"
                )
            self.tuning.task = replace(task, replicas=replicas)

    # -- the search -----------------------------------------------------------------------------

    def _study(self, library: Any) -> "optuna.Study":
        library.logging.set_verbosity(library.logging.WARNING)
        task = self.tuning.task
        sampler = library.samplers.TPESampler(
            seed=task.seed, multivariate=True, constant_liar=True, n_startup_trials=BATCH
        )
        directions = ["maximize" if goal.larger else "minimize" for goal in task.goals]
        study: optuna.Study = library.create_study(directions=directions, sampler=sampler)
        return study

    def _teach_defaults(self, library: Any, study: "optuna.Study") -> None:
        """Tell the optimiser of trial 0, which was run before there was anything to ask it."""
        task, base = self.tuning.task, self.tuning.base
        space = library.distributions.FloatDistribution
        known = library.trial.create_trial(
            params={knob.key: knob.default for knob in task.knobs},
            distributions={k.key: space(k.low, k.high, log=k.log) for k in task.knobs},
            values=[goal.of(base) for goal in task.goals],
        )
        study.add_trial(known)

    def _round(self, study: "optuna.Study", first: int, count: int) -> None:
        task = self.tuning.task
        asked = [study.ask() for _ in range(count)]
        drawn = [
            {k.key: trial.suggest_float(k.key, k.low, k.high, log=k.log) for k in task.knobs}
            for trial in asked
        ]
        numbered = [(first + i, as_values(task.knobs, draw)) for i, draw in enumerate(drawn)]
        self._evaluate(numbered)
        for trial, result in zip(asked, self.tuning.trials[first:], strict=True):
            trial.set_constraint("within SLO", lost(result.row, self.tuning.base))
            study.tell(trial, [goal.of(result.row) for goal in task.goals])

    def _evaluate(self, numbered: Sequence[tuple[int, Values]]) -> None:
        """Run settings with every seed; what is complete is kept, whatever ends it."""
        task = self.tuning.task
        jobs: list[tuple[int, Job]] = []
        for number, values in numbered:
            jobs += [(number, self._run(values, task.seed + i)) for i in range(task.seeds)]
            if GPUS in task.goals:
                assert task.replicas is not None
                guess = task.replicas if number == 0 else self.tuning.base["gpus"] or task.most
                jobs.append((number, self._need(values, guess=guess)))
        results: dict[int, dict[str, Any]] = {}
        try:
            for index, result in self._workers.each(do, [job for _, job in jobs]):
                results[index] = result
                self._told(self._progress(len(results), len(jobs)))
        finally:
            for number, values in numbered:
                mine = [i for i, (owner, _) in enumerate(jobs) if owner == number]
                if all(i in results for i in mine):
                    row = self._joined([results[i] for i in mine])
                    self.tuning.trials.append(Trial(number, values, row))

    def _joined(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        row = mean(results[: self.tuning.task.seeds])
        for more in results[self.tuning.task.seeds :]:
            gpus = more["gpus"]
            row["gpus"] = self.tuning.task.most + 1 if gpus is None else gpus
        return row

    def _progress(self, done: int, jobs: int) -> str:
        tuning = self.tuning
        text = f"{len(tuning.trials)}/{tuning.task.trials} trials, {done}/{jobs} runs of the next"
        best = tuning.found()
        return text if best is None else f"{text}; best score {tuning.score_of(best):.3f}"

    # -- the check ------------------------------------------------------------------------------

    def _check(self) -> Check:
        """Run defaults, found and reference on what nothing was chosen by."""
        task, best = self.tuning.task, self.tuning.found()
        settings: dict[str, tuple[str, Values]] = {DEFAULTS: (task.policy, ())}
        if best is not None:
            settings[FOUND] = (task.policy, best.values)
        settings[REFERENCE] = (REFERENCE, ())
        jobs: list[Job] = [
            self._run(values, task.seed + i, part=Part.HELD, policy=policy, label=label)
            for label, (policy, values) in settings.items()
            for i in range(HELD_RUNS)
        ]
        if task.counts_gpus:
            assert task.replicas is not None
            jobs += [
                self._need(values, guess=task.replicas, part=Part.HELD, policy=policy)
                for policy, values in settings.values()
            ]
        results = self._all(jobs, "checking on held-out traffic")
        return self._judged(list(settings), results)

    def _judged(self, labels: Sequence[str], results: Sequence[dict[str, Any]]) -> Check:
        task = self.tuning.task
        single = {
            label: results[i * HELD_RUNS : (i + 1) * HELD_RUNS] for i, label in enumerate(labels)
        }
        rows = {label: mean(runs) for label, runs in single.items()}
        for label, need in zip(labels, results[len(labels) * HELD_RUNS :], strict=False):
            rows[label]["gpus"] = need["gpus"]
        check = Check(rows)
        if FOUND in rows:
            counted = {key: self._counted(row) for key, row in rows.items()}
            check.score = score(counted[FOUND], counted[DEFAULTS], task.goals)
            check.worse_slo = lost(rows[FOUND], rows[DEFAULTS]) > 0
            goals = task.figured
            pairs = zip(single[FOUND], single[DEFAULTS], strict=True)
            check.better_on = (
                sum(score(ours, theirs, goals) < 1 for ours, theirs in pairs)
                if goals
                else HELD_RUNS * (check.score < 1)
            )
        return check

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the figures with a number of GPUs where even the most are too few."""
        return {**row, "gpus": row["gpus"] or self.tuning.task.most + 1} if "gpus" in row else row

    # -- jobs -----------------------------------------------------------------------------------

    def _run(
        self,
        values: Values,
        seed: int,
        *,
        part: Part = Part.SEARCH,
        policy: str | None = None,
        label: str = "",
        rate: float | None = None,
    ) -> Run:
        task = self.tuning.task
        rate = task.rate if rate is None else rate
        assert rate is not None
        replicas = task.replicas or 1
        name = policy or task.policy
        return Run(
            task.source,
            part,
            rate,
            seed,
            replicas,
            task.profile,
            name,
            values,
            label,
            task.load,
            task.own,
        )

    def _need(
        self, values: Values, *, guess: int, part: Part = Part.SEARCH, policy: str | None = None
    ) -> Need:
        task = self.tuning.task
        seeds = tuple(task.seed + i for i in range(task.seeds))
        run = self._run(values, task.seed, part=part, policy=policy)
        return Need(run, seeds, task.share, guess, task.most)

    def _all(self, jobs: Sequence[Job], what: str) -> list[dict[str, Any]]:
        self._told(what)
        return self._workers.map(do, jobs, lambda text: self._told(f"{what}: {text}"), "runs")
