"""Many cells of a comparison, in parallel processes, and the table of what came out.

A cell is told by values alone, so that a child process can make its traffic itself. Never prints;
progress goes to a callback.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar

from gateway.core.policies.published import PUBLISHED
from gateway.sim.cells import Setting, capacity, run_cell
from gateway.sim.faults_at import Fault
from gateway.sim.fleet_run import FleetSpec
from gateway.sim.generators import REQUESTS, synthetic
from gateway.sim.profiles import PROFILES
from gateway.sim.traces import recorded
from gateway.sim.traffic import Traffic

SYNTHETIC = "synthetic:"
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(slots=True, frozen=True)
class Cell:
    """One run: which traffic how fast on which fleet by which policy.

    `policy` is one of `core.policies.published`. `rate` is the rate factor; where it is None, `load` is the share of the fleet's capacity that
    gives it. `requests` = how many are made, or the most that are read (None: the default, all).
    """

    trace: str
    policy: str = "cost"
    rate: float | None = None
    load: float | None = None
    replicas: int = 8
    profile: str = "h100_8b"
    seed: int = 1
    requests: int | None = None
    poll_s: float = 0.25
    age_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    @property
    def fleet(self) -> FleetSpec:
        """Return the backends this cell runs on."""
        return FleetSpec(
            self.replicas,
            PROFILES[self.profile],
            poll_s=self.poll_s,
            age_s=self.age_s,
            faults=self.faults,
        )

    @property
    def yardstick(self) -> "Cell":
        """Return the cell whose capacity is this one's 100 %: the same, by nothing but its fleet."""
        return replace(self, policy="", rate=None, load=None, poll_s=0.25, age_s=0.0, faults=())


@lru_cache(maxsize=4)
def traffic_of(trace: str, requests: int | None = None) -> Traffic:
    """Return the traffic that a TRACE argument names: `synthetic:NAME` or a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: no such synthetic workload, or the file is no trace.
    """
    if trace.startswith(SYNTHETIC):
        return synthetic(trace.removeprefix(SYNTHETIC), requests=requests or REQUESTS)
    return recorded(Path(trace), requests=requests)


def run(cells: Sequence[Cell], jobs: int, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the figures of every cell, in order; capacities that are needed are found first.

    `told` hears in words how far it is.
    """
    with Workers(jobs) as workers:
        wanted = list(dict.fromkeys(c.yardstick for c in cells if c.rate is None))
        found = dict(zip(wanted, workers.map(_capacity, wanted, told, "capacities"), strict=True))
        ready = [
            cell
            if cell.rate is not None
            else replace(cell, rate=found[cell.yardstick] * (cell.load or 1.0))
            for cell in cells
        ]
        return workers.map(_figures, ready, told, "runs")


def _capacity(cell: Cell) -> float:
    return capacity(traffic_of(cell.trace, cell.requests), cell.fleet, seed=cell.seed)


def _figures(cell: Cell) -> dict[str, Any]:
    assert cell.rate is not None
    workload = traffic_of(cell.trace, cell.requests)(cell.rate, cell.seed)
    return run_cell(
        workload,
        Setting(PUBLISHED[cell.policy], label=cell.policy),
        cell.fleet,
        seed=cell.seed,
        load=cell.load,
    )


class Workers:
    """Child processes, or none when one job at a time is asked for.

    An interrupt from the terminal ends children at once and without a word: the parent tells.
    """

    def __init__(self, jobs: int) -> None:
        self._pool = None
        if jobs > 1:
            self._pool = ProcessPoolExecutor(
                jobs,
                mp_context=get_context("spawn"),
                initializer=signal.signal,
                initargs=(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self,
        work: Callable[[_T], _R],
        items: Sequence[_T],
        told: Callable[[str], None],
        what: str,
    ) -> list[_R]:
        """Return `work` of every item, in order; the first fault of any is raised."""
        results: dict[int, _R] = {}
        for index, result in self.each(work, items):
            results[index] = result
            told(f"{len(results)}/{len(items)} {what}")
        return [results[index] for index in range(len(items))]

    def each(self, work: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield every item's number and `work` of it, as they get done."""
        if self._pool is None:
            yield from ((index, work(item)) for index, item in enumerate(items))
            return
        futures: dict[Future[_R], int] = {
            self._pool.submit(work, item): index for index, item in enumerate(items)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "d"),
    ("TTFT mean", "ttft_mean_s", "s"),
    ("p50", "ttft_p50_s", "s"),
    ("p95", "ttft_p95_s", "s"),
    ("p99", "ttft_p99_s", "s"),
    ("TPOT p95", "tpot_p95_s", "s"),
    ("in SLO", "slo_ratio", "%"),
    ("goodput/s", "goodput_rps", "f"),
    ("hit rate", "hit_rate", "%"),
    ("imbalance", "imbalance", "f"),
    ("refused", "refused", "d"),
)
_LABEL = 22


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the figures as text: one block per trace, load and fleet, one line per policy.

    Where there are several classes, each policy's are below it.
    """
    lines: list[str] = []
    block: tuple[Any, ...] | None = None
    for row in rows:
        at = (row["trace"], row["replicas"], row["load"], row["rate"])
        if at != block:
            block = at
            lines += [
                "",
                _title(row),
                f"{'':{_LABEL}}" + "".join(f"{n:>11}" for n, _, _ in _COLUMNS),
            ]
        lines.append(f"{row['policy']:{_LABEL}}{_cells(row)}")
        classes = row.get("classes", {})
        if len(classes) > 1:
            lines += [f"  {name:{_LABEL - 2}}{_cells(part)}" for name, part in classes.items()]
    return "\n".join(lines[1:])


def _title(row: dict[str, Any]) -> str:
    load = "" if row["load"] is None else f"{row['load']:.0%} of capacity, "
    return f"{row['trace']}: {load}rate {row['rate']:g}, {row['replicas']} replicas"


def _cells(row: dict[str, Any]) -> str:
    return "".join(f"{_cell(row.get(key), form):>11}" for _, key, form in _COLUMNS)


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return {"s": f"{value:.3f} s", "%": f"{value:.1%}", "f": f"{value:.2f}", "d": f"{value:.0f}"}[
        form
    ]
