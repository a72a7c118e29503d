"""The gateway that serves and the simulator decide the same on the same inputs.

Every call of a live gateway's core, over sockets and against simulated replicas, is written down and
asked of a simulator's core; and the other way round.
"""

import contextlib
from random import Random
from typing import cast

import pytest

from gateway import app as app_module
from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import CoreSettings
from gateway.sim.client import LoadClient
from gateway.sim.faults_at import Fault, Happening
from gateway.sim.fleet_run import FleetRun, FleetSpec, core_settings
from gateway.sim.generators import synthetic
from gateway.sim.profiles import DEMO
from gateway.sim.report import Result
from gateway.sim.workload import ChatShape, CodingShape, chat, coding
from tests.integration.rig import Backend, gateway
from tests.integration.sim_rig import live_replica
from tests.tape import Tape

SCALE = 0.02
AGENTS = CodingShape(users=5, repositories=3, turns=5, output=40, think_s=1.0, ramp_s=0.9).scaled(8)
CHAT = ChatShape(rate=1.0, output=40, think_s=1.0).scaled(8)
REPLICAS = 3


@pytest.fixture
def live_tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()

    class Recorded(QueuedDispatcher):
        def __init__(self, settings: CoreSettings, rng: Random, now: float) -> None:
            tape.start = (settings, rng.getstate(), now)
            super().__init__(settings, rng, now)
            tape.attach(self)

    monkeypatch.setattr(app_module, "QueuedDispatcher", Recorded)
    return tape


async def serve(policy: str) -> None:
    """Run coding agents and chat through a gateway over sockets."""
    sessions = [*coding(AGENTS, 1.0, 1), *chat(CHAT, 12.0, 1)]
    async with contextlib.AsyncExitStack() as live:
        replicas = [
            await live.enter_async_context(live_replica(profile=DEMO, time_scale=SCALE))
            for _ in range(REPLICAS)
        ]
        backends = cast("list[Backend]", replicas)  # only their URLs are asked for
        settings = (f"routing.policy={policy}",)
        rig = await live.enter_async_context(gateway(backends, settings, None, None))
        client = LoadClient(rig.app.url, "tiny", SCALE)
        await client.run(sessions, 1000.0)  # ends with the last answer
        await rig.settled()
        assert sum(record.result is Result.OK for record in client.records) > 40


@pytest.mark.parametrize("policy", ["cost", "weights"])
async def test_what_a_live_gateway_decided_a_simulator_decides(
    policy: str, live_tape: Tape
) -> None:
    await serve(policy)
    assert live_tape.start is not None
    settings, state, started = live_tape.start

    rng = Random()
    rng.setstate(state)
    core = QueuedDispatcher(settings, rng, started)  # as FleetRun makes its own
    assert live_tape.play(core, rng) == live_tape.answers
    assert len(live_tape.decisions()) > 40
    assert len({decision[0] for decision in live_tape.decisions()}) == REPLICAS
    assert any(decision[3] for decision in live_tape.decisions())  # prefixes were hit


def test_what_a_simulator_decided_a_live_core_decides() -> None:
    workload = synthetic("mix", requests=400)(8.0, 1)
    fleet = FleetSpec(
        replicas=REPLICAS,
        faults=(Fault(20.0, Happening.DIES, 1), Fault(40.0, Happening.JOINS, REPLICAS)),
    )
    settings = core_settings(workload, fleet, "cost")
    run = FleetRun(workload, fleet, settings, seed=5)
    tape = Tape()
    tape.attach(run.core)
    run.run()

    rng = Random(5)
    assert tape.play(QueuedDispatcher(settings, rng, 0.0), rng) == tape.answers
    assert len(tape.decisions()) > 300


async def test_the_simulator_calls_what_the_gateway_calls(live_tape: Tape) -> None:
    await serve("cost")
    workload = synthetic("mix", requests=400)(8.0, 1)
    faults = (Fault(20.0, Happening.RESTARTS, 1), Fault(40.0, Happening.JOINS, REPLICAS))
    fleet = FleetSpec(replicas=REPLICAS, faults=faults)
    run = FleetRun(workload, fleet, core_settings(workload, fleet, "cost"))
    tape = Tape()
    tape.attach(run.core)
    run.run()
    assert live_tape.asked <= tape.asked
    assert tape.asked >= {"classify", "expected_output", "admit", "first_token", "finish"}
