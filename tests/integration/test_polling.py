"""D57 and R22 over sockets: what one backend's slow or huge metrics page does to the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.integration.rig import (
    Backend,
    Conn,
    Received,
    Rig,
    chat,
    eventually,
    gateway,
    ok_chat,
    post,
)
from tests.integration.watch_rig import VLLM_PAGE, Recorder, watching
from tests.integration.watch_rig import Backend as Watched
from tests.integration.watch_rig import running as watched

CHAT = post("/v1/chat/completions", chat())
LONG_S = 60.0


@dataclass
class Paged(Backend):
    """A backend with a metrics page, which hangs while it is told to."""

    hung: bool = False
    pages: int = 0
    hanging: int = 0
    tasks: list[Any] = field(default_factory=list)

    async def _builtin(self, conn: Conn, request: Received) -> bool:
        if not request.target.startswith("/metrics"):
            return await super()._builtin(conn, request)
        if self.hung:
            self.hanging += 1
            await conn.gone()
            return True
        if request.target != "/metrics":  # names cannot be asked for
            await conn.json(b"", 404)
            return True
        self.pages += 1
        await conn.json(VLLM_PAGE)
        return True


@asynccontextmanager
async def over(backends: list[Paged], *settings: str) -> AsyncIterator[Rig]:
    for backend in backends:
        await backend.start()
    try:
        async with gateway([*backends], settings, None, None) as rig, asyncio.timeout(60):
            yield rig
    finally:
        for backend in backends:
            await backend.stop()


async def test_d57_a_hanging_metrics_page_ages_and_holds_up_nobody() -> None:
    slow, *others = backends = [Paged(ok_chat) for _ in range(3)]
    # as in the report: one read may take far longer than the interval
    settings = ("poll.interval_s=0.05", "poll.timeout_s=10", "routing.policy=round_robin")
    async with over(backends, *settings) as rig:
        await eventually(lambda: all(backend.pages for backend in backends), LONG_S)
        slow.hung = True
        await eventually(lambda: slow.hanging == 1, LONG_S)
        before = [backend.pages for backend in others]
        await eventually(
            lambda: all(b.pages >= had + 10 for b, had in zip(others, before, strict=True)), LONG_S
        )
        assert slow.hanging == 1  # ten reads of each of the others in the time of that one

        status = rig.app.dispatcher.backends(rig.handler.clock())
        ages = {row.name: row.snapshot_age_s or 0.0 for row in status}
        assert ages["backend-1"] > 3 * 0.05  # what is stale at this interval
        assert rig.metric("gateway_backend_snapshot_age_seconds", backend="backend-1") > 0.15
        assert rig.metric("gateway_backend_up") == 3
        answers = [await rig.ask(CHAT) for _ in range(9)]
        assert {answer.status for answer in answers} == {200}
        assert [len(backend.received) for backend in backends] == [3, 3, 3]


async def test_r22_a_page_that_takes_two_seconds_delays_no_other() -> None:
    """Here it takes as long as thirty reads of the others do, however fast the machine."""
    slow, fine, sink = Watched("slow"), Watched("fine"), Recorder()
    slow.page = None
    async with watched(slow, fine), watching(sink, slow.target, fine.target) as watch:
        assert await watch.first_round(30)
        await sink.until(lambda: slow.paths.count("/metrics") == 1)
        await sink.more_snapshots("fine", 30)

        assert slow.paths.count("/metrics") == 1
        assert sink.count("slow") == 0
        assert sink.ups == {"slow": [True], "fine": [True]}


async def test_r22_a_page_of_5000_series_is_asked_for_in_part_where_that_is_possible() -> None:
    big, sink = Watched("big"), Recorder()
    big.page = VLLM_PAGE + b"".join(b'vllm:filler{n="%d"} 1.0\n' % n for n in range(5_000))
    async with watched(big), watching(sink, big.target):
        await sink.until(lambda: big.filtered > 5)
        whole = len(big.paths) - big.filtered - big.paths.count("/health")
        assert whole - big.paths.count("/v1/models") == 1  # the first, to compare with
        await sink.more_snapshots("big")

    first, last = sink.snapshots["big"][0], sink.snapshots["big"][-1]
    assert (last.waiting, last.kv_utilization) == (first.waiting, first.kv_utilization)
