"""The processes of `make chaos`: replicas that can be killed and frozen, and the gateway itself."""

import asyncio
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gateway.sim.ports import free_port

MODEL = "sim"
READY_S = 60.0


async def http(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Ask something of a process of ours."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    head_, _, rest = answer.partition(b"\r\n\r\n")
    return int(head_[9:12]), rest


@dataclass
class ReplicaProcess:
    """One replica; `port` is its for good, whichever process serves it."""

    name: str
    directory: Path
    scale: float
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def journal(self) -> Path:
        return self.directory / f"{self.name}.journal"

    async def start(self) -> None:
        """Start a process and wait until it listens."""
        argv = [sys.executable, "-m", "loadtest.chaos_replica", "--port", str(self.port)]
        argv += ["--journal", str(self.journal), "--time-scale", str(self.scale)]
        self.process = await asyncio.create_subprocess_exec(*argv)
        async with asyncio.timeout(READY_S):
            while not _listens(self.port):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def end(self, number: int) -> None:
        """End the process by a signal; a frozen one as well."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)
            await self.process.wait()

    def send(self, number: int) -> None:
        """Send a signal, if there is still a process."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def tell(self, **what: Any) -> None:
        """Make it misbehave, or stop to."""
        await http(self.port, "POST", "/chaos", orjson.dumps(what))

    def began(self) -> list[str]:
        """Return the ids of the requests that it began, in order."""
        return self.journal.read_text().split() if self.journal.exists() else []


@dataclass
class GatewayProcess:
    """The gateway; each life appends to one log. `down` has when it was not to be reached."""

    directory: Path
    replicas: list[ReplicaProcess]
    port: int = field(default_factory=free_port)
    admin: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None
    lives: int = 0
    life_at: int = 0  # where the last life's part of the log begins
    down: list[tuple[float, float]] = field(default_factory=list)
    ending_s: list[float] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.directory / "gateway.log"

    def configure(self, present: list[ReplicaProcess], *, policy: str = "cost") -> None:
        """Write the configuration."""
        rows = [f"{{name: {r.name}, url: 'http://127.0.0.1:{r.port}'}}" for r in present]
        text = f"""
listen: {{host: 127.0.0.1, port: {self.port}}}
admin: {{host: 127.0.0.1, port: {self.admin}}}
models: [{{name: {MODEL}, backends: [{", ".join(rows)}]}}]
routing: {{policy: {policy}}}
timeouts: {{first_byte_s: 4, idle_s: 4, drain_delay_s: 0.5, drain_s: 10}}
index: {{max_mib: 16}}
state: {{path: {self.directory}/state, interval_s: 5}}
"""
        self.config.write_text(text)

    @property
    def config(self) -> Path:
        return self.directory / "gateway.yaml"

    async def start(self) -> None:
        """Start a process and wait until it is ready."""
        argv = [sys.executable, "-m", "gateway.cli.main", "serve", str(self.config)]
        with self.log.open("ab") as log:
            self.life_at = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdout=asyncio.subprocess.DEVNULL, stderr=log
            )
        self.lives += 1
        async with asyncio.timeout(READY_S):
            while not (_listens(self.port) and _listens(self.admin)):
                if self.process.returncode is not None:
                    raise SystemExit(f"the gateway ended with {self.process.returncode}")
                await asyncio.sleep(0.02)

    async def restart(self) -> int:
        """End it as an orchestrator does, and start the next; return the exit code of the old."""
        loop = asyncio.get_running_loop()
        assert self.process is not None
        began = loop.time()
        self.process.send_signal(signal.SIGTERM)
        code = await self.process.wait()
        self.ending_s.append(loop.time() - began)
        await self.start()
        self.down.append((began, loop.time()))
        return code

    async def status(self) -> dict[str, Any]:
        """Return `/status`."""
        found: dict[str, Any] = orjson.loads((await http(self.admin, "GET", "/status"))[1])
        return found

    async def metrics(self) -> str:
        """Return the metrics page."""
        return (await http(self.admin, "GET", "/metrics"))[1].decode()

    def descriptors(self) -> int:
        """Return how many files the process has open."""
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - a directory of links

    def rss_bytes(self) -> int:
        """Return its resident memory."""
        assert self.process is not None
        page = os.sysconf("SC_PAGE_SIZE")
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * page

    def lines(self, since: int = 0) -> list[dict[str, Any]]:
        """Return what was logged from a place in the file on."""
        rows = self.log.read_bytes()[since:].splitlines()
        return [orjson.loads(row) for row in rows if row.startswith(b"{")]


def gauges(page: str, name: str) -> list[float]:
    """Return the values of a metric's series."""
    rows = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return [float(row) for row in rows]


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
