"""What the simulator's socket tests share: a live replica, and raw HTTP exchanges with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from gateway.sim.http import listen
from gateway.sim.profiles import DEMO, Profile
from gateway.sim.replica import Replica

TINY = replace(DEMO, name="tiny", max_model_len=8192, block_tokens=32)


@dataclass
class Live:
    replica: Replica
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def live_replica(
    *,
    profile: Profile = TINY,
    time_scale: float = 0.01,
    stream_interval: int = 1,
    started_at: float = 1.0,
) -> AsyncIterator[Live]:
    replica = Replica(
        profile,
        model="tiny",
        started_at=started_at,
        time_scale=time_scale,
        stream_interval=stream_interval,
    )
    runner, port = await listen(replica)
    try:
        yield Live(replica, port)
    finally:
        replica.close()
        await runner.cleanup()


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def events(self) -> list[bytes]:
        return [event for event in self.body.split(b"\n\n") if event]


async def exchange(port: int, request: bytes) -> RawAnswer:
    """Send raw bytes with `Connection: close`; return the parsed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    raw = await reader.read()
    writer.close()
    await writer.wait_closed()
    return parse_answer(raw)


def parse_answer(raw: bytes) -> RawAnswer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    pairs = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunk(body)
    return RawAnswer(int(status.split()[1]), headers, body)


def unchunk(body: bytes) -> bytes:
    out: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(out)
        out.append(body[:length])
        body = body[length + 2 :]


def shape(value: Any) -> Any:
    """Return keys in order and kinds of values, nothing that may differ between two runs."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__
