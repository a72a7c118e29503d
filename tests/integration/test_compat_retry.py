"""Compatibility cases D16-D21: retries, the connection pool, timeouts, redirects."""

import asyncio

import openai
import orjson
import pytest

from gateway.relay import pool
from gateway.relay.connection import UpstreamConnection
from tests.integration.rig import (
    DONE,
    HEAD_JSON,
    Clock,
    Conn,
    Received,
    Rig,
    black_hole,
    chat,
    chat_event,
    eventually,
    get,
    ok_chat,
    post,
    running,
)

CHAT = post("/v1/chat/completions", chat())
STREAM = post("/v1/chat/completions", chat(stream=True))
UNPOLLED = (
    "poll.interval_s=60",
    "health.interval_s=60",
)  # what a backend does now is not yet known to the gateway


async def silent(conn: Conn, _: Received) -> None:
    await conn.gone()


def reached(rig: Rig) -> int:
    return sum(len(backend.received) for backend in rig.backends)


# --- D16


def test_d16_idle_sockets_are_closed_before_the_engine_does_it() -> None:
    assert pool.IDLE_S < 5.0  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE


async def closing_idle_sockets(
    monkeypatch: pytest.MonkeyPatch, ours_s: float, *, blind: bool
) -> tuple[list[int], list[int]]:
    """Ask 100 times, often just as the backend closes; return (statuses, who was run)."""
    monkeypatch.setattr(pool, "IDLE_S", ours_s)
    theirs_s = 0.05

    async def script(conn: Conn, request: Received) -> None:
        await ok_chat(conn, request)
        conn.close_after(theirs_s, blind=blind)

    async with running(script) as rig:
        statuses = []
        for number in range(100):
            answer = await rig.ask(post("/v1/chat/completions", chat(str(number))))
            statuses.append(answer.status)
            await asyncio.sleep(theirs_s * (0.98 + 0.04 * number / 100) if number % 4 == 0 else 0)
        texts = [orjson.loads(r.body)["messages"][0]["content"] for r in rig.backends[0].received]
        return statuses, [int(text) for text in texts]


async def test_d16_sockets_that_the_backend_closes_cost_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses, run = await closing_idle_sockets(monkeypatch, 0.03, blind=False)

    assert set(statuses) == {200}
    assert run == list(range(100))


async def test_d16_no_request_runs_twice_even_when_the_backend_closes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request its kernel took before the close may have run: it fails, it is not repeated."""
    statuses, run = await closing_idle_sockets(monkeypatch, 9.0, blind=True)

    assert run == sorted(set(run))
    assert [number for number, status in enumerate(statuses) if status == 200] == run


async def test_d16_a_pooled_socket_that_closed_unread_is_replaced_even_at_the_only_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The close is on its way while the request is written: none of it was read."""
    take = pool.Pool.take
    stale = 0

    async with running(settings=UNPOLLED) as rig:

        def take_and_shut(self: pool.Pool, now: float) -> UpstreamConnection | None:
            nonlocal stale
            connection = take(self, now)
            if connection is not None:
                stale += 1
                for conn in rig.backends[0].conns:
                    conn.shut()
            return connection

        monkeypatch.setattr(pool.Pool, "take", take_and_shut)
        for number in range(4):
            answer = await rig.ask(CHAT)
            assert answer.status == 200
            assert answer.header("x-gateway-attempts") == "1"
            assert len(rig.backends[0].received) == number + 1

        assert stale == 3
        assert rig.outcomes() == {"ok": 4}


# --- D17


# Taken in turn: the default policy draws lots on an idle fleet, and six draws can all go one way.
IN_TURN = (*UNPOLLED, "routing.policy=round_robin")


async def test_d17_a_refused_connection_goes_to_the_other_backend() -> None:
    async with running(ok_chat, ok_chat, settings=IN_TURN) as rig:
        await rig.backends[0].stop()
        answers = [await rig.ask(post("/v1/chat/completions", chat(f"n{n}"))) for n in range(6)]

        assert {answer.status for answer in answers} == {200}
        assert {answer.header("x-gateway-attempts") for answer in answers} == {"1", "2"}
        assert len(rig.backends[1].received) == 6
        assert rig.metric("gateway_upstream_attempts_total", result="connect_failed") >= 1


