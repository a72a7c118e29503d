"""The load generator against one live replica, and against servers that misbehave."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.sim.client import LoadClient
from gateway.sim.profiles import DEMO
from gateway.sim.report import Result
from gateway.sim.workload import ChatShape, Session, Turn, chat
from tests.integration.rig import eventually
from tests.integration.sim_rig import live_replica

SCALE = 0.02
CUT_S = 50.0  # a second here: the first token comes before, the last of 9000 long after
ONE = Session("s", "chat", 0.0, "be brief " * 40, (), (Turn("hello " * 20, 30, 0.0),) * 3)
Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def test_turns_follow_each_other_and_the_later_ones_hit() -> None:
    async with live_replica(profile=DEMO, time_scale=SCALE) as live:
        client = LoadClient(live.url, "tiny", SCALE)
        await client.run([ONE], 60.0)

    assert [r.result for r in client.records] == [Result.OK] * 3
    first, second, third = client.records
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens + 30 - 2 * DEMO.block_tokens
    assert third.cached_tokens > second.cached_tokens
    assert {r.completion_tokens for r in client.records} == {30}
    assert second.sent_at >= first.sent_at + (first.total_s or 0.0)


async def test_many_sessions_measure_what_the_engine_took() -> None:
    ticks: list[int] = []
    async with live_replica(profile=DEMO, time_scale=SCALE) as live:
        client = LoadClient(live.url, "tiny", SCALE)
        sessions = chat(ChatShape(rate=2.0).scaled(8), 20.0, 1)
        await client.run(sessions, 100.0, each_s=0.1, tick=lambda: ticks.append(1))
        engine = live.replica.engine

        done = [r for r in client.records if r.result is Result.OK]
        assert len(done) > 10
        assert all(r.ttft_s is not None and r.ttft_s >= DEMO.engine.step_s for r in done)
        assert sum(r.cached_tokens for r in done) <= engine.prompt_tokens_cached
        await eventually(lambda: engine.running + engine.waiting == 0)  # what was cut is aborted
    assert ticks
    assert client.lag_s() >= 0.0


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\nretry-after: 1\r\n\r\n{}")


async def fail(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}")


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def truncate(writer: asyncio.StreamWriter) -> None:
    event = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(event) + event)


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (refuse, Result.REFUSED),
        (fail, Result.FAILED),
        (hang_up, Result.FAILED),
        (truncate, Result.FAILED),
    ],
)
async def test_an_unanswered_turn_ends_its_conversation(reply: Reply, result: Result) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reply(writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        client = LoadClient(f"http://127.0.0.1:{port}", "tiny", SCALE)
        await client.run([ONE], 60.0)

    assert [r.result for r in client.records] == [result]


async def test_what_still_runs_at_the_end_is_cut_and_aborted() -> None:
    async with live_replica(profile=DEMO, time_scale=SCALE) as live:
        client = LoadClient(live.url, "tiny", SCALE)
        await client.run([Session("s", "chat", 0.0, "x", (), (Turn("go", 9000, 0.0),))], CUT_S)

    assert [r.result for r in client.records] == [Result.CUT]
    assert client.records[0].ttft_s is not None
    cut_at = client.records[0].sent_at + client.records[0].waited_s
    assert cut_at > CUT_S - 0.1  # not before; that it was cut shows that its end was not waited for
