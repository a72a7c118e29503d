"""Keeps the dispatcher's view of the backends true: snapshots, up or down, model lists.

Each backend has its own tasks, session and deadlines, so none can delay another. Whether a backend
is up is asked of its health route alone: a slow or dead `/metrics` must never take a serving
backend out of traffic, it only lets its snapshot age.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from gateway import tasks
from gateway.core.breaker import State
from gateway.watch.catalog import Catalog
from gateway.watch.member import Listener, Member, Pace, Sink

_log = logging.getLogger("radixgate.watch")


@dataclass(slots=True, frozen=True)
class Target:
    """A backend to watch; `url` is the root of its server, without `/v1`.

    `tls` and `server_name` are an https one's, as `Link` takes them.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    engine: str = "auto"
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


OnModels = Callable[[Mapping[str, tuple[str, ...]]], None]


class Watch:
    """The set of watched backends.

    `on_models` gets model id -> backends that report it (`Catalog.served`), each time a backend's
    list of ids changed. It runs on the loop inside a watching task; what it raises is logged.
    `heard(backend, since)` says whether any of an answer came from a backend after that time,
    `on_block_size` is called when a backend has told another block size than before.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        sink: Sink,
        catalog: Catalog,
        *,
        pace: Pace,
        on_models: OnModels,
        on_block_size: Callable[[], None] = lambda: None,
        heard: Callable[[str, float], bool] | None = None,
        rng: random.Random,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._members: dict[str, Member] = {}
        self._catalog = catalog
        self._pace = pace
        self._rng = rng
        self._clock = clock
        self._listener = Listener(sink, catalog, on_models, on_block_size)
        if heard is not None:
            self._listener = replace(self._listener, heard=heard)
        self._running = False
        self._stopping: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin watching; returns at once (see `first_round`)."""
        self._running = True
        for target in self._targets.values():
            self._add(target)

    async def stop(self) -> None:
        """Stop every task and close every session."""
        self._running = False
        members = list(self._members.values())
        self._members.clear()
        await asyncio.gather(*self._stopping, *(member.stop() for member in members))

    async def first_round(self, timeout_s: float) -> bool:
        """Wait until every backend was probed once; False when `timeout_s` passed before."""
        return await _all(timeout_s, (member.probed for member in self._members.values()))

    async def first_metrics(self, timeout_s: float) -> bool:
        """Wait until every backend that is up was asked for its metrics, as `first_round` does."""
        up = [member.scraped for member in self._members.values() if member.is_up]
        return await _all(timeout_s, up)

    def set_targets(self, targets: Iterable[Target], pace: Pace | None = None) -> None:
        """Watch exactly `targets` from now on; unchanged ones go on undisturbed.

        New ones get nothing before their first probe, as long as another backend is up: an address
        is known before anybody listens there.

        Does not call `on_models`: the caller, who is applying a configuration, reads
        `Catalog.served` itself.
        """
        self._pace = pace or self._pace
        wanted = {target.name: target for target in targets}
        for name in [*self._targets]:
            if wanted.get(name) != self._targets[name]:
                self._remove(name, forget=name not in wanted)
        for member in self._members.values():
            member.pace = self._pace
        self._targets = wanted
        others = any(member.is_up for member in self._members.values())
        for target in wanted.values():
            if self._running and target.name not in self._members:
                member = self._add(target)
                if others:
                    member.report_unproven()

    def breaker_changed(self, backend: str, state: State, why: str) -> None:
        """Log a change of a backend's breaker; one that opens is reason to probe."""
        opened = state is State.OPEN
        level = logging.WARNING if opened else logging.INFO
        _log.log(level, "backend %s: breaker %s: %s", backend, state.value, why)
        member = self._members.get(backend)
        if opened and member is not None:
            member.probe_soon()

    def _add(self, target: Target) -> Member:
        member = Member(
            target.name,
            target.url,
            target.api_key,
            engine=target.engine,
            tls=target.tls,
            server_name=target.server_name,
            listener=self._listener,
            pace=self._pace,
            rng=self._rng,
            clock=self._clock,
        )
        self._members[target.name] = member
        member.start()
        return member

    def _remove(self, name: str, *, forget: bool) -> None:
        if forget:
            self._catalog.drop(name)
        member = self._members.pop(name, None)
        if member is not None:
            member.mute()
            task = tasks.spawn(member.stop(), name=f"watch-stop:{name}")
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)


async def _all(timeout_s: float, events: Iterable[asyncio.Event]) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(event.wait() for event in events))
    except TimeoutError:
        return False
    return True