async def test_d17_a_black_hole_costs_the_connect_timeout_and_goes_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = (*IN_TURN, "timeouts.connect_s=60")
    async with running(ok_chat, ok_chat, settings=settings) as rig:
        hole = rig.app._upstreams.all()[0].pool
        connect = pool.Pool.connect

        async def sooner(self: pool.Pool, timeout_s: float) -> UpstreamConnection:
            """Wait less, but only for who never answers: a busy machine's other backend does."""
            assert timeout_s == 60
            return await connect(self, 0.1 if self is hole else timeout_s)

        monkeypatch.setattr(pool.Pool, "connect", sooner)
        with black_hole(rig, 0):
            answers = [await rig.ask(post("/v1/chat/completions", chat(f"n{n}"))) for n in range(6)]

        assert {answer.status for answer in answers} == {200}
        assert {answer.header("x-gateway-attempts") for answer in answers} == {"1", "2"}


async def test_d17_requests_elsewhere_are_not_held_up_by_a_black_hole() -> None:
    async with running(ok_chat, ok_chat, settings=IN_TURN) as rig:
        with black_hole(rig, 0):
            held = await rig.connect()
            free = await rig.connect()
            await held.send(CHAT)
            await free.send(CHAT)
            answered = [asyncio.ensure_future(client.head()) for client in (held, free)]
            done, _ = await asyncio.wait(answered, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().status for task in done} == {200}
            assert len(rig.handler.live) == 1
            for task in answered:
                task.cancel()
            await asyncio.gather(*answered, return_exceptions=True)


async def test_d17_when_no_backend_can_be_reached_the_answer_is_502() -> None:
    async with running(ok_chat, ok_chat, settings=UNPOLLED) as rig:
        for backend in rig.backends:
            await backend.stop()
        answer = await rig.ask(CHAT)

        assert (answer.status, answer.code) == (502, "upstream_error")
        assert answer.header("x-gateway-attempts") == "2"


# --- D18


async def test_d18_five_minutes_of_silence_are_legitimate_by_default() -> None:
    clock, go_on = Clock(), asyncio.Event()

    async def script(conn: Conn, request: Received) -> None:
        await go_on.wait()
        await ok_chat(conn, request)

    async with running(script, clock=clock) as rig:
        client = await rig.connect()
        await client.send(CHAT)
        await eventually(lambda: bool(rig.backends[0].received))
        for _ in range(2):
            clock.skip(295.0)
            await asyncio.sleep(0.15)  # more than a tick: the deadlines are looked at
        go_on.set()
        assert (await client.answer()).status == 200


