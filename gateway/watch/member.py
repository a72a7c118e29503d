"""One watched backend: two loops, one for its metrics and one for its health and model list.

Nothing here may end either loop but `stop`: whatever a backend answers is a fact to report.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, unique
from itertools import islice
from typing import Protocol

from gateway import tasks
from gateway.core.fleet import restarted
from gateway.core.types import Snapshot
from gateway.watch import exposition
from gateway.watch.catalog import Catalog, parse_models
from gateway.watch.link import Answer, Link, LinkError
from gateway.watch.paths import MetricsPath

_log = logging.getLogger("radixgate.watch")

_MAX_METRICS_BYTES = 8 * 1024 * 1024  # vLLM 0.32 loaded: 79 KB; 5,000 series: 0.4 MB
_MAX_MODELS_BYTES = 4 * 1024 * 1024
_MAX_HEALTH_BYTES = 64 * 1024
_HEARD_S = 5.0  # a token comes every 0.1 s; between those of a stalled batch lie seconds
_STRIKES = 3  # an API server that tokenises a huge prompt may miss a probe; three in a row is down
_NOT_OFFERED_S = 5.0  # how soon to ask again for a metrics page that is not there
_DOWN_METRICS_S = 1.0
_FEW, _NAME_CHARS = 5, 100  # of an engine's model ids in a line of the log


class Sink(Protocol):
    """What the dispatcher is told."""

    def observe(self, backend: str, snapshot: Snapshot, now: float) -> None:
        """Take a backend's figures."""

    def set_up(self, backend: str, up: bool, now: float) -> None:
        """Take whether a backend may get requests."""


@dataclass(slots=True, frozen=True)
class Pace:
    """How often and how patiently. The probe waits longer than a scrape: it decides traffic."""

    interval_s: float = 0.25
    timeout_s: float = 1.0
    probe_s: float = 1.0
    probe_down_s: float = 0.5
    probe_timeout_s: float = 2.0
    models_s: float = 5.0


def _nothing_heard(_backend: str, _since: float) -> bool:
    return False


@dataclass(slots=True, frozen=True)
class Listener:
    """Where reports go, and who says whether a backend sent any of an answer since a time.

    `on_block_size` follows the snapshot that tells another block size than the one before.
    """

    sink: Sink
    catalog: Catalog
    on_models: Callable[[Mapping[str, tuple[str, ...]]], None]
    on_block_size: Callable[[], None]
    heard: Callable[[str, float], bool] = _nothing_heard


@unique
class Verdict(Enum):
    """What one health probe says."""

    UP = "up"
    DOWN = "down"
    DOUBTFUL = "doubtful"
    ASK_MODELS = "ask_models"


def judge(status: int) -> Verdict:
    """Return what the status of a health route means.

    503 is a clear no: llama.cpp while it loads, vLLM whose engine died. A refused key or method
    still shows a server that serves. Engines without the route are asked for their models.
    """
    if 200 <= status < 300 or status in (401, 403, 405, 429):
        return Verdict.UP
    if status == 503:
        return Verdict.DOWN
    if status in (404, 501):
        return Verdict.ASK_MODELS
    return Verdict.DOUBTFUL


