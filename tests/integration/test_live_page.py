"""The live page's events: who looks shares one rendering, nobody looking costs nothing."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import orjson
import pytest
from aiohttp import ClientResponse, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from gateway.edge.admin import _answer_errors
from gateway.edge.live import Hub
from gateway.edge.live_page import LivePage, policy_of
from tests.integration.rig import (
    Conn,
    Received,
    chat,
    chat_event,
    eventually,
    ok_chat,
    post,
    running,
)

_WAIT_S = 60.0
_NEVER_S = 3600.0
Client = TestClient[Any, Any]


class Show:
    """Something to look at: frames of a size, numbered, and what happened to it."""

    def __init__(self, size: int = 0) -> None:
        self.filling = b"x" * size
        self.frames = 0
        self.histories = 0
        self.is_open = False
        self.broken = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def render(self) -> bytes:
        if self.broken:
            raise RuntimeError("cannot be rendered")
        self.frames += 1
        return b'{"n":%d,"filling":"%b"}' % (self.frames, self.filling)

    def history(self) -> bytes:
        self.histories += 1
        return b'{"upto":%d}' % self.frames


async def next_event(answer: ClientResponse) -> tuple[str, Any]:
    """Read one event."""
    async with asyncio.timeout(_WAIT_S):
        kind = (await answer.content.readline()).removeprefix(b"event: ").strip().decode()
        data = orjson.loads((await answer.content.readline()).removeprefix(b"data: "))
        assert await answer.content.readline() == b"\n"
    return kind, data


async def next_tick(answer: ClientResponse) -> Any:
    while True:
        kind, data = await next_event(answer)
        if kind == "tick":
            return data


@asynccontextmanager
async def showing(hub: Hub) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_get("/events", hub.events, allow_head=False)
    app.on_shutdown.append(hub.close)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_all_who_look_share_one_rendering_per_tick() -> None:
    show = Show()
    hub = Hub(show, tick_s=_NEVER_S)
    async with showing(hub) as client:
        views = [await client.get("/events") for _ in range(5)]
        for view in views:
            assert await next_event(view) == ("history", {"upto": 1})
            assert (await next_event(view))[1]["n"] == 1
        hub.tick()
        for view in views:
            assert (await next_event(view))[1]["n"] == 2
        assert (show.frames, show.histories, hub.rendered) == (2, 1, 2)


async def test_events_are_a_stream_that_nothing_keeps() -> None:
    hub = Hub(Show(), tick_s=_NEVER_S)
    async with showing(hub) as client:
        view = await client.get("/events")
        assert view.content_type == "text/event-stream"
        assert view.headers["cache-control"] == "no-store"
        assert view.headers["x-accel-buffering"] == "no"


async def test_ticks_come_by_themselves() -> None:
    hub = Hub(Show(), tick_s=0.01)
    async with showing(hub) as client:
        view = await client.get("/events")
        first = await next_tick(view)
        assert (await next_tick(view))["n"] > first["n"]


async def test_nobody_looks_and_nothing_is_computed() -> None:
    show = Show()
    hub = Hub(show, tick_s=0.01)
    async with showing(hub) as client:
        assert (show.is_open, hub.viewers, _tickers()) == (False, 0, 0)
        view = await client.get("/events")
        await next_tick(view)
        assert (show.is_open, hub.viewers, _tickers()) == (True, 1, 1)
        view.close()
        await eventually(lambda: not hub.viewers, _WAIT_S)
        assert not show.is_open
        await eventually(lambda: not _tickers(), _WAIT_S)


def _tickers() -> int:
    return sum(task.get_name() == "live page" for task in asyncio.all_tasks())


async def test_one_viewer_too_many_is_told_when_to_come_back() -> None:
    hub = Hub(Show(), tick_s=0.01, most=2)
    async with _with_errors(hub) as client:
        views = [await client.get("/events") for _ in range(2)]
        refused = await client.get("/events")
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        views[0].close()
        await eventually(lambda: hub.viewers < 2, _WAIT_S)
        assert (await client.get("/events")).status == 200


@asynccontextmanager
async def _with_errors(hub: Hub) -> AsyncIterator[Client]:
    """Answer refusals as the admin listener does."""
    app = web.Application(middlewares=[_answer_errors])
    app.router.add_get("/events", hub.events, allow_head=False)
    app.on_shutdown.append(hub.close)
    async with TestClient(TestServer(app)) as client:
        yield client


async def _stalled(client: Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for the events and read nothing: the window is one frame small."""
    server = client.server
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_a_viewer_that_reads_slowly_skips_ticks_and_holds_up_nobody() -> None:
    ticks = 60
    hub = Hub(Show(size=1_000_000), tick_s=_NEVER_S, stall_s=_NEVER_S)
    async with showing(hub) as client:
        slow_reader, slow_writer = await _stalled(client)
        quick = await client.get("/events", read_bufsize=1 << 22)
        assert (await next_tick(quick))["n"] == 1
        for number in range(2, ticks + 1):
            hub.tick()
            assert (await next_tick(quick))["n"] == number
        assert hub.viewers == 2

        seen: list[int] = []
        text = b""
        async with asyncio.timeout(_WAIT_S):
            while not seen or seen[-1] < ticks:
                text += await slow_reader.read(1 << 20)
                seen = [int(found) for found in re.findall(rb'"n":(\d+)', text)]
        assert len(seen) < ticks // 2  # what did not fit was never kept for it
        assert text.count(b"event: history") >= 2  # once more after the gap
        slow_writer.close()