async def test_d18_a_ten_minute_stream_with_minute_long_gaps_is_legitimate_by_default() -> None:
    clock, go_on = Clock(), asyncio.Semaphore(0)

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse()
        for number in range(4):
            await conn.chunk(chat_event(f"e{number}"))
            await go_on.acquire()
        await conn.chunk(DONE)
        await conn.end()

    async with running(script, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        for number in range(4):
            assert await client.chunk() == chat_event(f"e{number}")
            clock.skip(400.0)
            await asyncio.sleep(0.12)
            go_on.release()
        assert (await client.body(head)).body == DONE


async def test_d18_the_first_byte_limit_answers_504() -> None:
    clock = Clock()
    async with running(silent, clock=clock) as rig:
        client = await rig.connect()
        await client.send(CHAT)
        await eventually(lambda: bool(rig.backends[0].received))
        clock.skip(601.0)
        answer = await client.answer()
        await eventually(lambda: rig.backends[0].served == 1)

        assert (answer.status, answer.code) == (504, "upstream_timeout")
        assert answer.header("x-should-retry") == "false"
        assert "first_byte_s" in answer.json["error"]["message"]
        assert rig.outcomes() == {"upstream_timeout": 1}
        await rig.at_rest()


async def test_d18_the_idle_limit_holds_although_the_first_byte_limit_is_longer() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.gone()

    settings, clock = ("timeouts.first_byte_s=600", "timeouts.idle_s=300"), Clock()
    async with running(script, settings=settings, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        assert await client.chunk() == chat_event("a")
        clock.skip(301.0)
        answer = await client.body(head)
        client.close()
        await eventually(lambda: rig.backends[0].served == 1)

        assert b"timeouts.idle_s" in answer.body
        assert answer.body.endswith(DONE)
        assert rig.outcomes() == {"upstream_timeout": 1}


async def test_d18_the_total_limit_cuts_before_and_after_the_head() -> None:
    async def script(conn: Conn, request: Received) -> None:
        if orjson.loads(request.body).get("stream"):
            await conn.sse(chat_event("a"))
        await conn.gone()

    async with running(script, settings=("timeouts.total_s=0.2",)) as rig:
        early, late = await rig.ask(CHAT), await rig.ask(STREAM)

        assert (early.status, early.code) == (504, "upstream_timeout")
        assert b"total_s" in late.body
        assert rig.outcomes() == {"upstream_timeout": 2}


async def test_d18_the_total_limit_holds_while_connecting() -> None:
    settings = (*UNPOLLED, "timeouts.total_s=0.1", "timeouts.connect_s=60")
    async with running(settings=settings) as rig:
        with black_hole(rig):
            answer = await rig.ask(CHAT)
            await rig.at_rest()

        assert (answer.status, answer.code) == (504, "upstream_timeout")


# --- D19


async def test_d19_300_streams_reach_the_backend_at_once() -> None:
    go_on = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await go_on.wait()
        await conn.chunk(DONE)
        await conn.end()

    async with running(script) as rig:
        clients = [await rig.connect() for _ in range(300)]
        for client in clients:
            await client.send(STREAM)
        await eventually(lambda: len(rig.backends[0].received) == 300)
        go_on.set()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.body for answer in answers} == {chat_event("a") + DONE}


# --- D20


async def test_d20_a_503_of_the_backend_is_not_multiplied() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({"error": {"message": "busy"}}, 503, b"retry-after-ms: 1\r\n")

    async with running(script, script) as rig, rig.openai(retries=2) as sdk:
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(**chat())

        assert reached(rig) == 3  # the SDK's own three tries, each sent once
        assert caught.value.response.headers["x-gateway-attempts"] == "1"
        assert rig.metric("gateway_upstream_attempts_total", result="5xx") == 3


async def test_d20_attempts_are_bounded_and_never_repeat_a_backend() -> None:
    settings = (*UNPOLLED, "retries.attempts=8")
    async with running(ok_chat, ok_chat, ok_chat, settings=settings) as rig:
        for backend in rig.backends:
            await backend.stop()
        answer = await rig.ask(CHAT)

        assert answer.status == 502
        assert answer.header("x-gateway-attempts") == "3"
        assert rig.metric("gateway_upstream_attempts_total") == 3


# --- D21


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat/completions//"])
async def test_d21_a_trailing_slash_is_served_without_a_redirect(path: str) -> None:
    async with running() as rig:
        answer = await rig.ask(post(path, chat()))

        assert answer.status == 200
        assert rig.backends[0].received[0].target == "/v1/chat/completions"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_d21_a_redirect_of_the_backend_is_passed_back(status: int) -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({}, status, b"location: https://elsewhere.example/x\r\n")

    async with running(script) as rig:
        answer = await rig.ask(CHAT)

        assert answer.status == status
        assert answer.header("location") == "https://elsewhere.example/x"
        assert reached(rig) == 1


# --- the pool, beyond the numbered cases


async def test_bytes_after_an_answer_never_reach_another_request() -> None:
    async def script(conn: Conn, _: Received) -> None:
        whole = HEAD_JSON + b"content-length: 2\r\n\r\n"
        await conn.write(whole + b"{}" + whole + b"[]")

    async with running(script) as rig:
        for _ in range(3):
            assert (await rig.ask(CHAT)).body == b"{}"
        assert rig.outcomes() == {"ok": 3}


async def test_a_client_behind_with_one_answer_holds_the_backend_of_the_next() -> None:
    """Pipelined: the first answer fills the client's buffer, the second must not pile up."""
    written = 0

    async def script(conn: Conn, request: Received) -> None:
        nonlocal written
        if b"first" in request.body:
            await conn.json(b'"' + b"x" * (6 << 20) + b'"')
            return
        await conn.sse()
        while True:
            await conn.chunk(b"x" * 65536)
            written += 65536

    async with running(script, settings=("timeouts.idle_s=600",)) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post("/v1/chat/completions", chat("first")) + STREAM)
        await eventually(lambda: any(e._relay and e._relay.paused_at for e in rig.handler.live))
        assert written < 32 << 20
        client.reset()
        await rig.at_rest()


async def test_head_of_a_stored_response_has_no_body_and_does_not_wait_for_one() -> None:
    async def script(conn: Conn, request: Received) -> None:
        if request.method == "HEAD":
            await conn.write(HEAD_JSON + b"content-length: 999\r\n\r\n")
        else:
            await conn.json({"id": "resp_1", "object": "response", "status": "completed"})

    async with running(script) as rig:
        await rig.ask(post("/v1/responses", {"model": "m", "input": "i"}))
        client = await rig.connect()
        for _ in range(2):
            await client.send(get("/v1/responses/resp_1", method="HEAD"))
            answer = await client.answer(to_head=True)
            assert answer.status == 200
            assert answer.header("content-length") == "999"
        await client.send(get("/v1/responses/resp_1"))
        assert (await client.answer()).json["id"] == "resp_1"