class Member:
    """The watching of one backend.

    `probed` is set once its first probe has been reported, `scraped` once its metrics were asked for.
    """

    def __init__(
        self,
        name: str,
        url: str,
        api_key: str | None,
        *,
        engine: str,
        listener: Listener,
        pace: Pace,
        rng: random.Random,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self.name = name
        self.pace = pace
        self.probed = asyncio.Event()
        self.scraped = asyncio.Event()
        self._wanted = asyncio.Event()  # a probe, at once
        self._engine = engine
        self._metrics = MetricsPath()
        self._link = Link(url, api_key, clock, tls=tls, server_name=server_name)
        self._listener = listener
        self._rng = rng
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._muted = False
        self._up: bool | None = None
        self._strikes = 0
        self._excused = False
        self._why = "not asked yet"  # what the last probe said
        self._models_due = 0.0
        self._unlisted: tuple[str, ...] = ()
        self._metrics_ok = True
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        """Begin both loops."""
        self._tasks = [
            tasks.spawn(self._watch_health(), name=f"watch-health:{self.name}"),
            tasks.spawn(self._watch_metrics(), name=f"watch-metrics:{self.name}"),
        ]

    @property
    def is_up(self) -> bool:
        """Return whether the last probes found it up."""
        return self._up is True

    def report_unproven(self) -> None:
        """Have the backend count as down until its first probe has ended."""
        self._tell(lambda: self._listener.sink.set_up(self.name, False, self._clock()))

    def probe_soon(self) -> None:
        """Bring the next probe forward: something else says that the backend fails."""
        self._wanted.set()

    def mute(self) -> None:
        """Report nothing from now on: the dispatcher no longer knows this backend."""
        self._muted = True

    async def stop(self) -> None:
        """End both loops and close the session."""
        self.mute()
        await asyncio.gather(*(tasks.stop(task) for task in self._tasks))
        await self._link.close()

    async def _watch_health(self) -> None:
        while True:
            up = self._settle(await self._probe())
            if up and (self._up is not True or self._clock() >= self._models_due):
                await self._read_models()
            self._report_up(up)
            self.probed.set()
            await self._rest(self.pace.probe_s if up else self.pace.probe_down_s)

    async def _watch_metrics(self) -> None:
        after = await self._scrape()
        self.scraped.set()
        await asyncio.sleep(self._rng.uniform(0, after))  # many watchers must not ask in step
        while True:
            await self._sleep(await self._scrape())

    async def _rest(self, seconds: float) -> None:
        """Wait as `_sleep` does, or until a probe is wanted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds * self._rng.uniform(0.9, 1.1)):
                await self._wanted.wait()
        self._wanted.clear()

    async def _sleep(self, seconds: float) -> None:
        """Wait about `seconds`: jitter keeps many watchers from asking in step."""
        await asyncio.sleep(seconds * self._rng.uniform(0.9, 1.1))

    async def _probe(self) -> Verdict:
        try:
            answer = await self._get("/health", _MAX_HEALTH_BYTES)
            self._why = f"status {answer.status}"
            verdict = judge(answer.status)
            if verdict is not Verdict.ASK_MODELS:
                return verdict
            answer = await self._get("/v1/models", _MAX_MODELS_BYTES)
        except LinkError as error:
            self._why = str(error)
            return Verdict.DOWN if error.refused else Verdict.DOUBTFUL
        verdict = judge(answer.status)
        return Verdict.DOUBTFUL if verdict is Verdict.ASK_MODELS else verdict

    async def _get(self, path: str, max_bytes: int) -> Answer:
        timeout_s = max(self.pace.probe_timeout_s, self.pace.timeout_s)
        return await self._link.get(path, timeout_s=timeout_s, max_bytes=max_bytes)

    def _settle(self, verdict: Verdict) -> bool:
        """Return whether the backend counts as up; doubt keeps what was known, for a while."""
        if verdict is not Verdict.DOUBTFUL:
            self._strikes = 0
            self._excused = False
            return verdict is Verdict.UP
        self._strikes += 1
        if self._up is not True or self._strikes < _STRIKES:
            return self._up is True
        return self._is_busy()

    def _is_busy(self) -> bool:
        """Return whether the backend sends tokens: it serves, whatever its health route does."""
        busy = self._listener.heard(self.name, self._clock() - _HEARD_S)
        if busy and not self._excused:
            _log.warning("backend %s answers no health check, but requests: it stays", self.name)
        self._excused = busy
        return busy

    def _report_up(self, up: bool) -> None:
        if up == self._up or self._muted:
            return
        if self._up is not None or not up:
            _log.log(
                logging.INFO if up else logging.WARNING,
                "backend %s is %s",
                self.name,
                "up" if up else f"down: {self._why}",
            )
        self._up = up
        self._listener.catalog.set_live(self.name, up)
        self._tell(lambda: self._listener.sink.set_up(self.name, up, self._clock()))

    async def _read_models(self) -> None:
        self._models_due = self._clock() + self.pace.models_s * self._rng.uniform(0.9, 1.1)
        try:
            answer = await self._get("/v1/models", _MAX_MODELS_BYTES)
        except LinkError as error:
            _log.warning("backend %s: models unreadable: %s", self.name, error)
            return
        entries = parse_models(answer.body) if answer.status == 200 else None
        if entries is None:
            _log.warning("backend %s: no model list (status %d)", self.name, answer.status)
            return
        if not self._muted and self._listener.catalog.put(self.name, entries):
            self._tell(lambda: self._listener.on_models(self._listener.catalog.served()))
        if not self._muted:
            self._note_unlisted(str(entry["id"]) for entry in entries)

    def _note_unlisted(self, told: Iterable[str]) -> None:
        """Say once which configured models the engine does not tell of: mostly a slip of a name."""
        unlisted = self._listener.catalog.unlisted(self.name)
        if unlisted == self._unlisted:
            return
        self._unlisted = unlisted
        if unlisted:
            message = "backend %s does not list the configured model %s; it lists %s"
            _log.warning(message, self.name, _few(unlisted), _few(told) or "none")

    async def _scrape(self) -> float:
        """Read the metrics once; return how long to wait before the next time."""
        started = self._clock()
        try:
            answer = await self._link.get(
                self._metrics.path, timeout_s=self.pace.timeout_s, max_bytes=_MAX_METRICS_BYTES
            )
        except LinkError as error:
            if error.refused and self._up:
                self.probe_soon()
            self._metrics.took(None)
            self._note_metrics(str(error))
            return self.pace.interval_s if self._up else _DOWN_METRICS_S
        reading = None
        if answer.status == 200:
            reading = exposition.read(answer.body, answer.at, self._engine)
        short = self._metrics.is_short
        if not self._metrics.took(reading) and short:
            return self.pace.interval_s
        if reading is None:
            self._note_metrics(f"status {answer.status}, no engine's page known here")
            return max(self.pace.interval_s, _NOT_OFFERED_S)
        self._note_metrics(None)
        snapshot = _with_start(reading.snapshot, answer.started)
        if restarted(self._snapshot, snapshot):  # behind this address: perhaps with another model
            self._models_due = self._clock()
            self.probe_soon()
        known = None if self._snapshot is None else self._snapshot.block_tokens
        self._snapshot = snapshot
        self._tell(lambda: self._listener.sink.observe(self.name, snapshot, self._clock()))
        if snapshot.block_tokens != known:
            self._tell(self._listener.on_block_size)
        spent = self._clock() - started
        return max(self.pace.interval_s / 2, self.pace.interval_s - spent)

    def _tell(self, report: Callable[[], None]) -> None:
        """Make a report; a fault in who takes it is logged and must not end the watching."""
        if self._muted:
            return
        try:
            report()
        except Exception:  # noqa: BLE001 - see above
            _log.exception("a report of backend %s was not taken", self.name)

    def _note_metrics(self, problem: str | None) -> None:
        ok = problem is None
        if ok != self._metrics_ok and self._up:
            self._metrics_ok = ok
            if ok:
                _log.info("backend %s: metrics readable again", self.name)
            else:
                _log.warning("backend %s: metrics unreadable: %s", self.name, problem)


def _with_start(snapshot: Snapshot, started: str | None) -> Snapshot:
    if snapshot.start_time is not None or started is None or not started.isdecimal():
        return snapshot
    return replace(snapshot, start_time=float(started[:15]))


def _few(names: Iterable[str]) -> str:
    """Return the first names, for a line of the log: an engine may tell thousands, of any kind."""
    some = [f"{name[:_NAME_CHARS]!a}" for name in islice(names, _FEW + 1)]
    return ", ".join(some[:_FEW]) + (", ..." if len(some) > _FEW else "")
