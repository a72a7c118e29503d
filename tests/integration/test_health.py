"""Failing, hanging, recovering backends over real sockets: D55, D56, D66, R25-R31."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.core.breaker import FIRST_DELAY_S, TRIP_AFTER
from tests.integration.rig import (
    Backend,
    Clock,
    Conn,
    Received,
    Rig,
    Script,
    Still,
    chat,
    chat_event,
    eventually,
    gateway,
    ok_chat,
    post,
    running,
)

CHAT = post("/v1/chat/completions", chat())
STREAM = post("/v1/chat/completions", chat(stream=True))
# One after the other, and whatever the backends do is first known from the requests themselves.
IN_TURN = ("poll.interval_s=60", "health.interval_s=60", "routing.policy=round_robin")
# Probed often, and with patience: on a busy machine no answer that comes is taken for none.
WATCHED = ("health.interval_s=0.05", "health.timeout_s=20", "poll.interval_s=60")
LONG_S = 60.0


class Moody(Backend):
    """A backend whose health route, model list and metrics hang while it is told to."""

    hung = False
    probes = 0

    async def _builtin(self, conn: Conn, request: Received) -> bool:
        self.probes += request.target == "/health"
        if self.hung and request.method == "GET":
            await conn.gone()
            return True
        return await super()._builtin(conn, request)


@asynccontextmanager
async def over(
    backends: Sequence[Backend], *settings: str, clock: Clock | None = None
) -> AsyncIterator[Rig]:
    """Run a gateway in front of backends of the test's own making."""
    for backend in backends:
        await backend.start()
    try:
        async with gateway([*backends], settings, None, clock) as rig, asyncio.timeout(60):
            yield rig
    finally:
        for backend in backends:
            await backend.stop()
    failures = [failure for backend in backends for failure in backend.failures]
    assert not failures, failures


def answering(status: int, extra: bytes = b"") -> Script:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({"error": {"message": "no"}}, status, extra)

    return script


async def cut(conn: Conn, _: Received) -> None:
    conn.reset()


async def silent(conn: Conn, _: Received) -> None:
    await conn.gone()


def counts(rig: Rig) -> list[int]:
    return [len(backend.received) for backend in rig.backends]


async def backend_status(rig: Rig) -> list[dict[str, Any]]:
    """Return each backend's row of `/status`, in order."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{rig.app.admin_url}/status") as answer,
    ):
        told = await answer.json()
    rows: list[dict[str, Any]] = told["models"][0]["backends"]
    return rows


async def breakers(rig: Rig) -> list[str]:
    return [row["breaker"] for row in await backend_status(rig)]


def hasten(rig: Rig, index: int) -> None:
    """Give up soon on one backend's probes: it will answer none."""
    member = rig.app._watch._members[rig.app._upstreams.all()[index].name]
    member.pace = replace(member.pace, probe_timeout_s=0.1, timeout_s=0.1)


def is_up(rig: Rig, index: int) -> bool:
    name = rig.app._upstreams.all()[index].name
    return rig.metric("gateway_backend_up", backend=name) == 1


# --- failing


async def test_r25_a_backend_that_always_fails_is_tried_three_times_and_then_left_out() -> None:
    async with running(answering(500), ok_chat, settings=IN_TURN, clock=Still()) as rig:
        answers = [await rig.ask(CHAT) for _ in range(30)]

        assert [answer.status for answer in answers].count(500) == TRIP_AFTER
        assert {answer.header("x-gateway-attempts") for answer in answers} == {"1"}
        assert counts(rig) == [TRIP_AFTER, 30 - TRIP_AFTER]
        assert await breakers(rig) == ["open", "closed"]


async def test_r25_one_that_fails_every_other_request_is_left_out_too() -> None:
    turn = 0

    async def every_other(conn: Conn, request: Received) -> None:
        nonlocal turn
        turn += 1
        await (ok_chat if turn % 2 else answering(503))(conn, request)

    async with running(every_other, ok_chat, settings=IN_TURN, clock=Still()) as rig:
        answers = [await rig.ask(CHAT) for _ in range(60)]

        assert [answer.status for answer in answers].count(503) == 10
        assert counts(rig) == [20, 40]
        assert await breakers(rig) == ["open", "closed"]
        assert (await backend_status(rig))[0]["breaker_opens"] == 1


