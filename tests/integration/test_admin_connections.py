"""The admin listener's sockets are few, and whoever only holds them makes room for who asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.rig import Client, Rig, chat, closed, eventually, get, ok_chat, post, running

CHAT = "/v1/chat/completions"
MOST = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.edge.descriptors.ADMIN_MOST", MOST)


@asynccontextmanager
async def visitors() -> AsyncIterator[list[Client]]:
    made: list[Client] = []
    yield made
    for client in made:
        await closed(client.writer)


async def come(rig: Rig, made: list[Client], sends: bytes = b"") -> Client:
    """Connect to the admin listener, and be let in or not before this returns."""
    host, port = rig.app._admin_socket.getsockname()[:2]
    client = Client(*await asyncio.open_connection(host, port))
    made.append(client)
    if sends:
        await client.send(sends)
    return client


async def gone(client: Client) -> bool:
    try:
        return await asyncio.wait_for(client.reader.read(1), 60) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sends", [b"", b"GET /status HTTP/1.1\r\nhost: localh"])
async def test_whoever_holds_sockets_idle_makes_room_for_who_asks(sends: bytes) -> None:
    async with running(ok_chat) as rig, visitors() as made:
        held = [await come(rig, made, sends) for _ in range(3 * MOST)]
        asking = await come(rig, made, get("/healthz"))
        assert (await asking.answer()).status == 200
        for client in held[: 2 * MOST + 1]:  # those idle longest, and nobody else
            assert await gone(client)
        assert len(rig.app._admin._open) == MOST
        assert (await rig.ask(post(CHAT, chat()))).status == 200
        await held[-1].send(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" if not sends else b"ost\r\n\r\n"
        )
        assert (await held[-1].answer()).status == 200


async def test_a_request_in_progress_never_makes_room() -> None:
    part = post("/explain", chat())[:-5]  # its handler waits for the rest
    async with running(ok_chat) as rig, visitors() as made:
        busy = [await come(rig, made, part) for _ in range(MOST)]
        connections = rig.app._admin
        await eventually(lambda: not connections._idle, 20)
        assert await gone(await come(rig, made, get("/healthz")))
        for client in busy:
            await client.send(post("/explain", chat())[-5:])
            assert (await client.answer()).status == 200
        assert (await (await come(rig, made, get("/healthz"))).answer()).status == 200


async def test_views_leave_half_of_the_sockets_to_scrapers_and_shells() -> None:
    async with running(ok_chat) as rig, visitors() as made:
        views = [await come(rig, made, get("/events")) for _ in range(MOST // 2)]
        for view in views:
            assert (await view.head()).status == 200
        more = await come(rig, made, get("/events"))
        assert (await more.answer()).status == 503
        scraper = await come(rig, made, get("/metrics"))
        assert (await scraper.answer()).status == 200
