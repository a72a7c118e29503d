"""What the watch tests share: a backend that does as it is told, and a sink one can wait on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from aiohttp import web

from gateway.core.types import Snapshot
from gateway.watch.catalog import Catalog
from gateway.watch.member import Pace, Sink
from gateway.watch.poller import Target, Watch

FAST = Pace(
    interval_s=0.01,
    timeout_s=10.0,
    probe_s=0.01,
    probe_down_s=0.01,
    probe_timeout_s=10.0,
    models_s=0.02,
)
"""Frequent and patient: on a busy machine no answer that comes is taken for one that does not."""

HASTY = replace(FAST, timeout_s=0.1, probe_timeout_s=0.1)
"""For backends that never answer."""

_SAMPLE = Path(__file__).parent.parent / "samples/vllm-0.32/metrics_loaded.response.http"
VLLM_PAGE = _SAMPLE.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[2]


class Backend:
    """Answers health, models and metrics with what its fields say; a None answer never comes."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.port = 0
        self.health: int | None = 200
        self.models: list[Any] = [{"id": "m", "object": "model", "root": "org/m"}]
        self.models_body: bytes | None = None
        self.page: bytes | None = VLLM_PAGE
        self.page_status = 200
        self.filters = True  # answers /metrics/?name[]=... as prometheus_client's ASGI app does
        self.filtered = 0
        self.page_headers: dict[str, str] = {}
        self.keys: set[str | None] = set()
        self.paths: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def target(self) -> Target:
        return Target(self.name, f"http://127.0.0.1:{self.port}", "secret")

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization"))
        self.paths.append(request.path.rstrip("/"))
        if request.path == "/health":
            if self.health is None:
                await asyncio.Event().wait()
            return web.Response(status=self.health or 500, headers={"location": "/v1/models"})
        if request.path == "/v1/models":
            if self.models_body is not None:
                return web.Response(body=self.models_body)
            return web.json_response({"object": "list", "data": self.models})
        if self.page is None:
            await asyncio.Event().wait()
        page = self.page or b""
        if request.path == "/metrics/":
            if not self.filters:
                return web.Response(status=404)
            self.filtered += 1
            page = _only(page, request.query.getall("name[]"))
        return web.Response(body=page, status=self.page_status, headers=self.page_headers)


def _only(page: bytes, names: list[str]) -> bytes:
    wanted = tuple(name.encode() + end for name in names for end in (b"{", b" "))
    return b"".join(line for line in page.splitlines(keepends=True) if line.startswith(wanted))


@dataclass
class Recorder:
    """A sink that keeps the reports and wakes who waits for one."""

    snapshots: dict[str, list[Snapshot]] = field(default_factory=dict)
    ups: dict[str, list[bool]] = field(default_factory=dict)
    served: list[Mapping[str, tuple[str, ...]]] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, backend: str, snapshot: Snapshot, now: float) -> None:
        assert snapshot.at <= now
        self.snapshots.setdefault(backend, []).append(snapshot)
        self.event.set()

    def set_up(self, backend: str, up: bool, now: float) -> None:
        assert now > 0
        self.ups.setdefault(backend, []).append(up)
        self.event.set()

    def on_models(self, served: Mapping[str, tuple[str, ...]]) -> None:
        self.served.append(dict(served))
        self.event.set()

    def count(self, backend: str) -> int:
        return len(self.snapshots.get(backend, ()))

    def is_up(self, backend: str) -> bool:
        return self.ups.get(backend, [False])[-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds`, looked at after each report; fail after 30 s."""
        async with asyncio.timeout(60):
            while not holds():
                self.event.clear()
                await self.event.wait()

    async def more_snapshots(self, backend: str, number: int = 3) -> None:
        """Wait for `number` snapshots that are yet to come."""
        goal = self.count(backend) + number
        await self.until(lambda: self.count(backend) >= goal)


@asynccontextmanager
async def running(*backends: Backend) -> AsyncIterator[None]:
    for backend in backends:
        await backend.start()
    try:
        yield
    finally:
        for backend in backends:
            await backend.stop()


@asynccontextmanager
async def watching(
    sink: Sink,
    *targets: Target,
    on_models: Callable[[Mapping[str, tuple[str, ...]]], None] = lambda _: None,
    on_block_size: Callable[[], None] = lambda: None,
    catalog: Catalog | None = None,
    pace: Pace = FAST,
) -> AsyncIterator[Watch]:
    watch = Watch(
        targets,
        sink,
        catalog or Catalog(lambda: 1.0),
        pace=pace,
        on_models=on_models,
        on_block_size=on_block_size,
        rng=Random(1),
        clock=monotonic,
    )
    await watch.start()
    try:
        yield watch
    finally:
        await watch.stop()