async def test_r26_a_request_that_a_backend_had_read_is_sent_once() -> None:
    async with running(cut, cut, cut, settings=IN_TURN) as rig:
        answers = [await rig.ask(CHAT) for _ in range(10)]

        assert {(answer.status, answer.code) for answer in answers} == {(502, "upstream_error")}
        assert sum(counts(rig)) == 10
        assert rig.metric("gateway_upstream_attempts_total") == 10


async def test_r26_where_nobody_listens_two_are_tried_and_no_more() -> None:
    async with running(ok_chat, ok_chat, ok_chat, settings=IN_TURN) as rig:
        for backend in rig.backends:
            await backend.stop()
        answers = [await rig.ask(CHAT) for _ in range(2)]  # more, and breakers open: see below

        assert {answer.status for answer in answers} == {502}
        assert {answer.header("x-gateway-attempts") for answer in answers} == {"2"}
        assert rig.metric("gateway_upstream_attempts_total", result="connect_failed") == 4


async def test_r27_a_429_is_passed_on_with_its_header_and_tried_nowhere_else() -> None:
    busy = answering(429, b"retry-after: 7\r\n")
    async with running(busy, busy, settings=IN_TURN) as rig:
        answer = await rig.ask(CHAT)

        assert answer.status == 429
        assert answer.all("retry-after") == ["7"]
        assert answer.header("x-gateway-attempts") == "1"
        assert sum(counts(rig)) == 1
        assert await breakers(rig) == ["closed", "closed"]


async def test_r28_a_backend_that_answers_nothing_holds_only_its_own() -> None:
    clock = Still()
    async with running(silent, ok_chat, settings=IN_TURN, clock=clock) as rig:
        held = []
        for number in range(TRIP_AFTER):
            held.append(asyncio.ensure_future(rig.ask(CHAT)))
            await eventually(lambda n=number: len(rig.handler.live) == n + 1, LONG_S)  # type: ignore[misc]
            assert (await rig.ask(CHAT)).status == 200
        assert counts(rig) == [TRIP_AFTER, TRIP_AFTER]

        clock.skip(601.0)  # timeouts.first_byte_s
        late = await asyncio.gather(*held)
        after = [await rig.ask(CHAT) for _ in range(6)]

        assert {answer.status for answer in late} == {504}
        assert {answer.status for answer in after} == {200}
        assert counts(rig) == [TRIP_AFTER, TRIP_AFTER + 6]
        assert await breakers(rig) == ["open", "closed"]
        await rig.at_rest()


