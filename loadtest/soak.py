"""`make soak`: a gateway under mixed faults for minutes; memory must stay flat, every end explained.

Three scripted backends misbehave at random (reset, truncate, 5xx, stall, odd splits), clients leave
at random points, read slowly, pipeline, send nonsense. Everything stays on loopback and ends by
itself. Exit code 1 if an outcome has no explanation, a gauge is not back at 0, or memory grew.
"""

import argparse
import asyncio
import contextlib
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import uvloop

from gateway.sim.ports import free_port
from loadtest.bench.peers import Peer, spawn

CLIENTS = 48
BACKENDS = 3
WARM_UP_SHARE = 0.3  # memory is compared from here on: pools, tables and the index fill first
GROWTH_MAX = 1.10
FIRST_BYTE_S = 2.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":50,"total_tokens":60,'
    b'"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
WHOLE = (
    b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"words"}}],'
    b'"usage":{"prompt_tokens":50,"total_tokens":60,"completion_tokens":10}}'
)
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class FaultyBackend:
    """An engine that answers most requests and spoils the rest in every known way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.faults: Counter[str] = Counter()

    async def start(self) -> int:
        """Listen; return the port."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # RuntimeError: uvloop's word for writing to a socket the gateway has cut
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, RuntimeError, asyncio.CancelledError
        ):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                found = _LENGTH.search(head)
                body = await reader.readexactly(int(found[1])) if found else b""
                if head.startswith(b"GET /v1/models"):
                    writer.write(_whole(200, MODELS))
                elif head.startswith(b"GET"):
                    writer.write(_whole(404 if b"/metrics" in head else 200, b"{}"))
                else:
                    await self._answer(writer, stream=b'"stream":true' in body)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, *, stream: bool) -> None:
        roll = self.rng.random()
        fault = next((name for name, upto in _FAULTS if roll < upto), "none")
        self.faults[fault] += 1
        if fault == "reset before the head":
            _reset(writer)
        elif fault == "500":
            writer.write(_whole(500, b'{"error":{"message":"x"}}'))
        elif fault == "429":
            writer.write(_whole(429, b'{"error":{"message":"busy"}}'))
        elif fault == "stall":
            await asyncio.sleep(FIRST_BYTE_S * 1.5)
            writer.close()
        elif stream:
            await self._stream(writer, fault)
        elif fault == "truncate":
            writer.write(_whole(200, WHOLE)[:-20])
            writer.close()
        else:
            writer.write(_whole(200, WHOLE))

    async def _stream(self, writer: asyncio.StreamWriter, fault: str) -> None:
        writer.write(HEAD)
        for _ in range(self.rng.randrange(1, 40)):
            data = _chunk(EVENT)
            if fault == "odd splits":
                cut = self.rng.randrange(len(data))
                writer.write(data[:cut])
                await writer.drain()
                await asyncio.sleep(0)
                data = data[cut:]
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.002)
        if fault == "reset in mid-stream":
            _reset(writer)
            return
        if fault == "truncate":
            writer.close()
            return
        end = b"" if fault == "no terminal event" else _chunk(USAGE) + _chunk(DONE)
        writer.write(end + b"0\r\n\r\n")


_FAULTS = (
    ("reset before the head", 0.03),
    ("500", 0.06),
    ("429", 0.08),
    ("stall", 0.085),
    ("reset in mid-stream", 0.12),
    ("truncate", 0.15),
    ("no terminal event", 0.17),
    ("odd splits", 0.40),
)


