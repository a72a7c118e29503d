"""D09 and D14: whatever happens to 2,000 requests nothing is left; a slow reader costs no memory."""

import asyncio
import contextlib
import gc
import random
import resource
from pathlib import Path

import orjson
import pytest

from gateway.config.schema import TimeoutsConfig
from gateway.edge.client import ClientConnection
from gateway.relay.connection import UpstreamConnection
from tests.integration.rig import (
    DONE,
    Client,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    eventually,
    ok_chat,
    post,
    running,
    usage_event,
)

REQUESTS = 2000
AT_ONCE = 40
BACKEND_ENDS = (
    "ok", "ok", "ok", "json", "error", "reset at once", "close at once", "reset after head",
    "reset in event", "reset after event", "reset in chunk", "close in stream", "no terminal",
    "garbage", "silent", "silent in stream", "close after",
)  # fmt: skip
CLIENT_ENDS = (
    "read", "read", "read", "read", "pause", "leave at once", "leave in head", "leave in body",
    "leave before head", "leave after head", "leave after event", "reset after event",
    "half-close",
)  # fmt: skip


async def faulty(conn: Conn, request: Received) -> None:
    """Do what the request's text says."""
    how = orjson.loads(request.body)["messages"][0]["content"].partition("|")[0]
    match how:
        case "ok" | "close after":
            await ok_chat(conn, request)
            if how == "close after":
                conn.writer.close()
        case "json":
            await conn.json({"usage": {"prompt_tokens": 3, "completion_tokens": 1}})
        case "error":
            await conn.json({"error": {"message": "no"}}, 500)
        case "reset at once":
            conn.reset()
        case "close at once":
            conn.writer.close()
        case "garbage":
            await conn.write(b"SSH-2.0-x\r\n")
            await conn.gone()
        case "silent":
            await conn.gone()
        case _:
            await in_stream(conn, how)


async def in_stream(conn: Conn, how: str) -> None:
    await conn.sse()
    if how == "reset after head":
        conn.reset()
        return
    await conn.chunk(chat_event("x" * 2000))
    match how:
        case "reset in event":
            await conn.chunk(b'data: {"half')
            conn.reset()
        case "reset after event":
            conn.reset()
        case "reset in chunk":
            await conn.write(b"40\r\ndata: ")
            conn.reset()
        case "close in stream":
            conn.writer.close()
        case "no terminal":
            await conn.end()
        case _:
            await conn.gone()


async def one(rig: Rig, number: int, rng: random.Random) -> None:
    """Make one request and end it in some way."""
    backend, ending = rng.choice(BACKEND_ENDS), rng.choice(CLIENT_ENDS)
    stream = rng.random() < 0.7 or backend not in ("ok", "json")
    request = post("/v1/chat/completions", chat(f"{backend}|{number}", stream=stream))
    client = await rig.connect()
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await converse(client, request, ending, rng)
    if ending.startswith("reset"):
        client.reset()
    elif ending == "half-close":
        client.writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await client.reader.read()
    client.close()
    rig.clients.remove(client)


async def converse(client: Client, request: bytes, ending: str, rng: random.Random) -> None:
    if ending == "leave in head":
        await client.send(request[: rng.randrange(1, 60)])
        return
    if ending == "leave in body":
        await client.send(request[: rng.randrange(len(request) - 20, len(request))])
        return
    await client.send(request)
    if ending in ("leave at once", "half-close"):
        return
    if ending == "leave before head":
        await asyncio.sleep(rng.random() * 0.005)
        return
    if ending == "pause":
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    head = await client.head()
    if ending == "leave after head":
        return
    if ending.endswith("after event") and head.header("transfer-encoding"):
        await client.chunk()
        return
    await client.body(head)


async def test_d09_after_2000_random_endings_everything_has_been_given_back() -> None:
    settings = ("timeouts.first_byte_s=0.3", "timeouts.idle_s=0.3", "poll.interval_s=1")
    rng = random.Random(20261130)
    async with running(faulty, faulty, faulty, settings=settings, within_s=100) as rig:
        before = {task.get_name() for task in asyncio.all_tasks()}
        earlier = _connections()  # of other tests, held so that none of ours gets their ids
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(number: int) -> None:
            async with turns:
                await one(rig, number, rng)

        await asyncio.gather(*(in_turn(number) for number in range(REQUESTS)))
        await rig.at_rest()
        await eventually(lambda: not rig.app._listener.connections)

        ended = rig.outcomes()
        assert not ended.keys() & {"internal_error", "expired"}
        assert {"ok", "client_closed", "upstream_error", "upstream_truncated", "upstream_timeout",
                "upstream_5xx"} <= ended.keys()  # fmt: skip
        assert not [n for n in _new_tasks(before) if n.startswith("connect")]
        for backend in rig.app.dispatcher.backends(rig.handler.clock()):
            assert (backend.in_flight, backend.in_flight_prefill_tokens) == (0, 0)
            assert backend.owed_prefill_s == pytest.approx(0, abs=1e-9)
            assert backend.context_tokens == 0
        await still_serves_evenly(rig)
        pools = [upstream.pool for upstream in rig.app._upstreams.all()]
        for pool in pools:
            pool.abort()
        await eventually(lambda: not any(pool.open_connections for pool in pools))
        await eventually(lambda: not _made_since(earlier))


