"""The files a gateway writes about requests: the trace recorder's and the usage log's.

Opens and closes them off the loop. Must never be needed to serve: without paths it does nothing.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from gateway.config.schema import Config
from gateway.telemetry.recorder import Recorder
from gateway.telemetry.usage_log import UsageLog


class Journals:
    """Both files; either is None when it is not configured."""

    def __init__(self, recorder: Recorder | None, usage: UsageLog | None) -> None:
        self.recorder = recorder
        self.usage = usage

    @classmethod
    async def open(cls, config: Config, clock: Callable[[], float]) -> Self:
        """Open what `config` names.

        Raises:
            OSError: a path that cannot be written.
        """
        recorder = usage = None
        if config.record is not None:
            recorder = await asyncio.to_thread(Recorder, Path(config.record), clock())
        wanted = config.usage_log
        if wanted.path is not None:
            most = wanted.max_mib * 1024 * 1024
            opened = partial(UsageLog, most_bytes=most, kept=wanted.files, fsync_s=wanted.fsync_s)
            usage = await asyncio.to_thread(opened, Path(wanted.path))
        return cls(recorder, usage)

    def losses(self) -> dict[str, int]:
        """Return how many requests each file that is written could not take."""
        files = {"record": self.recorder, "usage_log": self.usage}
        return {name: file.dropped for name, file in files.items() if file is not None}

    async def close(self) -> None:
        """Write out what is left and close."""
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        if self.usage is not None:
            await asyncio.to_thread(self.usage.close)
