"""Every source of the configuration in force, and what each is known to have.

A source that fails keeps what it had. Decides nothing about the backends: `changed` is set when the
lists may be others, and the app takes them as it takes a reload.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from gateway import tasks
from gateway.config.discovery import DiscoveryConfig
from gateway.config.forms import FORMS
from gateway.config.groups import Found, Members, groups_of
from gateway.config.problems import ConfigErrors
from gateway.config.schema import BackendConfig, Config
from gateway.core.trie import MAX_SLOTS
from gateway.discovery.files import FileSource
from gateway.discovery.kubernetes import KubernetesSource
from gateway.discovery.names import DnsSource, Resolver, SrvSource
from gateway.discovery.source import Source
from gateway.extras import load_dns

_log = logging.getLogger("radixgate.discovery")
_FIRST_S = 5.0
_AFTER_FAULT_S = 10.0
_RETRY_S = 10.0
_usable = FORMS["url"].ok


@dataclass(slots=True, frozen=True)
class DiscoveryStatus:
    """How a source does. `name` is its listing's, `kind` dns, srv, file or kubernetes."""

    name: str
    kind: str
    backends: int
    failing: bool
    failures: int


class _Group:
    """One followed source (a `source.Told`)."""

    def __init__(self, name: str, kind: str, changed: asyncio.Event) -> None:
        self.name = name
        self.kind = kind
        self.members: Members = ()
        self.failure: str | None = None
        self.failures = 0
        self.heard = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._changed = changed
        self._left_out = 0

    def found(self, members: Members) -> None:
        """Take the list; news is told, the end of a failure is logged."""
        if len(members) > MAX_SLOTS:
            self.failed(f"{len(members)} backends are too many, at most {MAX_SLOTS}")
            return
        told, members = members, tuple(one for one in members if _usable(one.url or ""))
        if told and not members:
            self.failed(f"none of {len(told)} has an address that can be one")
            return
        self._note_left_out(len(told) - len(members))
        if self.failure is not None:
            self.failure = None
            _log.info("backends of %s are found again", self.name)
        self.heard.set()
        if members != self.members:
            self.members = members
            self._changed.set()

    def _note_left_out(self, count: int) -> None:
        """Say how many have no address that can be one; nobody else is to suffer from them."""
        if count not in (0, self._left_out):
            _log.warning(
                "backends of %s: %d without a usable address are left out", self.name, count
            )
        self._left_out = count

    def failed(self, reason: str) -> None:
        """Keep what is known; a reason is logged once."""
        self.failures += 1
        if reason != self.failure:
            self.failure = reason
            _log.warning(
                "backends of %s: %s; keeping the %d known", self.name, reason, len(self.members)
            )
        self.heard.set()


@dataclass(slots=True, frozen=True)
class _Plan:
    """The sources of a configuration that is not in force yet; some are only now begun."""

    settings: DiscoveryConfig
    groups: Mapping[str, _Group]
    fresh: tuple[_Group, ...]
    names: Mapping[str, str]


class Discovery:
    """Follows what the configuration in force names. `env` is the process's environment."""

    def __init__(self, rng: random.Random, env: Mapping[str, str]) -> None:
        self.changed = asyncio.Event()
        self._rng = rng
        self._env = env
        self._settings = DiscoveryConfig()
        self._groups: Mapping[str, _Group] = {}
        self._resolver = Resolver(self._current)

    @asynccontextmanager
    async def planned(self, config: Config, within_s: float = _FIRST_S) -> AsyncIterator[Found]:
        """Follow what `config` names, if the block ends well, and nothing else.

        Yields what is known of it: a source that `config` adds is waited for, for so long, until
        it has said its first word.

        Raises:
            MissingExtra: dnspython is needed.
        """
        plan = await self._prepare(config, within_s)
        try:
            yield {key: group.members for key, group in plan.groups.items()}
        except BaseException:
            _cancel(plan.fresh)
            raise
        self._commit(plan)

    async def _prepare(self, config: Config, within_s: float) -> _Plan:
        wanted = groups_of(config)
        if config.discovery.nameservers or any(group.srv for group in wanted.values()):
            await asyncio.to_thread(load_dns, "`srv` and `discovery.nameservers`")
        if not self._groups:
            self._settings = config.discovery  # nothing runs that could be misled
        groups = {key: self._groups.get(key) or self._begin(group) for key, group in wanted.items()}
        plan = _Plan(
            config.discovery,
            groups,
            tuple(group for key, group in groups.items() if key not in self._groups),
            {key: listing.name or "" for key, listing in wanted.items()},
        )
        try:
            async with asyncio.timeout(within_s):
                for group in plan.fresh:
                    await group.heard.wait()
        except TimeoutError:
            pass  # it is told of when it is heard of
        except asyncio.CancelledError:
            _cancel(plan.fresh)
            raise
        return plan

    def _commit(self, plan: _Plan) -> None:
        self._settings = plan.settings
        old, self._groups = self._groups, plan.groups
        for key, group in plan.groups.items():
            group.name = plan.names[key]
        _cancel(group for key, group in old.items() if key not in plan.groups)

    async def follow(self, take: Callable[[], Awaitable[None]]) -> None:
        """Have what was found taken, after every change; what is refused is tried again later."""
        refused = ""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S if refused else None):
                    await self.changed.wait()
            self.changed.clear()
            try:
                await take()
            except (ConfigErrors, ValueError) as error:
                if str(error) != refused:
                    _log.error("the backends found are not taken: %s", error)
                refused = str(error) or type(error).__name__
            else:
                refused = ""

    def found(self) -> Found:
        """Return what is known now: group key -> members."""
        return {key: group.members for key, group in self._groups.items()}

    def statuses(self) -> list[DiscoveryStatus]:
        """Return how each source does."""
        return [
            DiscoveryStatus(
                group.name,
                group.kind,
                len(group.members),
                group.failure is not None,
                group.failures,
            )
            for group in self._groups.values()
        ]

    async def stop(self) -> None:
        """End every source."""
        groups, self._groups = self._groups, {}
        running = [group.task for group in groups.values() if group.task is not None]
        await asyncio.gather(*(tasks.stop(task) for task in running))

    def _current(self) -> DiscoveryConfig:
        return self._settings

    def _begin(self, listing: BackendConfig) -> _Group:
        kind, source = self._source(listing)
        group = _Group(listing.name or "", kind, self.changed)
        group.task = tasks.spawn(_follow(source, group), name=f"discovery:{group.name}")
        return group

    def _source(self, listing: BackendConfig) -> tuple[str, Source]:
        settings, rng = self._current, self._rng
        if listing.file is not None:
            return "file", FileSource(listing.file, settings)
        if listing.kubernetes is not None:
            source = KubernetesSource(listing.kubernetes, settings, rng, self._env)
            return "kubernetes", source
        if listing.srv is not None:
            return "srv", SrvSource(listing, self._resolver, settings, rng)
        return "dns", DnsSource(listing, self._resolver, settings, rng)


async def _follow(source: Source, group: _Group) -> None:
    """Follow for ever: a fault in a source is logged, and it is begun again."""
    while True:
        try:
            await source.follow(group)
        except Exception as error:  # noqa: BLE001 - see above
            _log.exception("a fault in looking for the backends of %s", group.name)
            group.failed(f"a fault: {type(error).__name__}")
        await asyncio.sleep(_AFTER_FAULT_S)


def _cancel(groups: Iterable[_Group]) -> None:
    for group in groups:
        if group.task is not None:
            group.task.cancel()
