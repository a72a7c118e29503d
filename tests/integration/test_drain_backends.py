"""`POST /backends/{name}/drain` over sockets: what runs there ends there, nothing new begins."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.rig import (
    DONE,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    eventually,
    post,
    running,
)

CHAT = "/v1/chat/completions"
PLAIN = post(CHAT, chat())
STREAM = post(CHAT, chat(stream=True))


async def admin(rig: Rig, method: str, path: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, rig.app.admin_url + path) as answer,
    ):
        return answer.status, await answer.json()


async def draining(rig: Rig) -> dict[str, bool]:
    _, status = await admin(rig, "GET", "/status")
    return {row["name"]: row["draining"] for model in status["models"] for row in model["backends"]}


async def test_a_drained_backend_ends_what_it_has_and_begins_nothing_until_undrained() -> None:
    gate = asyncio.Event()

    async def script(conn: Conn, request: Received) -> None:
        if b'"stream":true' not in request.body:
            await conn.json({"choices": []})
            return
        await conn.sse(chat_event("a"))
        await gate.wait()
        await conn.chunk(DONE)
        await conn.end()

    async with running(script, script, settings=("routing.policy=round_robin",)) as rig:
        stream = await rig.connect()
        await stream.send(STREAM)
        home = (await stream.head()).header("x-gateway-backend")
        status, said = await admin(rig, "POST", f"/backends/{home}/drain")
        assert (status, said["draining"], said["in_flight"]) == (200, True, 1)
        seen = {(await rig.ask(PLAIN)).header("x-gateway-backend") for _ in range(6)}
        assert seen == {"backend-1", "backend-2"} - {home}
        gate.set()
        parts = [await stream.chunk()]
        while parts[-1]:
            parts.append(await stream.chunk())
        assert DONE in parts
        assert (await admin(rig, "POST", f"/backends/{home}/undrain"))[1]["draining"] is False
        seen = {(await rig.ask(PLAIN)).header("x-gateway-backend") for _ in range(6)}
        assert seen == {"backend-1", "backend-2"}


async def test_a_drain_is_the_operators_wish_and_outlives_reloads_and_health(
    tmp_path: Path,
) -> None:
    async with running() as one, running() as two:
        file = tmp_path / "g.yaml"
        rows = [f"{{name: {n}, url: '{r.backends[0].url}'}}" for n, r in (("a", one), ("b", two))]
        file.write_text(f"models: [{{name: m, backends: [{', '.join(rows)}]}}]\n")
        async with running(file=str(file), models=[["unasked"]]) as rig:
            assert (await admin(rig, "POST", "/backends/a/drain"))[0] == 200
            file.write_text(file.read_text() + "routing: {policy: round_robin}\n")
            assert (await admin(rig, "POST", "/reload"))[0] == 200
            assert rig.app.dispatcher.policy == "round_robin"
            assert (await draining(rig)).items() >= {"a": True, "b": False}.items()
            rig.app.dispatcher.set_up("a", False, 0.0)
            rig.app.dispatcher.set_up("a", True, 0.0)
            assert (await draining(rig)).items() >= {"a": True, "b": False}.items()
            seen = {(await rig.ask(PLAIN)).header("x-gateway-backend") for _ in range(4)}
            assert seen == {"b"}


async def test_with_every_backend_drained_requests_wait_for_the_first_that_comes_back() -> None:
    async with running() as rig:
        assert (await admin(rig, "POST", "/backends/backend-1/drain"))[0] == 200
        client = await rig.connect()
        await client.send(PLAIN)
        await eventually(
            lambda: any(e.ticket is not None and e.ticket.held for e in rig.handler.live)
        )
        assert (await admin(rig, "POST", "/backends/backend-1/undrain"))[0] == 200
        assert (await client.answer()).status == 200
        await rig.at_rest()


async def test_an_unknown_backend_is_a_404() -> None:
    async with running() as rig:
        for action in ("drain", "undrain"):
            status, said = await admin(rig, "POST", f"/backends/nobody/{action}")
            assert (status, said["error"]["code"]) == (404, "not_found")
            assert "there are: backend-1" in str(said)