async def test_a_viewer_that_does_not_read_is_dropped() -> None:
    hub = Hub(Show(size=4_000_000), tick_s=0.01, stall_s=0.05)
    async with showing(hub) as client:
        _, writer = await _stalled(client)
        await eventually(lambda: not hub.viewers, _WAIT_S)
        writer.close()


async def test_a_fault_in_rendering_ends_the_views_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    show = Show()
    hub = Hub(show, tick_s=0.01)
    async with showing(hub) as client:
        view = await client.get("/events")
        await next_tick(view)
        show.broken = True
        async with asyncio.timeout(_WAIT_S):
            await view.content.read()  # to its end
        await eventually(lambda: not hub.viewers, _WAIT_S)
        assert "cannot be rendered" in caplog.text
        assert not show.is_open

        assert (await client.get("/events")).status == 500  # aiohttp's own, here
        assert hub.viewers == 0
        show.broken = False
        assert (await next_tick(await client.get("/events")))["n"] > 0


async def test_stopping_ends_every_view() -> None:
    hub = Hub(Show(), tick_s=_NEVER_S)
    async with showing(hub) as client:
        view = await client.get("/events")
        await next_tick(view)
        await hub.close()
        async with asyncio.timeout(_WAIT_S):
            assert await view.content.read() == b""
        await eventually(lambda: not hub.viewers, _WAIT_S)


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
)
async def test_another_sites_page_takes_no_place(site: str, status: int) -> None:
    hub = Hub(Show(), tick_s=_NEVER_S)
    async with _with_errors(hub) as client:
        answer = await client.get("/events", headers={"sec-fetch-site": site})
        assert answer.status == status
        assert hub.viewers == (status == 200)


def test_only_the_pages_own_script_and_style_may_run() -> None:
    html = LivePage().html
    policy = policy_of(html)
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        digest = base64.b64encode(sha256(inside).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(rb'\s(on\w+|style|src)="', html)  # would not run, or not load


# --- in a gateway


async def test_a_request_is_seen_on_its_way_and_ended() -> None:
    release = asyncio.Event()

    async def held(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await release.wait()
        await conn.chunk(b"data: [DONE]\n\n")
        await conn.end()

    async with running(held) as rig, ClientSession(rig.app.admin_url) as session:
        view = await session.get("/events")
        await next_tick(view)
        asking = asyncio.ensure_future(
            rig.ask(post("/v1/chat/completions", chat(stream=True), "x-request-id: seen-1"))
        )
        row = await _row(view, lambda row: row["running"])
        assert (row["id"], row["class"], row["outcome"]) == ("seen-1", "chat", None)
        release.set()
        await asking
        row = await _row(view, lambda row: not row["running"])
        assert (row["id"], row["outcome"], row["model"]) == ("seen-1", "ok", "m")
        assert row["ttft_s"] is not None
        told = await (await session.get("/decisions/seen-1")).json()
        assert told["winner"] == row["backend"]
        view.close()


async def _row(view: ClientResponse, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    while True:
        for row in (await next_tick(view))["requests"]:
            if wanted(row):
                found: dict[str, Any] = row
                return found


async def test_looking_changes_nothing_for_requests_and_leaves_nothing() -> None:
    async with running(ok_chat) as rig, ClientSession(rig.app.admin_url) as session:

        def watched() -> bool:
            return rig.app.telemetry.watcher is not None

        assert not watched()
        view = await session.get("/events")
        await next_tick(view)
        assert watched()
        answer = await rig.ask(post("/v1/chat/completions", chat()))
        assert answer.status == 200
        view.close()
        await eventually(lambda: not watched(), _WAIT_S)
        await eventually(lambda: not _tickers(), _WAIT_S)


async def test_a_gateway_that_stops_ends_the_views() -> None:
    async with ClientSession() as session:
        async with running(ok_chat) as rig:
            view = await session.get(f"{rig.app.admin_url}/events")
            await next_tick(view)
        async with asyncio.timeout(_WAIT_S):
            while await view.content.readany():
                pass


async def test_hostile_names_break_no_event() -> None:
    name = "</script><script>alert(1)</script>\n\nevent: tick\ndata: {}\n\n"
    async with (
        running(ok_chat, models=[[name]]) as rig,
        ClientSession(rig.app.admin_url) as session,
    ):
        view = await session.get("/events")
        tick = await next_tick(view)
        assert [row["models"] for row in tick["backends"]] == [[name]]
        assert (await next_tick(view))["backends"][0]["models"] == [name]
        view.close()


async def test_a_browser_is_asked_for_the_key_in_a_header_of_its_own() -> None:
    settings = (f"admin.sha256={sha256(b'rg-secret').hexdigest()}",)
    async with (
        running(ok_chat, settings=settings) as rig,
        ClientSession(rig.app.admin_url) as session,
    ):
        for path in ("/", "/events"):
            answer = await session.get(path)
            assert answer.status == 401
            challenges = answer.headers.getall("www-authenticate")
            assert [challenge.split()[0] for challenge in challenges] == ["Bearer", "Basic"]
        view = await session.get("/events", headers={"authorization": "Bearer rg-secret"})
        assert (await next_tick(view))["ready"]
        view.close()
