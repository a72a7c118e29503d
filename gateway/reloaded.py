"""What goes with a reload: the file whose change begins it, and what is told of it afterwards.

Must never show a secret.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gateway.config.diff import MASK, Change
from gateway.config.discovery import ReloadConfig
from gateway.filewatch import FileWatch

_log = logging.getLogger("radixgate.app")


def changed_secrets(old: Mapping[str, str | None], new: Mapping[str, str | None]) -> list[Change]:
    """Return which backends are sent another key, from the same variable or file or not."""
    return [
        Change(f"key of backend {name}", MASK, MASK)
        for name, key in new.items()
        if name in old and old[name] != key
    ]


def log_changes(changed: Sequence[Change], restart: Sequence[str]) -> None:
    """Log every change, and what of it waits for a start."""
    _log.info("configuration reloaded, changes: %d", len(changed))
    for change in changed:
        _log.info("changed %s", change)
    if restart:
        _log.warning("these take effect with the next start: %s", ", ".join(restart))


class ConfigFile:
    """The configuration file, if there is one, and whether its changes matter."""

    def __init__(self, path: str | None, settings: Callable[[], ReloadConfig]) -> None:
        self._settings = settings
        self._watch = None if path is None else FileWatch(path, lambda: settings().interval_s)

    async def take(self) -> None:
        """Note that the file is about to be read: what it is then is no change any more."""
        if self._watch is not None:
            await self._watch.take()

    async def follow(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Reload after every change, while that is wanted."""
        while self._watch is not None:
            if not self._settings().watch:
                await asyncio.sleep(self._settings().interval_s)
                continue
            await self._watch.changed()
            if self._settings().watch:
                await reload()
