"""Child processes of a demonstration: started, waited for, and surely ended.

Starts only this product's own commands, on loopback, in their own session (a terminal's ctrl-C
reaches the parent, which then ends them in order).
"""

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence

from gateway.sim.ports import free_port
from gateway.tasks import spawn, stop

READY_S = 30.0  # a cold interpreter on a busy two-core machine needs about 2 s
END_S = 5.0
_URL = re.compile(rb"https?://[\w.:\[\]-]+")


class StageError(Exception):
    """A child did not become ready; the message ends with what it said."""


@contextlib.asynccontextmanager
async def child(arguments: Sequence[str], lines: int) -> AsyncIterator[list[str]]:
    """Run `radixgate ARGUMENTS`; yield the first URL of each of its first `lines` output lines.

    Raises:
        StageError: it ended, or said nothing, before that.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.cli.main",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        reader = process.stdout
        assert reader is not None
        drain: asyncio.Task[None] | None = None
        try:
            try:
                async with asyncio.timeout(READY_S):
                    urls = [await _url(reader) for _ in range(lines)]
            except (TimeoutError, StageError) as error:
                errors.seek(0)
                said = errors.read()[-2000:].decode(errors="replace").strip()
                raise StageError(f"radixgate {arguments[0]} did not start: {said}") from error
            drain = spawn(_drain(reader), name=f"output of {arguments[0]}")
            yield urls
        finally:
            await _end(process)
            if drain is not None:
                await stop(drain)


async def _url(reader: asyncio.StreamReader) -> str:
    while line := await reader.readline():
        if found := _URL.search(line):
            return found[0].decode()
    raise StageError


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the child to end, then make it. Its second signal says: at once."""
    for ask in (process.terminate, process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            ask()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
            return


def replicas(
    count: int, *, profile: str, time_scale: float, model: str, stream_interval: int
) -> contextlib.AbstractAsyncContextManager[list[str]]:
    """Run simulated replicas in one process; yields their URLs."""
    options = {
        "--port": 0,
        "--count": count,
        "--profile": profile,
        "--time-scale": time_scale,
        "--model": model,
        "--stream-interval": stream_interval,
    }
    flat = [str(item) for pair in options.items() for item in pair]
    return child(["replica", *flat], count)


def gateway(
    backends: Sequence[str], policy: str
) -> contextlib.AbstractAsyncContextManager[list[str]]:
    """Run a gateway over `backends`; yields its one data URL."""
    flags = [item for url in backends for item in ("--backend", url)]
    port = free_port(2)
    ports = ["--port", str(port), "--admin-port", str(port + 1)]
    quiet = ["--set", "log.requests=false"]
    return child(["serve", *flags, "--host", "127.0.0.1", *ports, "--policy", policy, *quiet], 1)
