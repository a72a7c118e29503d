"""The rig: a gateway in this loop, scripted raw-socket backends, raw-socket clients.

Backends and clients speak bytes, so that delays, splits and resets are exact. Health, metrics and
model list are answered by the backend itself; everything else is the script's.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import openai
import orjson

from gateway.app import App
from gateway.source import Source

HEAD_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
HEAD_SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
_TEST_S = 90.0  # a test that waits for what never comes fails after this


@dataclass
class Received:
    """A request as a backend read it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    raw_head: bytes

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k.lower() == name.lower()), None)


class Conn:
    """A backend's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.closed = asyncio.Event()
        self.requests = 0

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, body: Any, status: int = 200, extra: bytes = b"") -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await self.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, extra, len(data), data)
        )

    async def sse(self, *events: bytes) -> None:
        await self.write(HEAD_SSE)
        for event in events:
            await self.chunk(event)

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    def close_after(self, seconds: float, *, blind: bool = True) -> None:
        """Close, as an engine closes an idle connection, unless another request came.

        If `blind`, also where one came that is not yet read, as engines do.
        """
        asyncio.get_running_loop().call_later(seconds, self._close_if, self.requests, blind)

    def shut(self) -> None:
        """Close at once, in the kernel: what is written from now on meets a closed socket."""
        fileno = self.writer.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(fileno)) as twin:
            twin.shutdown(socket.SHUT_RDWR)

    def _close_if(self, requests: int, blind: bool) -> None:
        if self.requests == requests and (blind or not self._unread()):
            self.writer.close()

    def _unread(self) -> bool:
        """Return whether anything has come that the script has not read, be it in the kernel."""
        fileno = self.writer.get_extra_info("socket").fileno()
        there = fcntl.ioctl(fileno, termios.FIONREAD, bytes(4))
        return any(there) or bool(self.reader._buffer)  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the gateway has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Conn, Received], Awaitable[None]]


def chat_event(text: str, **more: Any) -> bytes:
    delta = {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    data = {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage_event(prompt: int = 10, completion: int = 2, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return b"data: " + orjson.dumps({"id": "c", "choices": [], "usage": usage}) + b"\n\n"


async def ok_chat(conn: Conn, request: Received) -> None:
    """Answer like a healthy engine, stream or not."""
    body = orjson.loads(request.body or b"{}")
    if body.get("stream"):
        events = [chat_event("a"), chat_event("b")]
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            events.append(usage_event())
        await conn.sse(*events, DONE)
        await conn.end()
        return
    message = {"role": "assistant", "content": "ab"}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    await conn.json({"id": "c", "choices": [{"index": 0, "message": message}], "usage": usage})


@dataclass
class Backend:
    """A scripted backend. `received` holds what reached the script."""

    script: Script = ok_chat
    models: list[str] = field(default_factory=lambda: ["m"])
    port: int = 0
    received: list[Received] = field(default_factory=list)
    open_connections: int = 0
    served: int = 0
    failures: list[BaseException] = field(default_factory=list)

    async def start(self) -> "Backend":
        self._tasks: set[asyncio.Task[None]] = set()
        self.conns: set[Conn] = set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        conn = Conn(reader, writer)
        self.open_connections += 1
        self.conns.add(conn)
        try:
            await self._serve(conn)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001 - the test asks for it
            self.failures.append(error)
        finally:
            self.open_connections -= 1
            self.conns.discard(conn)
            self._tasks.discard(task)
            conn.closed.set()
            await closed(writer)

    async def _serve(self, conn: Conn) -> None:
        while not conn.writer.is_closing():
            request = await read_request(conn.reader)
            if request is None or conn.writer.is_closing():
                return  # an engine runs nothing that it finds in its buffer after closing
            if not await self._builtin(conn, request):
                conn.requests += 1
                self.received.append(request)
                try:
                    await self.script(conn, request)
                finally:
                    self.served += 1

    async def _builtin(self, conn: Conn, request: Received) -> bool:
        if request.method != "GET" or request.target.startswith("/v1/responses"):
            return False
        if request.target == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "rig"} for name in self.models]
            await conn.json({"object": "list", "data": data})
        elif request.target == "/metrics":
            await conn.json(b"", 404)
        else:
            await conn.json({})
        return True


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines[1:] if line)]
    length = next((int(v) for k, v in headers if k.lower() == "content-length"), 0)
    body = await reader.readexactly(length)
    return Received(method, target, headers, body, head)


@dataclass
class Answer:
    """An answer as a client read it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    closed: bool

    def header(self, name: str) -> str | None:
        values = self.all(name)
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        return [v for k, v in self.headers if k.lower() == name.lower()]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Client:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        return Answer(status, [(k, v.strip()) for k, _, v in pairs], b"", closed=False)

    async def chunk(self) -> bytes:
        """Read one chunk's payload; b"" is the last."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def body(self, answer: Answer, *, to_head: bool = False) -> Answer:
        """Read the body by its framing."""
        if to_head or answer.status in (204, 304):
            return answer
        if (answer.header("transfer-encoding") or "").lower() == "chunked":
            parts = []
            while part := await self.chunk():
                parts.append(part)
            answer.body = b"".join(parts)
        elif (length := answer.header("content-length")) is not None:
            answer.body = await self.reader.readexactly(int(length))
        else:
            answer.body = await self.reader.read()
            answer.closed = True
        return answer

    async def answer(self, *, to_head: bool = False) -> Answer:
        return await self.body(await self.head(), to_head=to_head)

    async def at_eof(self) -> bool:
        return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(path: str, body: Any, *lines: str, host: str = "gw") -> bytes:
    """Return a request's bytes."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    extra = "".join(f"{line}\r\n" for line in lines)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}{extra}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    extra = "".join(f"{line}\r\n" for line in lines)
    return f"{method} {path} HTTP/1.1\r\nHost: gw\r\n{extra}\r\n".encode("latin-1")


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Rig:
    """A running gateway and its backends."""

    app: App
    backends: list[Backend]
    clients: list[Client] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.app.url.rsplit(":", 1)[1])

    @property
    def handler(self) -> Any:
        return self.app.handler

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))
        self.clients.append(client)
        return client

    def openai(self, *, retries: int = 0, key: str = "k") -> openai.AsyncOpenAI:
        """Return the real SDK's client; use it with `async with`."""
        return openai.AsyncOpenAI(
            base_url=f"{self.app.url}/v1", api_key=key, max_retries=retries, timeout=20
        )

    def anthropic(self, *, retries: int = 0, key: str = "k") -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.app.url, api_key=key, max_retries=retries, timeout=20
        )

    async def ask(self, data: bytes, *, to_head: bool = False) -> Answer:
        """Send bytes on a fresh connection, read one answer, close."""
        client = await self.connect()
        try:
            await client.send(data)
            return await client.answer(to_head=to_head)
        finally:
            self.clients.remove(client)
            await closed(client.writer)

    def metrics(self) -> str:
        return bytes(self.app.telemetry.render()).decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the matching samples of one series."""
        total = 0.0
        for line in self.metrics().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(
                f'{k}="{v}"' in series for k, v in labels.items()
            ):
                total += float(value)
        return total

    def outcomes(self) -> dict[str, int]:
        """Return how many requests ended how."""
        found: dict[str, int] = {}
        for line in self.metrics().splitlines():
            series, _, value = line.rpartition(" ")
            match = re.fullmatch(r'gateway_requests_total\{.*outcome="(\w+)".*', series)
            if match is not None and float(value):
                found[match[1]] = found.get(match[1], 0) + int(float(value))
        return found

    async def settled(self) -> None:
        """Wait until no request is in progress."""
        await eventually(lambda: not self.app.handler.live)

    async def at_rest(self) -> None:
        """Wait until everything a request takes has been given back."""
        await self.settled()
        for name in ("gateway_inflight_requests", "gateway_inflight_prefill_tokens"):
            assert self.metric(name) == 0, name
        await eventually(lambda: not self._connecting())
        await eventually(lambda: all(self._busy(u.pool) == 0 for u in self.app._upstreams.all()))

    @staticmethod
    def _busy(pool: Any) -> int:
        return len(pool._open) - len(pool._idle)

    @staticmethod
    def _connecting() -> list[str]:
        names = (task.get_name() for task in asyncio.all_tasks())
        return [name for name in names if name.startswith("connect ")]


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close and wait for it, so that no transport outlives its test."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.contextmanager
def black_hole(rig: "Rig", index: int = 0) -> Iterator[None]:
    """Point a backend's pool at an address that never answers a SYN: its backlog is full."""
    with socket.socket() as hole, contextlib.ExitStack() as fillers:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        pool = rig.app._upstreams.all()[index].pool
        origin = pool.origin
        pool.origin = replace(origin, port=hole.getsockname()[1])
        try:
            yield
        finally:
            pool.origin = origin


