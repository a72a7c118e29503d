"""What a gateway writes about requests: the recorder's and the usage log's files, and traces.

Opens and closes them off the loop. Must never be needed to serve: it does nothing unless asked to.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from gateway.config.schema import Config
from gateway.edge.handler import Handler
from gateway.edge.traced import traced
from gateway.telemetry.recorder import Recorder
from gateway.telemetry.traces import Tracing, open_tracing
from gateway.telemetry.usage_log import UsageLog

_log = logging.getLogger("radixgate.traces")


class Journals:
    """All three; any is None when it is not configured."""

    def __init__(
        self, recorder: Recorder | None, usage: UsageLog | None, tracing: Tracing | None
    ) -> None:
        self.recorder = recorder
        self.usage = usage
        self.tracing = tracing

    @classmethod
    async def open(cls, config: Config, clock: Callable[[], float]) -> Self:
        """Open what `config` names.

        Raises:
            OSError: a path that cannot be written.
            MissingExtra: traces are wanted and OpenTelemetry is not installed.
        """
        rng = random.Random(os.urandom(16))  # noqa: S311 - names spans, guards nothing
        tracing = await asyncio.to_thread(
            open_tracing, config.traces, os.environ, rng, _log.warning
        )
        recorder = usage = None
        if config.record is not None:
            recorder = await asyncio.to_thread(Recorder, Path(config.record), clock())
        wanted = config.usage_log
        if wanted.path is not None:
            most = wanted.max_mib * 1024 * 1024
            opened = partial(UsageLog, most_bytes=most, kept=wanted.files, fsync_s=wanted.fsync_s)
            usage = await asyncio.to_thread(opened, Path(wanted.path))
        return cls(recorder, usage, tracing)

    def losses(self) -> dict[str, int]:
        """Return how many requests each file that is written could not take."""
        files = {"record": self.recorder, "usage_log": self.usage}
        return {name: file.dropped for name, file in files.items() if file is not None}

    def listen_to(self, handler: Handler) -> None:
        """Have `handler`'s requests written down and traced."""
        handler.recorder = self.recorder
        if self.tracing is not None:
            handler.exchange = traced(self.tracing)

    async def close(self) -> None:
        """Write out what is left and close."""
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        if self.usage is not None:
            await asyncio.to_thread(self.usage.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
