"""The runs a search is made of, told by values so that a child process can make them.

Traffic comes in two parts: what the search may see, and what only the final figures are from.
Synthetic traffic is split by seed, a recorded trace in time. Never prints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from functools import lru_cache, partial
from typing import Any

from gateway.core.settings import CoreSettings, Slo
from gateway.sim.cells import Setting, capacity, run_cell, within_share
from gateway.sim.fleet_run import FleetSpec, core_settings
from gateway.sim.measure import SYNTHETIC, traffic_of
from gateway.sim.profiles import PROFILES
from gateway.sim.traces import WARM_SHARE
from gateway.sim.traffic import Traffic, Workload
from gateway.sim.tune_space import Values, apply, held

# Far from any seed a search is given, so that the two parts never share one.
HELD_SEEDS_FROM = 1_000_000
# Of a trace's requests; what is left over must be enough for a 95th percentile.
SEARCH_SHARE = 0.6
# Where the traffic begins that warms caches up for the rest.
_HELD_FROM = 0.4

Targets = tuple[tuple[str, Slo], ...]


@unique
class Part(StrEnum):
    """Which traffic: what is searched on, or what nothing was chosen by."""

    SEARCH = "search"
    HELD = "held-out"


@dataclass(slots=True, frozen=True)
class Source:
    """Traffic by name; `slos` replace the targets of classes it has."""

    trace: str
    requests: int | None = None
    slos: Targets = ()

    def traffic(self, part: Part) -> Traffic:
        """Return one part of it.

        Raises:
            OSError, ValueError: there is no such traffic.
        """
        return partial(_workload, self, part)

    @property
    def by_seed(self) -> bool:
        """Whether other seeds are other traffic."""
        return self.trace.startswith(SYNTHETIC)


@lru_cache(maxsize=4)  # the seeds of a trial, one after the other
def _workload(source: Source, part: Part, rate: float, seed: int) -> Workload:
    if source.by_seed and part is Part.HELD:
        seed += HELD_SEEDS_FROM
    whole = traffic_of(source.trace, source.requests)(rate, seed)
    if source.slos:
        whole = replace(whole, slos={**whole.slos, **dict(source.slos)})
    return whole if source.by_seed else _cut(whole, part)


def _cut(whole: Workload, part: Part) -> Workload:
    """Return one part of a trace; the held-out one is warmed up by the end of the other.

    That end is sent, but not counted: conversations go on across the cut, and a cold fleet would be
    measured instead of a setting.
    """
    dialogues = whole.dialogues
    at = dialogues[int(len(dialogues) * SEARCH_SHARE)].start_s
    if part is Part.SEARCH:
        kept = [d for d in dialogues if d.start_s < at]
        start, seconds, warm_s = 0.0, at, at * WARM_SHARE
    else:
        start = dialogues[int(len(dialogues) * _HELD_FROM)].start_s
        kept = [d._replace(start_s=d.start_s - start) for d in dialogues if d.start_s >= start]
        seconds, warm_s = whole.seconds - start, at - start
    if not kept or seconds <= warm_s:
        raise ValueError(f"{whole.name}: too few requests for a search and a check")
    return replace(whole, dialogues=kept, seconds=seconds, warm_s=warm_s)


@dataclass(slots=True, frozen=True)
class Run:
    """One setting on one part of the traffic: the gateway's defaults, or `own`, but for `values`."""

    source: Source
    part: Part
    rate: float
    seed: int
    replicas: int
    profile: str
    policy: str
    values: Values = ()
    label: str = ""
    load: float | None = None
    own: CoreSettings | None = None

    @property
    def fleet(self) -> FleetSpec:
        """Return the backends."""
        return FleetSpec(self.replicas, PROFILES[self.profile])

    def workload(self) -> Workload:
        """Return what is sent."""
        return self.source.traffic(self.part)(self.rate, self.seed)

    def figures(self) -> dict[str, Any]:
        """Run it; return the figures of the contract's section 8."""
        setting = Setting(self.policy, self.changed, self.label or self.policy)
        return run_cell(self.workload(), setting, self.fleet, seed=self.seed, load=self.load)

    def changed(self, settings: CoreSettings) -> CoreSettings:
        """Return what is run where `settings` are the defaults; targets stay the workload's."""
        if self.own is not None:
            classes = {spec.name: spec for spec in self.own.classes}
            settings = replace(
                settings,
                classes=tuple(
                    replace(classes.get(spec.name, spec), slo=spec.slo, default=spec.default)
                    for spec in settings.classes
                ),
                routing=replace(self.own.routing, policy=self.policy, shadow=None),
                queue=replace(self.own.queue, enabled=self.own.queue.enabled and held(self.policy)),
            )
        return apply(settings, self.values)


@dataclass(slots=True, frozen=True)
class Need:
    """How many replicas keep `share` of the requests within SLO, with every one of the seeds.

    `guess` is where to look first, `most` where to give up.
    """

    run: Run
    seeds: tuple[int, ...]
    share: float
    guess: int = 1
    most: int = 64

    def figures(self) -> dict[str, Any]:
        """Find it; return it as `gpus`, None = even `most` are too few."""
        return {"gpus": least(self._keeps, self.guess, self.most)}

    def _keeps(self, replicas: int) -> bool:
        return all(self._kept(replace(self.run, replicas=replicas, seed=s)) for s in self.seeds)

    def _kept(self, run: Run) -> bool:
        workload = run.workload()
        settings = run.changed(core_settings(workload, run.fleet, run.policy))
        kept = within_share(workload, settings, run.fleet, seed=run.seed, least=self.share)
        return kept >= self.share


@dataclass(slots=True, frozen=True)
class Limit:
    """The rate factor that counts as 100 % load, on what is searched."""

    run: Run

    def figures(self) -> dict[str, Any]:
        """Find it; return it as `rate`."""
        run = self.run
        found = capacity(run.source.traffic(run.part), run.fleet, seed=run.seed)
        return {"rate": found}


Job = Run | Need | Limit


def do(job: Job) -> dict[str, Any]:
    """Return a job's figures: what child processes are asked to call."""
    return job.figures()


def least(keeps: Callable[[int], bool], guess: int, most: int) -> int | None:
    """Return the least number that is kept, if more keep what fewer do; None = `most` do not."""
    low, high = _around(keeps, min(guess, most), most)
    if high is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def _around(keeps: Callable[[int], bool], guess: int, most: int) -> tuple[int, int | None]:
    """Return one that is not kept and one above it that is, in growing steps from the guess."""
    at, step = guess, 1
    if keeps(at):
        while at > 1:
            below = max(1, at - step)
            if not keeps(below):
                return below, at
            at, step = below, step * 2
        return 0, at
    while at < most:
        above = min(most, at + step)
        if keeps(above):
            return at, above
        at, step = above, step * 2
    return at, None


def mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return runs that differ by their seed as one: numbers are means, counts are sums.

    What one run has no figure for has none.
    """
    return {key: _mean(key, [row[key] for row in rows]) for key in rows[0]}


def _mean(key: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        names = [name for name in first if all(name in part for part in values)]
        return {name: mean([part[name] for part in values]) for name in names}
    if isinstance(first, str) or any(value is None for value in values):
        return first if isinstance(first, str) else None
    if key in {"requests", "refused", "failed"}:
        return sum(values)
    if key in {"rate", "replicas", "load"}:
        return first
    return round(sum(values) / len(values), 4)