class Clock:
    """The loop's clock, which a test can move forward: every part of the gateway reads it."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


class Still(Clock):
    """A clock that stands still but for `skip`: no delay is over before a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._began = asyncio.get_running_loop().time()

    def __call__(self) -> float:
        return self._began + self._ahead


async def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for a condition; fail if it does not come true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions are plain state, nobody signals them
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def gateway(
    backends: list[Backend], settings: tuple[str, ...], file: str | None, clock: Clock | None
) -> AsyncIterator[Rig]:
    """Run a gateway in front of running backends."""
    urls = tuple(backend.url for backend in backends)
    overrides = ("listen.port=0", "admin.port=0", "poll.interval_s=0.05", *settings)
    source = Source(file, urls, overrides)
    app = App(source, source.load())
    if clock is not None:
        app._clock = clock
    await app.start()
    rig = Rig(app, backends)
    try:
        yield rig
    finally:
        for client in rig.clients:
            await closed(client.writer)
        for exchange in list(app.handler.live):
            exchange.shut_down()
        await app.stop()


@contextlib.asynccontextmanager
async def running(
    *scripts: Script,
    settings: tuple[str, ...] = (),
    file: str | None = None,
    models: Any = None,
    clock: Clock | None = None,
    within_s: float = _TEST_S,
) -> AsyncIterator[Rig]:
    """Run a gateway in front of one scripted backend per script."""
    backends = [await Backend(script).start() for script in scripts or (ok_chat,)]
    for backend, names in zip(backends, models or [], strict=False):
        backend.models = names
    try:
        async with gateway(backends, settings, file, clock) as rig, asyncio.timeout(within_s):
            yield rig
    finally:
        for backend in backends:
            await backend.stop()
    failures = [failure for backend in backends for failure in backend.failures]
    assert not failures, failures