class Clients:
    """The traffic, and what became of each request."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.port, self.rng = port, rng
        self.ends: Counter[str] = Counter()
        self.unexplained: list[str] = []

    async def run(self, until: float) -> None:
        """One client after the other, until the time is over."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            try:
                await asyncio.wait_for(self._one(), 30)
            except TimeoutError:
                self.unexplained.append("no end within 30 s")
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self._cut(error)

    def _cut(self, error: Exception) -> None:
        """A whole answer that broke after its head can only be cut (docs: limits)."""
        self.ends[f"cut: {type(error).__name__}"] += 1

    async def _one(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await self._talk(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            stream = self.rng.random() < 0.7
            writer.write(self._request(stream=stream))
            if self.rng.random() < 0.05:
                self.ends["client left before the answer"] += 1
                return
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            if b"chunked" in head:
                if not await self._read_stream(reader):
                    return
            else:
                found = _LENGTH.search(head)
                body = await reader.readexactly(int(found[1])) if found else b""
                self._judge(status, body)
            if b"connection: close" in head:
                return

    def _request(self, *, stream: bool) -> bytes:
        if self.rng.random() < 0.03:
            body = self.rng.randbytes(40)
        else:
            text = " ".join(str(self.rng.randrange(50)) for _ in range(self.rng.randrange(5, 400)))
            talk = self.rng.randrange(200)
            messages = [{"role": "system", "content": f"{talk} " * 100}]
            messages.append({"role": "user", "content": text})
            body = orjson.dumps({"model": "m", "messages": messages, "stream": stream})
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n"
        return head % len(body) + body

    async def _read_stream(self, reader: asyncio.StreamReader) -> bool:
        """Read chunks to the end; return False when this client left first."""
        leave = self.rng.randrange(1, 40) if self.rng.random() < 0.1 else 0
        slow = self.rng.random() < 0.05
        events = b""
        count = 0
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = (await reader.readexactly(size + 2))[:-2]
            if not size:
                break
            events = (events + data)[-2000:]
            count += 1
            if count == leave:
                self.ends["client left in mid-stream"] += 1
                return False
            if slow:
                await asyncio.sleep(0.01)
        if b'"error"' in events and events.endswith(DONE):
            self.ends["stream ended by an in-band error"] += 1
        elif events.endswith(DONE):
            self.ends["stream ok"] += 1
        else:
            self.unexplained.append(f"stream ended in {events[-80:]!r}")
        return True

    def _judge(self, status: int, body: bytes) -> None:
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            self.unexplained.append(f"{status} with a body that is no JSON")
            return
        if status == 200 and "choices" in answer:
            self.ends["whole answer ok"] += 1
        elif status in (400, 429, 500, 502, 503, 504) and "error" in answer:
            self.ends[f"{status} {answer['error'].get('code', 'from the backend')}"] += 1
            if answer["error"].get("code") == "internal_error":
                self.unexplained.append("internal_error")
        else:
            self.unexplained.append(f"{status}: {body[:80]!r}")


async def soak(gateway: Peer, admin: int, seconds: float, seed: int) -> tuple[Clients, list[int]]:
    """Run the traffic; return what became of it and the memory samples in bytes."""
    loop = asyncio.get_running_loop()
    clients = Clients(gateway.port, random.Random(seed))
    until = loop.time() + seconds
    memory: list[int] = []

    async def watch() -> None:
        while loop.time() < until:
            await asyncio.sleep(max(0.5, seconds / 60))
            memory.append(gateway.rss_bytes())
            if sys.stderr.isatty():
                total = sum(clients.ends.values())
                text = f"{total} requests, {memory[-1] >> 20} MiB, {len(clients.unexplained)} odd"
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    await asyncio.gather(watch(), *(clients.run(until) for _ in range(CLIENTS)))
    await settled(admin)
    return clients, memory


async def settled(admin: int) -> None:
    """Wait until every in-flight gauge is at 0; complain when they never are."""
    rows: list[str] = []
    for _ in range(100):
        page = await metrics(admin)
        rows = re.findall(r"^gateway_inflight_\w+\{[^}]*\} (\S+)$", page, re.MULTILINE)
        if rows and not any(float(value) for value in rows):
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"gauges are not back at 0: {rows}")


async def metrics(admin: int) -> str:
    """Return the metrics page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", admin)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    page = await reader.read()
    writer.close()
    return page.decode("latin-1")


def verdict(clients: Clients, memory: list[int], *, judge_memory: bool) -> int:
    """Print what happened; return the exit code."""
    for end, count in clients.ends.most_common():
        print(f"{count:8d}  {end}")
    steady = memory[int(len(memory) * WARM_UP_SHARE) :]
    third = max(1, len(steady) // 3)
    before = sum(steady[:third]) / third
    after = sum(steady[-third:]) / third
    print(f"memory: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB ({after / before:.3f}x)")
    print(f"unexplained outcomes: {len(clients.unexplained)}")
    for text, count in Counter(clients.unexplained).most_common(10):
        print(f"  {count} x {text}")
    grown = judge_memory and after > GROWTH_MAX * before
    return int(bool(clients.unexplained) or grown)


async def run(seconds: float, seed: int, *, judge_memory: bool) -> int:
    """Set everything up, soak, judge, take everything down."""
    ports = [await FaultyBackend(random.Random(seed + i)).start() for i in range(BACKENDS)]
    port, admin = free_port(), free_port()
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "--port", str(port)]
    command += ["--admin-port", str(admin), "--set", f"timeouts.first_byte_s={FIRST_BYTE_S}"]
    command += ["--set", "log.level=error", "--set", "index.max_mib=4"]
    command += ["--set", "timeouts.drain_delay_s=0"]
    for backend in ports:
        command += ["--backend", f"http://127.0.0.1:{backend}"]
    start: Callable[[], Peer | None] = lambda: spawn("soak", command, port, 0)  # noqa: E731
    gateway = await asyncio.to_thread(start)
    if gateway is None:
        return 1
    try:
        clients, memory = await soak(gateway, admin, seconds, seed)
    finally:
        await asyncio.to_thread(gateway.stop)
    return verdict(clients, memory, judge_memory=judge_memory)


def main() -> int:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true", help="too short to judge memory by")
    args = parser.parse_args()
    started = time.monotonic()
    code = uvloop.run(run(args.seconds, args.seed, judge_memory=not args.no_memory))
    print(
        f"{time.monotonic() - started:.0f} s, seed {args.seed}: {'ok' if code == 0 else 'FAILED'}"
    )
    return code


if __name__ == "__main__":
    assert Path("pyproject.toml").exists(), "run it from the repository's root"
    raise SystemExit(main())
