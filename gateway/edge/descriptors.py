"""Open files: how many clients they allow, and what it looks like when there are none left.

A client may need a second one for its backend, so that many are kept free for each that is let in;
what is left over is for the pollers, the admin listener and files. Must never blame a backend.
"""

import errno
import os
import resource
import socket
from pathlib import Path
from typing import Final

# Sockets of one backend besides clients' requests: metrics, health, models, events.
_EACH_BACKEND: Final = 4
# Files, lookups, and those who are told that there is no room.
_SPARE: Final = 8
# Connections of the admin listener: a sixteenth of all, but enough for a page, a scraper and a shell.
_ADMIN_SHARE: Final = 16
_ADMIN_LEAST: Final = 8
ADMIN_MOST: Final = 64
_UNLIMITED: Final = 1 << 30
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL})


def is_shortage(error: BaseException) -> bool:
    """Return whether a socket could not be had for want of ours: descriptors, buffers, ports."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def can_open(count: int, sock: socket.socket) -> bool:
    """Return whether so many more descriptors could be had now: copies of `sock`'s, for a moment."""
    copies: list[int] = []
    try:
        for _ in range(count):
            copies.append(os.dup(sock.fileno()))  # noqa: PERF401 - those made are to be closed
    except OSError as error:
        return not is_shortage(error)
    finally:
        for copy in copies:
            os.close(copy)
    return True


def _kept_free(admin: int, backends: int) -> int:
    return _SPARE + admin + _EACH_BACKEND * backends


class OpenFiles:
    """What this process may open, counted when everything but clients is open."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = _UNLIMITED if soft == resource.RLIM_INFINITY else soft
        self._own = len(list(Path("/dev/fd").iterdir()))

    @property
    def admin(self) -> int:
        """Return how many connections the admin listener may have."""
        return min(ADMIN_MOST, max(_ADMIN_LEAST, self.limit // _ADMIN_SHARE))

    def clients(self, backends: int) -> int:
        """Return how many client connections there may be at once; at least 1."""
        return max(1, (self.limit - self._own - _kept_free(self.admin, backends)) // 2)
