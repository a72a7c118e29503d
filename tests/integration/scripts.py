"""What scripted backends do and clients ask in tests of more than one file."""

import asyncio
from typing import Protocol

from tests.integration.rig import (
    DONE,
    Client,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    eventually,
    post,
)

CHAT = "/v1/chat/completions"
STREAM = post(CHAT, chat(stream=True))
PLAIN = post(CHAT, chat())


class Gateway(Protocol):
    """One in this process (`rig.Rig`) or in another (`serve_rig.Served`)."""

    async def connect(self) -> Client:
        """Return a new connection to its data listener."""


class Gate:
    """A backend script whose streams begin at once and end when told."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0

    async def __call__(self, conn: Conn, request: Received) -> None:
        if b'"stream":true' not in request.body:
            await conn.json({"choices": []})
            return
        self.begun += 1
        await conn.sse(chat_event("a"))
        await self.open.wait()
        await conn.chunk(chat_event("b"))
        await conn.chunk(DONE)
        await conn.end()


class Endless:
    """A backend script whose streams begin and go on until the gateway leaves, which is noted."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.gone()
        self.left.set()


async def streaming(gateway: Gateway) -> Client:
    """Return a client whose stream has begun."""
    client = await gateway.connect()
    await client.send(STREAM)
    assert (await client.head()).status == 200
    return client


async def finished(stream: Client) -> list[bytes]:
    """Read a stream's chunks to the last."""
    parts = [await stream.chunk()]
    while parts[-1]:
        parts.append(await stream.chunk())
    return parts


async def uploading(rig: Rig, sent: bytes) -> Client:
    """Return a client that the gateway has received a part of a request from."""
    client = await rig.connect()
    await client.send(sent)
    await eventually(lambda: bool(rig.app._listener.receiving()))
    return client


async def one_waits(rig: Rig) -> None:
    """Wait until a request is held at the gateway."""
    await eventually(lambda: any(e.ticket is not None and e.ticket.held for e in rig.handler.live))
