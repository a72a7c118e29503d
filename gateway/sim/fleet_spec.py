"""A simulated fleet's parts: the backends, what a gateway is told of them, and how it is configured.

Values and small readers of them; `fleet_run` makes them act. Never a clock.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from gateway.config import build
from gateway.config.schema import BackendConfig, Config, ModelConfig
from gateway.core.settings import ClassSpec, CoreSettings, RoutingSpec
from gateway.core.types import Snapshot, Ticket
from gateway.sim.fast_batch import FastJob
from gateway.sim.fast_engine import FastEngine
from gateway.sim.faults_at import Fault
from gateway.sim.profiles import H100_8B, Profile
from gateway.sim.traffic import BLOCK_TOKENS, Dialogue, Workload, blocks_in

MODEL = "sim"
DEFAULT_POLICY = RoutingSpec().policy
_STALE_POLLS = 3  # design section 7
_NEVER_STALE_S = 1e9


@dataclass(slots=True, frozen=True)
class FleetSpec:
    """The backends, and what the gateway gets to know of them.

    `poll_s` between snapshots (0: none at all), each `age_s` old when it arrives; `probe_s` is how
    long a backend is dead or back before the gateway hears of it. `answers_known` = the gateway
    can tell which blocks an answer adds to its prompt (what a trace says of answers is nothing).
    """

    replicas: int = 8
    profile: Profile = H100_8B
    poll_s: float = 0.25
    age_s: float = 0.0
    probe_s: float = 1.0
    answers_known: bool = True
    faults: Sequence[Fault] = ()


def core_settings(workload: Workload, fleet: FleetSpec, routing: RoutingSpec | str) -> CoreSettings:
    """Return what a gateway in front of the fleet runs with: its defaults, but for what is given.

    `routing` is a policy's name, its parameters being the defaults, or all of it. Policies but the
    default one are compared as their gateways are: without a queue.
    """
    names = [f"b{number}" for number in range(fleet.replicas)]
    backends = [BackendConfig(name=name, url=f"http://{name}:8000") for name in names]
    config = Config(models=[ModelConfig(name=MODEL, backends=backends)])
    live = build.core_settings(config, {})
    if isinstance(routing, str):
        routing = replace(live.routing, policy=routing)
    known = {spec.name: spec for spec in live.classes}
    classes = tuple(
        replace(known.get(name) or ClassSpec(name), slo=slo, default=name == workload.default_class)
        for name, slo in workload.slos.items()
    )
    stale_s = _STALE_POLLS * fleet.poll_s + fleet.age_s or _NEVER_STALE_S
    queue = replace(live.queue, enabled=live.queue.enabled and routing.policy == DEFAULT_POLICY)
    return replace(live, classes=classes, routing=routing, queue=queue, stale_after_s=stale_s)


class Flight:
    """One request on its way; `job` and `ticket` are of the attempt in progress."""

    __slots__ = ("dialogue", "index", "job", "replica", "sent_at", "ticket")

    def __init__(self, dialogue: Dialogue, index: int, sent_at: float) -> None:
        self.dialogue = dialogue
        self.index = index
        self.sent_at = sent_at
        self.ticket: Ticket | None = None
        self.job: FastJob | None = None
        self.replica: Replica | None = None


class Replica:
    """One simulated backend: its engine, and whether a process is there."""

    __slots__ = ("alive", "engine", "name", "started_at", "wanted")

    def __init__(self, name: str, engine: FastEngine) -> None:
        self.name = name
        self.engine = engine
        self.alive = True
        self.started_at = 0.0
        self.wanted = inf  # the earliest entry of the agenda for this engine


def grown(job: FastJob) -> "array[int] | None":
    """Return the blocks of the prompt and the answer, if the answer's are known at all."""
    known = min((job.tokens - 1) // BLOCK_TOKENS, len(job.hashes))  # the last token is not computed
    if known <= blocks_in(job.prompt_tokens):
        return None
    hashes = job.hashes[:known]
    assert isinstance(hashes, array)
    return hashes


def snapshot_of(replica: Replica, now: float) -> Snapshot:
    """Return what a scrape of the replica would say."""
    engine = replica.engine
    return Snapshot(
        now,
        engine.running,
        engine.waiting,
        engine.kv_utilization,
        engine.profile.engine.kv_tokens,
        engine.profile.block_tokens,
        engine.prefix_queries,
        engine.prefix_hits,
        engine.preemptions,
        engine.prompt_tokens,
        engine.generation_tokens,
        replica.started_at,
    )
