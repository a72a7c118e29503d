"""One cell of a comparison: a workload, a load, a policy and a fleet in; the figures out.

What `replay`, `tune` and the routing benchmark call. Pure: no files, no clock, no processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.core.settings import CoreSettings, RoutingSpec
from gateway.sim import report
from gateway.sim.fleet_run import FleetRun, FleetSpec, core_settings
from gateway.sim.traffic import Traffic, Workload

# 100 % load is the highest rate at which this policy keeps this share of requests within SLO.
YARDSTICK = "lmetric"
WITHIN = 0.9
# Bisection ends when the bounds are this close: rates 3 % apart differ by less than seeds do.
_CLOSE = 1.03
_FIRST_RATE = 4.0
_MOST_DOUBLINGS = 14


@dataclass(slots=True, frozen=True)
class Setting:
    """What is compared: a policy with its parameters, and what else of the core is changed."""

    routing: RoutingSpec | str = "cost"
    adjust: Callable[[CoreSettings], CoreSettings] | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Return what a table calls it."""
        routing = self.routing
        return self.label or (routing if isinstance(routing, str) else routing.policy)


def run_cell(
    workload: Workload,
    setting: Setting | str = "cost",
    fleet: FleetSpec | None = None,
    *,
    seed: int = 1,
    load: float | None = None,
) -> dict[str, Any]:
    """Run one workload through one fleet; return the figures of the contract's section 8.

    `load` is only reported: what share of the capacity the workload's rate is.
    """
    if isinstance(setting, str):
        setting = Setting(setting)
    fleet = fleet or FleetSpec()
    settings = core_settings(workload, fleet, setting.routing)
    if setting.adjust is not None:
        settings = setting.adjust(settings)
    records = FleetRun(workload, fleet, settings, seed=seed).run()
    counted = [record for record in records if record.sent_at >= workload.warm_s]
    head = {
        "trace": workload.name,
        "policy": setting.name,
        "load": load,
        "rate": round(workload.rate, 4),
        "replicas": fleet.replicas,
    }
    return report.summarise(counted, workload.seconds - workload.warm_s, head, slos=workload.slos)


def capacity(traffic: Traffic, fleet: FleetSpec | None = None, *, seed: int = 1) -> float:
    """Return the rate factor that counts as 100 % load on this fleet, by bisection.

    Raises:
        ValueError: the fleet is never overloaded, or always.
    """
    fleet = fleet or FleetSpec()

    def keeps(rate: float) -> bool:
        workload = traffic(rate, seed)
        settings = core_settings(workload, fleet, YARDSTICK)
        return within_share(workload, settings, fleet, seed=seed, least=WITHIN) >= WITHIN

    low, high = _bracket(keeps)
    while high > low * _CLOSE:
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def within_share(
    workload: Workload, settings: CoreSettings, fleet: FleetSpec, *, seed: int, least: float
) -> float:
    """Return the share of requests within SLO; 0 as soon as `least` cannot be kept any more."""
    asked = sum(
        len(dialogue.asks)
        for dialogue in workload.dialogues
        if len(dialogue.asks) > 1 or dialogue.start_s >= workload.warm_s
    )
    allowed = int((1 - least) * asked) + 1
    records = FleetRun(workload, fleet, settings, seed=seed).run(most_missed=allowed)
    counted = [record for record in records if record.sent_at >= workload.warm_s]
    within = sum(1 for record in counted if record.within(workload.slos[record.cls]))
    return within / len(counted) if len(counted) - within <= allowed and counted else 0.0


def _bracket(keeps: Callable[[float], bool]) -> tuple[float, float]:
    """Return a rate that is kept and twice as much that is not."""
    rate = _FIRST_RATE
    kept = keeps(rate)
    for _ in range(_MOST_DOUBLINGS):
        following = rate * 2 if kept else rate / 2
        if keeps(following) is not kept:
            return (rate, following) if kept else (following, rate)
        rate = following
    raise ValueError(
        "no rate at which this fleet is just not overloaded was found; give one (--rate)"
    )
