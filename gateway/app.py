"""The composition root: builds the parts, starts them, reloads and stops them.

The only module that knows every part. It decides nothing about a request.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping, Sequence
from time import time  # noqa: TID251 - dates in /v1/models, no interval
from typing import Self

from aiohttp import web

import gateway
from gateway import tasks
from gateway.collector import Collector, keep_tidy
from gateway.config.backends import backends_of
from gateway.config.build import core_settings
from gateway.config.diff import changes
from gateway.config.groups import Found, changed_names, expand
from gateway.config.load import Loaded
from gateway.config.problems import ConfigErrors
from gateway.config.schema import Config
from gateway.config.secrets import admin_digests
from gateway.core.prompter import BytePrompter
from gateway.core.queued import QueuedDispatcher
from gateway.discovery.discovery import Discovery
from gateway.edge.admin import AdminContext, ReloadResult, build_admin
from gateway.edge.admin_connections import AdminConnections
from gateway.edge.descriptors import OpenFiles
from gateway.edge.door import Door
from gateway.edge.handler import Handler, Parts
from gateway.edge.server import Listener
from gateway.edge.sockets import bind, url_of
from gateway.edge.tls import Handshakes
from gateway.edge.upstreams import Upstreams
from gateway.following import Following
from gateway.journals import Journals
from gateway.prompt.shelf import Tokenizers
from gateway.reloaded import ConfigFile, Warnings, changed_secrets, log_changes, told_if_slow
from gateway.roster import Roster
from gateway.source import Source
from gateway.state import State
from gateway.stopping import Stopping
from gateway.telemetry.lag import watch_lag
from gateway.telemetry.logs import Logs
from gateway.telemetry.metrics import Telemetry
from gateway.tls import Certificates, Plan
from gateway.watch.catalog import Catalog
from gateway.watch.poller import Watch
from gateway.wiring import needs_restart, pace_of, targets_of, upstream_specs

_log = logging.getLogger("radixgate.app")
_FIRST_ROUND_S = 2.0
_FIRST_METRICS_S = 0.5
_HOUSEKEEPING_S = 1.0
_CERTIFICATES_S = 5.0
_RESTORE_S = 3.0  # spent on a saved state before listening; the rest of it comes later


class App:
    """One gateway process. `start`, then `stop`; `reload` in between."""

    def __init__(self, source: Source, loaded: Loaded, logs: Logs | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._source = source
        self._logs = logs
        self._loop = loop
        self._clock = loop.time
        self._rng = random.Random(os.urandom(16))  # noqa: S311 - spreads ties, guards nothing
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()
        self._warnings = Warnings(loaded.warnings)
        self._found: Found = {}  # the backends behind every group, as they are applied
        self._discovery = Discovery(self._rng, os.environ)
        self._file = ConfigFile(source.path, lambda: self.config.reload)
        self._certificates = Certificates(
            Handshakes(lambda result: self.telemetry.handshake(result), self._clock),  # noqa: PLW0108 - `start` makes it
            lambda result: self.telemetry.certificate(result),  # noqa: PLW0108 - same
        )
        self.config = self._started_with = loaded.config
        self.started_at = self._clock()

    async def start(self) -> Self:
        """Build everything, listen, and wait for the first word of the backends (at most 2 s)."""
        Following.check(self.config)
        await asyncio.to_thread(self._certificates.read, self.config)
        self._admin_keys = admin_digests(self.config.admin, os.environ)
        await self._file.take()
        self._journals = await Journals.open(self.config, self._clock)
        self._state = await State.open(self.config, self._clock)
        self._bind_listeners()  # first: an address in use is told before anything is open
        async with self._discovery.planned(self.config) as self._found:
            pass
        config = self._expanded(self.config)
        settings = core_settings(config, {})
        now = self._clock()
        self.dispatcher = QueuedDispatcher(settings, self._rng, now)
        self.telemetry = Telemetry(self.dispatcher, clock=self._clock, version=gateway.__version__)
        self.telemetry.page.losses = self._journals.losses
        self.telemetry.page.sources = self._discovery.statuses
        self.telemetry.page.certificates = self._certificates.expiries
        self._collector = Collector(self.telemetry.collector_pause)
        self._catalog = Catalog(time)
        self._upstreams = Upstreams()
        self._upstreams.replace(self._upstreams.plan(upstream_specs(config, self._certificates)))
        self._by_bytes = by_bytes = BytePrompter(self._state.salt, config.index.block_bytes)
        self._block_bytes = config.index.block_bytes
        self._tokenizers = Tokenizers(self._state.salt, by_bytes, self.telemetry.fallback)
        self.handler = Handler(
            Parts(
                config=config,
                dispatcher=self.dispatcher,
                telemetry=self.telemetry,
                upstreams=self._upstreams,
                catalog=self._catalog,
                prompters=self._tokenizers.prompters(config),
                default_prompter=by_bytes,
                clock=self._clock,
                rng=self._rng,
            )
        )
        self._roster = Roster(self._catalog, self.handler, self.telemetry, self._logs, self._clock)
        self._journals.listen_to(self.handler, self.telemetry)
        self._listener = Listener(self.handler, config.limits, config.timeouts, self._clock)
        self._stopping = Stopping(self.handler, self._listener, lambda: self._server.close())  # noqa: PLW0108 - `_listen` makes it
        self._watch = Watch(
            targets_of(config, self._certificates),
            self.dispatcher,
            self._catalog,
            pace=pace_of(config),
            on_models=self._on_models,
            on_block_size=self._fit_blocks,
            heard=self.handler.heard,
            rng=self._rng,
            clock=self._clock,
        )
        self.dispatcher.tell_breakers(self._watch.breaker_changed)
        self._following = Following(self.dispatcher, self._state.salt, self._clock)
        self._following.apply(config, self._tokenizers.prompters(config))
        self._roster.publish(config, settings)
        await self._watch.start()
        await self._watch.first_round(_FIRST_ROUND_S)
        await self._watch.first_metrics(_FIRST_METRICS_S)
        self._state.attach(self.dispatcher, by_bytes, self._way)
        await self._state.settle(_RESTORE_S, wait=True)
        await self._listen(config)
        self._collector.start()
        self._tasks = [
            tasks.spawn(watch_lag(self.telemetry.loop_lag, self._clock), name="loop-lag"),
            tasks.spawn(self._housekeep(), name="housekeeping"),
            tasks.spawn(
                keep_tidy(
                    self._collector,
                    idle=lambda: not self.handler.live,
                    sweep=self.dispatcher.sweep,
                ),
                name="collector",
            ),
            tasks.spawn(self._discovery.follow(self._take_found), name="discovery"),
            tasks.spawn(self._file.follow(self.reload), name="configuration-file"),
            tasks.spawn(self._state.keep(), name="state"),
            tasks.spawn(self._server.mind(), name="door"),
            tasks.spawn(self._follow_certificates(), name="certificates"),
        ]
        return self

    async def stop(self, *, announced: bool = False) -> None:
        """Drain for `timeouts.drain_s`, end the rest honestly, give everything back.

        `announced` = serve on for `timeouts.drain_delay_s` first, though not ready any more.
        """
        timeouts = self.config.timeouts
        await self._stopping.run(timeouts.drain_delay_s if announced else 0.0, timeouts.drain_s)
        if not self._stopping.hurried:
            await self._stopping.unless_hurried(self._state.save())
        await self._close()

    def hurry(self) -> None:
        """End every open request now (a second signal)."""
        self._stopping.hurry()

    async def reload(self) -> ReloadResult:
        """Read the configuration again and take it whole, or keep the old one and say why."""
        async with self._reloading:
            try:
                with told_if_slow("the configuration"):
                    loaded, certificates = await self._read()
                restart = needs_restart(self._started_with, loaded.config)
                changed = await asyncio.to_thread(changes, self.config, loaded.config)
                keys = self._upstreams.keys()
                async with (
                    self._journals.changing(loaded.config),
                    self._discovery.planned(loaded.config) as found,
                ):
                    with self._certificates.taking(certificates):
                        self._apply(loaded.config, found)
                await self._open_door()
                changed += changed_secrets(keys, self._upstreams.keys())
            except ConfigErrors as errors:
                return self._not_reloaded([str(problem) for problem in errors.problems])
            except (ValueError, OSError) as error:
                return self._not_reloaded([str(error)])
        self.telemetry.reload("ok")
        log_changes(changed, restart)
        self._warnings.tell(loaded.warnings)
        return ReloadResult(ok=True, needs_restart=restart, changes=tuple(changed))

    async def renew_certificates(self) -> None:
        """Take changed certificate files: new connections use them, open ones go on."""
        async with self._reloading:
            with told_if_slow("the certificates"):
                changed = await asyncio.to_thread(self._certificates.refresh)
            if changed:
                self._apply(self.config, self._found)
                await self._open_door()

    @property
    def url(self) -> str:
        """Return the data listener's URL."""
        return self._server.url

    @property
    def admin_url(self) -> str:
        """Return the admin listener's URL."""
        return url_of(self._admin_socket)

    # --- building

    def _bind_listeners(self) -> None:
        listen, admin = self.config.listen, self.config.admin
        self._socket = bind(listen.host, listen.port)
        try:
            self._admin_socket = bind(admin.host, admin.port)
        except OSError:
            self._socket.close()
            raise

    async def _listen(self, config: Config) -> None:
        self._server = Door(self._listener, self._socket)
        await self._open_door()
        self._files = OpenFiles()
        self._limit_clients(config)
        if self._listener.most < config.limits.streams // 2:
            text = "open files (ulimit -n %d) allow fewer connections than limits.streams: about %d"
            _log.warning(text, self._files.limit, self._listener.most)
        self._listener.start_ticking()
        context = AdminContext(
            dispatcher=self.dispatcher,
            telemetry=self.telemetry,
            version=gateway.__version__,
            ready=self.handler.ready,
            reload=self.reload,
            explain=self.handler.explain,
            clock=self._clock,
            started_at=self.started_at,
            body_bytes=lambda: self.config.limits.body_mib * 1024 * 1024,
            host=config.admin.host,
            keys=lambda: self._admin_keys,
            connections=AdminConnections(self._files.admin),
        )
        self._runner = web.AppRunner(build_admin(context), access_log=None)
        await self._runner.setup()
        self._admin = await context.connections.serve(self._runner, self._admin_socket)

    async def _open_door(self) -> None:
        """Accept clients with the certificate in force, if there is one."""
        context = self._certificates.listener(self.config)
        if context is not None:
            self.telemetry.expect_handshakes()
        await self._server.open(context)

    def _limit_clients(self, config: Config) -> None:
        self._listener.limit(self._files.clients(len(backends_of(config))))

    async def _close(self) -> None:
        self._listener.stop_ticking()
        for task in self._tasks:
            await tasks.stop(task)
        await self._discovery.stop()
        await self._watch.stop()
        self._following.close()
        self._listener.abort_all()
        self._upstreams.abort()
        self._tokenizers.close()
        self._admin.close()
        await self._runner.cleanup()
        self._collector.close()
        await self._journals.close()

    # --- changing

    def _apply(self, config: Config, found: Found) -> None:
        """Take a configuration. Everything that can fail comes before the first change."""
        before, expanded = self._expanded(self.config), expand(config, found)
        settings = core_settings(expanded, self._catalog.served())
        upstreams = self._upstreams.plan(upstream_specs(expanded, self._certificates))
        targets = targets_of(expanded, self._certificates)
        admin_keys = admin_digests(expanded.admin, os.environ)
        prompters = self.handler.prompters
        if config is not self.config:  # else a reload may be at them, in a thread
            prompters = self._tokenizers.prompters(expanded)  # loaded by `_read`
        Following.check(expanded)
        self.dispatcher.apply(settings, self._clock())
        if self._by_bytes.use_block_bytes(expanded.index.block_bytes):
            self._block_bytes = expanded.index.block_bytes
            for model in settings.models:
                if model.name not in prompters:
                    self.dispatcher.forget_prefixes(model.name)
        self._following.apply(expanded, prompters)
        if config is not self.config:
            self._roster.await_anew()
        self.config = config
        self._admin_keys = admin_keys
        self._found = found
        self._upstreams.replace(upstreams)
        self.handler.configure(expanded, prompters)
        self._listener.configure(expanded.limits, expanded.timeouts)
        self._state.apply(expanded.state)
        self._limit_clients(expanded)
        self._watch.set_targets(targets, pace_of(expanded))
        self._roster.publish(expanded, settings)
        for what, name in changed_names(before, expanded):
            _log.info("backend %s %s", name, what)

    async def _read(self) -> tuple[Loaded, Plan]:
        """Read the configuration and every file that it names, in threads: a mount may hang."""
        await self._file.take()
        loaded = await asyncio.to_thread(self._source.load)
        await asyncio.to_thread(self._tokenizers.prompters, loaded.config)
        certificates = await asyncio.to_thread(self._certificates.plan, loaded.config)
        await asyncio.to_thread(self._state.check, loaded.config.state)
        return loaded, certificates

    async def _take_found(self) -> None:
        """Take the backends that discovery has now, in one step.

        Needs no turn between reloads: one that waits for its files must not hold up a new backend.
        """
        found = self._discovery.found()
        if found != self._found:
            self._apply(self.config, found)

    def _on_models(self, served: Mapping[str, tuple[str, ...]]) -> None:
        config = self._expanded(self.config)
        settings = core_settings(config, served)
        self.dispatcher.apply(settings, self._clock())
        self._roster.publish(config, settings)

    def _expanded(self, config: Config) -> Config:
        return expand(config, self._found)

    def _not_reloaded(self, problems: Sequence[str]) -> ReloadResult:
        self.telemetry.reload("failed")
        _log.error("configuration not reloaded: %s", "; ".join(problems))
        return ReloadResult(ok=False, problems=tuple(problems))

    # --- background

    def _fit_blocks(self) -> None:
        """Chain prompts by the block sizes that the engines report now."""
        changed = self._tokenizers.fit_blocks(self.dispatcher.block_tokens, self._clock())
        for model in changed:
            self.dispatcher.forget_prefixes(model)
        if changed:
            _log.info("the engines' block size is another for: %s", ", ".join(changed))
            self._following.apply(self._expanded(self.config), self.handler.prompters)

    def _way(self, model: str) -> str:
        """Return all that the hashes of a model's prompts depend on besides the salt."""
        return self._tokenizers.way(model) or f"bytes {self._block_bytes}"

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._upstreams.expire(self._clock())
            self.handler.turn_day()
            self._roster.note_awaited()
            self._fit_blocks()
            await self._state.settle(_HOUSEKEEPING_S)

    async def _follow_certificates(self) -> None:
        """Look for changed certificate files; without TLS there are none to look at."""
        while True:
            await asyncio.sleep(_CERTIFICATES_S)
            if not self._certificates.any:
                continue
            try:
                await self.renew_certificates()
            except (ConfigErrors, ValueError, OSError):
                _log.exception("the changed certificates are not taken")