async def still_serves_evenly(rig: Rig) -> None:
    """Claim that no backend is believed busy for what has ended."""
    rig.handler.timeouts = TimeoutsConfig()  # the short ones were for backends that say nothing
    for backend in rig.backends:
        backend.script = ok_chat
        backend.received.clear()
    for upstream in rig.app.dispatcher.backends(rig.handler.clock()):
        rig.app.dispatcher.set_up(upstream.name, True, rig.handler.clock())
    answers = await asyncio.gather(
        *(rig.ask(post("/v1/chat/completions", chat(f"even{n}"))) for n in range(30))
    )
    assert {answer.status for answer in answers} == {200}


def _new_tasks(before: set[str]) -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name() not in before]


def _connections() -> list[UpstreamConnection]:
    gc.collect()
    # by type: isinstance asks a weak proxy for its class, and a dead one of another test raises
    return [thing for thing in gc.get_objects() if type(thing) is UpstreamConnection]


def _made_since(earlier: list[UpstreamConnection]) -> int:
    known = {id(thing) for thing in earlier}
    return sum(id(thing) not in known for thing in _connections())


async def test_d09_a_fault_in_the_books_costs_no_client_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(type(rig.app.dispatcher), "finish", broken)
        client = await rig.connect()
        for stream in (False, True):
            await client.send(post("/v1/chat/completions", chat(stream=stream)))
            assert (await client.answer()).status == 200
        await rig.settled()
    assert "ZeroDivisionError" in caplog.text


# --- D14


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


OFFERED = 200 << 20
PIECE = chat_event("x" * (64 << 10))


@pytest.mark.parametrize("inject", ["true", "false"])
async def test_d14_a_reader_that_stops_holds_the_backend_and_costs_no_memory(inject: str) -> None:
    offered = 0

    async def script(conn: Conn, _: Received) -> None:
        nonlocal offered
        await conn.sse()
        while offered < OFFERED:
            await conn.chunk(PIECE)
            offered += len(PIECE)
        await conn.chunk(usage_event() + DONE)
        await conn.end()

    async with running(script, settings=(f"streams.inject_usage={inject}",)) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        gc.collect()
        before = resident()
        await client.send(post("/v1/chat/completions", chat(stream=True)))
        await eventually(lambda: any(e._relay and e._relay.paused_at for e in rig.handler.live))
        await backend_stands_still(lambda: offered)
        assert offered < 32 << 20
        assert resident() - before < 32 << 20

        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        received, part = 0, b""
        while b"[DONE]" not in part[-64:]:
            part = await client.reader.read(1 << 20)
            received += len(part)
        assert offered >= OFFERED
        assert received >= OFFERED
        assert resident() - before < 48 << 20
        await rig.at_rest()
        assert rig.outcomes() == {"ok": 1}
        client.close()


async def backend_stands_still(offered: object) -> None:
    """Wait until the backend cannot write any more."""
    assert callable(offered)
    last = -1
    while last != offered():
        last = offered()
        await asyncio.sleep(0.1)


async def test_d14_a_reader_that_never_reads_again_is_let_go() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse()
        while True:
            await conn.chunk(PIECE)

    async with running(script, settings=("timeouts.idle_s=0.3",)) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post("/v1/chat/completions", chat(stream=True)))
        await eventually(lambda: rig.backends[0].served == 1)
        await rig.at_rest()
        assert rig.outcomes() == {"client_closed": 1}
        await eventually(lambda: not rig.app._listener.connections)


async def test_a_fault_at_one_deadline_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(settings=("timeouts.header_s=0.1",)) as rig:
        expired = ClientConnection.expired
        faults = 1

        def once_broken(self: ClientConnection, now: float) -> None:
            nonlocal faults
            if faults:
                faults -= 1
                raise ZeroDivisionError
            expired(self, now)

        monkeypatch.setattr(ClientConnection, "expired", once_broken)
        clients = [await rig.connect() for _ in range(3)]
        assert all([await client.at_eof() for client in clients])
