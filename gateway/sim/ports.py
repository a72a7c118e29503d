"""Ports of the loopback address for servers that are about to start. Keeps none."""

import random
import socket
from contextlib import ExitStack
from typing import Final

# Below where outgoing connections (Linux: 32768 and up) and port 0 take theirs from: a server that
# takes its time to start still finds its port free.
_LOWEST: Final = 10_000
_BEYOND: Final = 32_000
_TRIES: Final = 1000

_given: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return the first of `count` ports in a row that nobody listens on now, none of them twice.

    Raises:
        OSError: none found.
    """
    draw = random.SystemRandom()
    for _ in range(_TRIES):
        first = draw.randrange(_LOWEST, _BEYOND - count)
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all_free(ports):
            _given.update(ports)
            return first
    raise OSError("no free port of the loopback address found")


def all_free(ports: range) -> bool:
    """Return whether all of these can be listened on now."""
    with ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
    return True
