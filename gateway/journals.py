"""What is written about requests: the trace recorder's file, the usage log's, and spans.

Opens and closes them off the loop. Must never be needed to serve: without paths it does nothing.
"""

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Self, TypedDict

from gateway.config.admission import UsageLogConfig
from gateway.config.schema import Config, TracesConfig
from gateway.edge.exchange import Exchange
from gateway.edge.handler import Handler
from gateway.edge.traced import traced
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.recorder import Recorder
from gateway.telemetry.traces import Tracing, open_tracing
from gateway.telemetry.usage_log import UsageLog

_log = logging.getLogger("radixgate.traces")


class Journals:
    """All three; any is None when it is not configured. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.recorder: Recorder | None = None
        self.usage: UsageLog | None = None
        self.tracing: Tracing | None = None
        self._traces: TracesConfig | None = None  # what `tracing` was opened for
        self._clock = clock
        self._attached: tuple[Handler, Telemetry] | None = None

    @classmethod
    async def open(cls, config: Config, clock: Callable[[], float]) -> Self:
        """Open what `config` names.

        Raises:
            OSError: a path that cannot be written.
            MissingExtra: traces are wanted and OpenTelemetry is not installed.
        """
        made = cls(clock)
        async with made.changing(config):
            pass
        return made

    @asynccontextmanager
    async def changing(self, config: Config) -> AsyncIterator[None]:
        """Write what `config` names, and no more what it does not, if the block ends well.

        What is new is open before the block runs, and handed out before the old is closed: no
        request is lost between two files. A request in progress is traced where it began to be.

        Raises:
            OSError: a path that cannot be written; all stays as it was.
            MissingExtra: traces are wanted and OpenTelemetry is not installed; likewise.
        """
        fresh, old = Journals(self._clock), Journals(self._clock)
        fresh.recorder, fresh.usage = old.recorder, old.usage = self.recorder, self.usage
        fresh.tracing = old.tracing = self.tracing
        try:
            if _path(config.record) != _path_of(self.recorder):
                fresh.recorder = None
                fresh.recorder = await self._recorder(config.record)
            if _path(config.usage_log.path) != _path_of(self.usage):
                fresh.usage = None
                fresh.usage = await self._usage_log(config.usage_log)
            if config.traces != self._traces:
                fresh.tracing = None
                fresh.tracing = await _tracing(config.traces)
            yield
        except BaseException:
            await fresh._close_but(self)
            raise
        self.recorder, self.usage, self.tracing = fresh.recorder, fresh.usage, fresh.tracing
        self._traces = config.traces
        if self.usage is not None:
            self.usage.configure(**_limits_of(config.usage_log))
        if self._attached is not None:
            self.listen_to(*self._attached)
        await old._close_but(self)

    def losses(self) -> dict[str, int]:
        """Return how many requests each file that is written could not take."""
        files = {"record": self.recorder, "usage_log": self.usage}
        return {name: file.dropped for name, file in files.items() if file is not None}

    def listen_to(self, handler: Handler, telemetry: Telemetry) -> None:
        """Have requests written down and traced, from now on into whatever is open."""
        self._attached = handler, telemetry
        handler.recorder = self.recorder
        telemetry.usage_log = None if self.usage is None else self.usage.note
        handler.exchange = Exchange if self.tracing is None else traced(self.tracing)

    async def close(self) -> None:
        """Write out what is left and close."""
        await self._close_but(Journals(self._clock))

    async def _close_but(self, kept: "Journals") -> None:
        """Close what is not `kept`'s as well."""
        if self.recorder is not None and self.recorder is not kept.recorder:
            await asyncio.to_thread(self.recorder.close)
        if self.usage is not None and self.usage is not kept.usage:
            await asyncio.to_thread(self.usage.close)
        if self.tracing is not None and self.tracing is not kept.tracing:
            await asyncio.to_thread(self.tracing.close)

    async def _recorder(self, path: str | None) -> Recorder | None:
        if path is None:
            return None
        with _named("record"):
            return await asyncio.to_thread(Recorder, Path(path), self._clock())

    async def _usage_log(self, wanted: UsageLogConfig) -> UsageLog | None:
        if wanted.path is None:
            return None
        opened = partial(UsageLog, Path(wanted.path), **_limits_of(wanted))
        with _named("usage_log.path"):
            return await asyncio.to_thread(opened)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Say in an OSError which key of the configuration it is about."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise OSError(f"{key}: {reason}") from error


async def _tracing(wanted: TracesConfig) -> Tracing | None:
    rng = random.Random(os.urandom(16))  # noqa: S311 - names spans, guards nothing
    return await asyncio.to_thread(open_tracing, wanted, os.environ, rng, _log.warning)


class _Limits(TypedDict):
    most_bytes: int
    kept: int
    fsync_s: float


def _limits_of(wanted: UsageLogConfig) -> _Limits:
    return {
        "most_bytes": wanted.max_mib * 1024 * 1024,
        "kept": wanted.files,
        "fsync_s": wanted.fsync_s,
    }


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _path_of(file: Recorder | UsageLog | None) -> Path | None:
    return None if file is None else file.path
