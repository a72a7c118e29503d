"""A real `radixgate serve` process in front of scripted backends that live in the test."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from gateway.tasks import spawn
from tests.integration.rig import Answer, Backend, Client, Script, closed, get, ok_chat

_READY = re.compile(
    rb"radixgate ready: http://127\.0\.0\.1:(\d+)/v1 admin http://127\.0\.0\.1:(\d+)"
)
WAIT_S = 60.0  # what does not come within this does not come


@dataclass
class Served:
    """The process. `log` is what it wrote on standard error, complete once it has ended."""

    process: asyncio.subprocess.Process
    port: int
    admin: int
    backends: list[Backend]
    log: list[str] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def connect(self, port: int | None = None) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", port or self.port))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes, port: int | None = None) -> Answer:
        """Send bytes on a fresh connection, read one answer, close."""
        client = await self.connect(port)
        try:
            await client.send(data)
            return await client.answer()
        finally:
            self.clients.remove(client)
            await closed(client.writer)

    async def admin_json(self, path: str) -> dict[str, object]:
        found = (await self.ask(get(path), self.admin)).json
        assert isinstance(found, dict)
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end; return the exit code."""
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def refuses(self) -> None:
        """Wait until the data listener accepts nothing any more."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    client = await self.connect()
                except ConnectionError:
                    return
                await closed(client.writer)
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(
    *options: str,
    backends: Sequence[Backend] = (),
    prefix: Sequence[str] = (),
    file: str | None = None,
) -> AsyncIterator[Served]:
    """Run the command, `prefix` before it, until it is ready; kill what is left at the end."""
    argv = [*prefix, sys.executable, "-m", "gateway.cli.main", "serve", *([file] if file else [])]
    argv += ["--port", "0", "--admin-port", "0", "--set", "poll.interval_s=0.05", *options]
    argv += [word for backend in backends if not file for word in ("--backend", backend.url)]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    log: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reading = spawn(_read(process.stderr, log), name="log")
    one: Served | None = None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        ready = _READY.match(line)
        assert ready is not None, (line, log)
        one = Served(process, int(ready[1]), int(ready[2]), list(backends), log)
        yield one
    finally:
        for client in one.clients if one is not None else []:
            await closed(client.writer)
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


@contextlib.asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[list[Backend]]:
    """Run a scripted backend per script."""
    backends = [await Backend(script).start() for script in scripts or (ok_chat,)]
    try:
        yield backends
    finally:
        for backend in backends:
            await backend.stop()


async def _read(stream: asyncio.StreamReader, log: list[str]) -> None:
    while line := await stream.readline():
        log.append(line.decode())
