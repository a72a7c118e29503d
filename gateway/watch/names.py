"""Which addresses stand behind the `dns` backends of a configuration. Changes nothing itself."""

import asyncio
import logging
import socket
from collections.abc import Mapping

from gateway.config.backends import backends_of
from gateway.config.schema import Config

_log = logging.getLogger("radixgate.watch")


async def resolve(
    config: Config, held: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the addresses of every `dns` backend by name; one that fails keeps those `held`."""
    found: dict[str, tuple[str, ...]] = {}
    for backend in backends_of(config):
        if backend.dns is not None:
            found[backend.dns] = await _addresses(backend.dns) or held.get(backend.dns, ())
    return found


async def _addresses(name: str) -> tuple[str, ...]:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("cannot resolve %s: %s", name, error)
        return ()
    return tuple(sorted({str(info[4][0]) for info in infos}))
