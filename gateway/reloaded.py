"""What goes with a reload: the file whose change begins it, and what is told of it afterwards.

Must never show a secret.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gateway.config.diff import MASK, Change
from gateway.config.discovery import ReloadConfig
from gateway.config.problems import ConfigProblem
from gateway.filewatch import FileWatch

_log = logging.getLogger("radixgate.app")
_SLOW_S = 10.0  # the largest vocabularies take two
_SLOW = (
    "reading %s takes longer than %g s: is a file on a mount that does not answer? Everything goes "
    "on as it was, discovery too; no other reload can begin"
)


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


class Warnings:
    """What a configuration warns of; a reload tells what the one before it did not."""

    def __init__(self, told: Iterable[ConfigProblem]) -> None:
        self._told = {str(warning) for warning in told}

    def tell(self, warnings: Iterable[ConfigProblem]) -> None:
        """Log those that are new."""
        now = dict.fromkeys(str(warning) for warning in warnings)
        for warning in now:
            if warning not in self._told:
                _log.warning("%s", warning)
        self._told = set(now)


@contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Log that files are waited for, if the block takes long; nothing can be done but wait."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(_SLOW_S, _log.warning, _SLOW, what, _SLOW_S)
    try:
        yield
    finally:
        timer.cancel()


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