async def test_r28_a_backend_that_hangs_whole_is_taken_out_by_its_probes() -> None:
    hole, fine = Moody(silent), Backend()
    async with over([hole, fine], *WATCHED, "routing.policy=round_robin") as rig:
        hole.hung = True
        hasten(rig, 0)
        await eventually(lambda: not is_up(rig, 0), LONG_S)
        answers = [await rig.ask(CHAT) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert counts(rig) == [0, 6]

        hole.hung = False
        await eventually(lambda: is_up(rig, 0), LONG_S)


# --- neutral


async def test_d55_fifty_bad_requests_leave_a_backend_healthy() -> None:
    async with running(answering(400), settings=IN_TURN) as rig:
        answers = [await rig.ask(CHAT) for _ in range(50)]

        assert {answer.status for answer in answers} == {400}
        assert counts(rig) == [50]
        assert await breakers(rig) == ["closed"]
        assert is_up(rig, 0)
        assert (await backend_status(rig))[0]["breaker_opens"] == 0


async def test_r30_fifty_cancels_before_and_in_an_answer_leave_a_backend_healthy() -> None:
    async def half(conn: Conn, request: Received) -> None:
        if b'"stream":true' in request.body:
            await conn.sse(chat_event("a"))
        await conn.gone()

    async with running(half, settings=IN_TURN) as rig:
        for number in range(50):
            client = await rig.connect()
            await client.send(STREAM if number % 2 else CHAT)
            if number % 2:
                await client.head()
                await client.chunk()
            else:
                await eventually(lambda n=number: counts(rig) == [n + 1], LONG_S)  # type: ignore[misc]
            client.reset()
        await rig.at_rest()

        assert rig.outcomes() == {"client_closed": 50}
        assert await breakers(rig) == ["closed"]
        assert is_up(rig, 0)


async def test_r30_bad_requests_do_not_hide_that_all_others_fail() -> None:
    async def script(conn: Conn, request: Received) -> None:
        await answering(400 if b"bad" in request.body else 500)(conn, request)

    bad = post("/v1/chat/completions", chat("bad"))
    async with running(script, settings=IN_TURN, clock=Still()) as rig:
        for _ in range(10):
            await rig.ask(bad)
            await rig.ask(CHAT)

        assert await breakers(rig) == ["open"]


# --- back again


async def test_d56_a_backend_that_recovered_is_back_after_one_trial(
    caplog: pytest.LogCaptureFixture,
) -> None:
    well = False

    async def script(conn: Conn, request: Received) -> None:
        await (ok_chat if well else answering(500))(conn, request)

    clock = Still()
    caplog.set_level(logging.INFO, "radixgate.watch")
    async with running(script, ok_chat, settings=IN_TURN, clock=clock) as rig:
        while counts(rig)[0] < TRIP_AFTER:
            await rig.ask(CHAT)
        assert await breakers(rig) == ["open", "closed"]
        assert rig.metric("gateway_backend_breaker_state", backend="backend-1") == 2
        well = True

        assert [(await rig.ask(CHAT)).status for _ in range(4)] == [200] * 4
        assert counts(rig)[0] == TRIP_AFTER  # not before its time
        clock.skip(1.2 * FIRST_DELAY_S)
        assert await breakers(rig) == ["half_open", "closed"]
        assert rig.metric("gateway_backend_breaker_state", backend="backend-1") == 1
        assert [(await rig.ask(CHAT)).status for _ in range(4)] == [200] * 4

        assert counts(rig)[0] == TRIP_AFTER + 2
        assert await breakers(rig) == ["closed", "closed"]
        assert rig.metric("gateway_backend_breaker_state") == 0
    told = [text for text in caplog.messages if "breaker" in text]
    assert told == [
        "backend backend-1: breaker open: 3 failures in a row, the last: upstream_5xx",
        "backend backend-1: breaker half_open: a request is sent as a trial",
        "backend backend-1: breaker closed: it answered",
    ]


async def test_r31_only_one_request_is_the_trial_and_a_bad_one_waits_longer() -> None:
    async def slow_to_fail(conn: Conn, _: Received) -> None:
        await go_on.wait()
        await conn.json({}, 500)

    clock, go_on = Still(), asyncio.Event()
    async with running(answering(500), ok_chat, settings=IN_TURN, clock=clock) as rig:
        failing = rig.backends[0]
        while len(failing.received) < TRIP_AFTER:
            await rig.ask(CHAT)
        failing.script = slow_to_fail
        clock.skip(1.2 * FIRST_DELAY_S)
        pair = [asyncio.ensure_future(rig.ask(CHAT)) for _ in range(2)]  # one is the trial
        await eventually(lambda: len(failing.received) == TRIP_AFTER + 1, LONG_S)
        assert [(await rig.ask(CHAT)).status for _ in range(6)] == [200] * 6
        assert len(failing.received) == TRIP_AFTER + 1

        go_on.set()
        assert sorted(answer.status for answer in await asyncio.gather(*pair)) == [200, 500]
        assert await breakers(rig) == ["open", "closed"]
        clock.skip(1.2 * FIRST_DELAY_S)
        assert await breakers(rig) == ["open", "closed"]  # twice as long now
        clock.skip(1.2 * FIRST_DELAY_S)
        assert await breakers(rig) == ["half_open", "closed"]


async def test_r31_one_that_died_and_was_started_again_is_back_at_its_next_probe() -> None:
    settings = (*WATCHED, "routing.policy=round_robin")
    async with over([Backend(), Backend()], *settings) as rig:
        dead = rig.backends[0]
        await dead.stop()
        await eventually(lambda: not is_up(rig, 0), LONG_S)
        assert [(await rig.ask(CHAT)).status for _ in range(4)] == [200] * 4
        assert counts(rig) == [0, 4]

        await dead.start()
        await eventually(lambda: is_up(rig, 0), LONG_S)
        assert [(await rig.ask(CHAT)).status for _ in range(4)] == [200] * 4
        assert counts(rig) == [2, 6]
        assert [row["warming"] for row in await backend_status(rig)] == [True, False]


# --- busy


async def test_a_backend_that_streams_stays_although_its_health_route_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def stream(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await go_on.wait()
        await conn.chunk(b"data: [DONE]\n\n")
        await conn.end()

    clock, backend = Still(), Moody(stream)
    async with over([backend], *WATCHED, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        answer = await client.head()
        await client.chunk()
        backend.hung = True
        hasten(rig, 0)
        asked = backend.probes
        await eventually(lambda: backend.probes >= asked + 8, LONG_S)

        assert is_up(rig, 0)
        told = [text for text in caplog.messages if "answers no health check" in text]
        assert len(told) == 1
        go_on.set()
        assert (await client.body(answer)).body.endswith(b"[DONE]\n\n")
        await eventually(lambda: not is_up(rig, 0), LONG_S)  # nothing speaks for it any more


async def test_a_backend_whose_streams_have_gone_silent_is_taken_out() -> None:
    async def stall(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.gone()

    clock, backend = Still(), Moody(stall)
    async with over([backend], *WATCHED, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        await client.head()
        await client.chunk()
        backend.hung = True
        hasten(rig, 0)
        asked = backend.probes
        await eventually(lambda: backend.probes >= asked + 5, LONG_S)
        assert is_up(rig, 0)

        clock.skip(6.0)
        await eventually(lambda: not is_up(rig, 0), LONG_S)
        client.reset()
        await rig.at_rest()


# --- all down


async def test_all_down_requests_wait_and_are_served_when_one_is_back() -> None:
    settings = (*WATCHED, "classes.chat.max_wait_s=60")
    async with over([Backend(), Backend()], *settings) as rig:
        for backend in rig.backends:
            await backend.stop()
        await eventually(lambda: not is_up(rig, 0) and not is_up(rig, 1), LONG_S)
        waiting = [asyncio.ensure_future(rig.ask(CHAT)) for _ in range(8)]
        await eventually(lambda: rig.metric("gateway_queue_depth") == 8, LONG_S)

        await rig.backends[1].start()
        answers = await asyncio.gather(*waiting)

        assert {answer.status for answer in answers} == {200}
        assert counts(rig) == [0, 8]
        await rig.at_rest()


async def test_all_down_for_longer_than_the_class_waits_is_a_503_that_says_when() -> None:
    settings = (*WATCHED, "classes.chat.max_wait_s=0.2")
    async with over([Backend()], *settings) as rig:
        await rig.backends[0].stop()
        await eventually(lambda: not is_up(rig, 0), LONG_S)
        answer = await rig.ask(CHAT)

        assert (answer.status, answer.code) == (503, "no_backend")
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        assert 0 < int(answer.header("retry-after-ms") or 0) <= 60_000
        assert int(answer.header("x-gateway-queue-ms") or 200) >= 200
        assert rig.outcomes() == {"no_backend": 1}


async def test_a_breaker_that_opens_has_its_backend_probed_at_once() -> None:
    async with running(
        ok_chat, ok_chat, settings=IN_TURN
    ) as rig:  # the next probe is a minute away
        await rig.backends[0].stop()
        answers = [await rig.ask(CHAT) for _ in range(2 * TRIP_AFTER)]

        assert {answer.status for answer in answers} == {200}
        await eventually(lambda: rig.app.dispatcher._fleet.by_name["backend-1"].up is False, LONG_S)


# --- replaced


def config_of(path: Path, backends: Sequence[Backend]) -> str:
    rows = [{"name": f"b{backend.port}", "url": backend.url} for backend in backends]
    path.write_bytes(orjson.dumps({"models": [{"name": "m", "backends": rows}]}))  # JSON is YAML
    return str(path)


async def test_r29_a_rolling_update_under_load_costs_no_request(tmp_path: Path) -> None:
    old, new = [Backend(), Backend()], [Backend(), Backend()]
    for backend in (*old, *new):
        await backend.start()
    file, stop = config_of(tmp_path / "gateway.yaml", old), asyncio.Event()

    async def ask_on(rig: Rig) -> list[int]:
        client, statuses = await rig.connect(), []
        while not stop.is_set():
            await client.send(STREAM)
            statuses.append((await client.answer()).status)
        return statuses

    settings = ("health.interval_s=0.05", "health.timeout_s=20", "routing.policy=round_robin")
    try:
        async with gateway([], settings, file, None) as rig, asyncio.timeout(60):
            load = [asyncio.ensure_future(ask_on(rig)) for _ in range(6)]
            for step in ([old[1], new[0]], new):
                served = [len(backend.received) for backend in step]
                config_of(tmp_path / "gateway.yaml", step)
                assert (await rig.app.reload()).ok
                await eventually(
                    lambda step=step, served=served: all(  # type: ignore[misc]
                        len(b.received) > had + 10 for b, had in zip(step, served, strict=True)
                    ),
                    LONG_S,
                )
                if step is not new:
                    await eventually(lambda: old[0].served == len(old[0].received), LONG_S)
                    await old[0].stop()
            stop.set()
            statuses = [status for one in await asyncio.gather(*load) for status in one]

            assert set(statuses) == {200}
            assert rig.metric("gateway_backend_up") == 2
    finally:
        for backend in (*old, *new):
            await backend.stop()
    assert not [failure for backend in (*old, *new) for failure in backend.failures]


async def test_r29_an_added_backend_where_nobody_listens_yet_gets_nothing(tmp_path: Path) -> None:
    kept = socket.socket()  # the port refuses, and nobody else gets it meanwhile
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    there, late = await Backend().start(), Backend(port=kept.getsockname()[1])
    file = config_of(tmp_path / "gateway.yaml", [there])
    settings = ("health.interval_s=0.05", "health.timeout_s=20", "routing.policy=round_robin")
    try:
        async with gateway([], settings, file, None) as rig, asyncio.timeout(60):
            (watched,) = rig.app._watch._members.values()
            await eventually(lambda: watched.is_up, LONG_S)
            config_of(tmp_path / "gateway.yaml", [there, late])
            assert (await rig.app.reload()).ok
            answers = [await rig.ask(CHAT) for _ in range(10)]
            assert {answer.status for answer in answers} == {200}
            assert {answer.header("x-gateway-attempts") for answer in answers} == {"1"}

            await late.start()
            await eventually(lambda: is_up(rig, 1), LONG_S)
            assert [(await rig.ask(CHAT)).status for _ in range(4)] == [200] * 4
            assert len(late.received) == 2
            await late.stop()
    finally:
        kept.close()
        await there.stop()


# --- by our own counts


async def test_d66_a_burst_within_one_poll_period_is_spread_by_own_counts() -> None:
    go_on = asyncio.Event()

    async def held(conn: Conn, request: Received) -> None:
        await go_on.wait()
        await ok_chat(conn, request)

    settings = ("poll.interval_s=60", "routing.policy=power_of_two", "queue.enabled=false")
    async with running(held, held, settings=settings) as rig:
        asked = [asyncio.ensure_future(rig.ask(CHAT)) for _ in range(100)]
        await eventually(lambda: sum(counts(rig)) == 100, LONG_S)

        assert counts(rig) == [50, 50]  # of two, the lesser is always seen
        go_on.set()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
