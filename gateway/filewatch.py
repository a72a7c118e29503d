"""Notices that a file was changed: by polling, which works on every file system and mount.

Looks in a thread, so that a file on a dead network mount stalls nothing. Never reads the file.
"""

import asyncio
import os
from collections.abc import Callable

Stamp = tuple[int, ...] | None
"""What tells one state of a file from another; None: it is not there."""


def stamp_of(path: str) -> Stamp:
    """Return the state of a file; links are followed, as ConfigMaps are swapped by one."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a path object would be made anew every second
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


class FileWatch:
    """Waits for changes of one file. `pause_s` is asked before every look."""

    def __init__(self, path: str, pause_s: Callable[[], float]) -> None:
        self._path = path
        self._pause_s = pause_s
        self._seen: Stamp = None
        self._taken: Stamp = None

    async def take(self) -> None:
        """Regard the file as it is now as known: whoever calls this is about to read it."""
        self._seen = self._taken = await asyncio.to_thread(stamp_of, self._path)

    async def changed(self) -> None:
        """Return when the file differs from what was taken and looked the same twice.

        Half of a file that is being written is so mostly not read; what is now is taken.
        """
        while True:
            await asyncio.sleep(self._pause_s())
            now = await asyncio.to_thread(stamp_of, self._path)
            settled, self._seen = now == self._seen, now
            if settled and now != self._taken:
                self._taken = now
                return
