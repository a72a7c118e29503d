"""A live replica: SDK clients, aborts, keep-alive, many streams, the command itself."""

import asyncio
import re
import signal
import sys
import time

import aiohttp
import anthropic
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionMessageParam

from gateway.sim.http import KEEPALIVE_S
from tests.integration.sim_rig import Live, live_replica

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi " * 50}]


def sdk(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


async def settle(live: Live, *, running: int) -> None:
    """Wait until the engine holds `running` sequences; a wrong one ends in a timeout."""
    engine = live.replica.engine
    async with asyncio.timeout(60):
        while engine.running + engine.waiting != running:  # noqa: ASYNC110 - sans-io: no event
            await asyncio.sleep(0.001)


async def test_openai_sdk_streams_chat_with_usage() -> None:
    async with live_replica() as live, sdk(live) as client:
        text, usage = "", None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage

    assert len(text) == 80
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens) == (20, 45)


async def test_second_turn_reports_the_first_as_cached() -> None:
    async with live_replica() as live, sdk(live) as client:
        first = await client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=60,
        )
        turn: list[ChatCompletionMessageParam] = [
            *HI,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "go on"},
        ]
        second = await client.chat.completions.create(
            model="tiny",
            messages=turn,
            max_tokens=1,
        )
        page = await client.with_options(base_url=live.url).get("/metrics", cast_to=str)

    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 96  # of 45 + 60 tokens
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 96.0' in page


async def test_openai_sdk_reads_completions_responses_and_models() -> None:
    async with live_replica() as live, sdk(live) as client:
        listed = await client.models.list()
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], n=2)
        response = await client.responses.create(model="tiny", input="hi")
        events = [
            event.type
            async for event in await client.responses.create(
                model="tiny", input="hi", max_output_tokens=4, stream=True
            )
        ]
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="tiny", input="x")

    assert [model.id for model in listed.data] == ["tiny"]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert response.status == "completed"
    assert response.usage is not None
    assert len(response.output_text) == 4 * response.usage.output_tokens
    assert (events[0], events[-1]) == ("response.created", "response.completed")


async def test_anthropic_sdk_streams_and_counts() -> None:
    async with live_replica() as live:
        client = anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0)
        async with client:
            counted = await client.messages.count_tokens(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
            )
            async with client.messages.stream(
                model="tiny", max_tokens=7, messages=[{"role": "user", "content": "hi"}]
            ) as stream:
                final = await stream.get_final_message()

    assert counted.input_tokens == 8
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 7)


async def test_responses_are_not_kept_so_none_can_be_read_or_cancelled() -> None:
    async with live_replica() as live, sdk(live) as client:
        for call in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="'resp_x' not found"):
                await call("resp_x")


async def test_each_choice_of_a_stream_gets_its_tokens() -> None:
    async with live_replica() as live, sdk(live) as client:
        texts = {0: "", 1: ""}
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=12,
            n=2,
            stream=True,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""

    assert [len(text) for text in texts.values()] == [48, 48]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine_at_once(stream: bool) -> None:
    body = orjson.dumps({"model": "tiny", "messages": HI, "max_tokens": 4000, "stream": stream})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with live_replica(time_scale=1.0) as live:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(head.encode() + body)
        await settle(live, running=1)
        writer.close()
        await settle(live, running=0)

        assert live.replica.metrics.finished["abort"] == 1
        assert live.replica.engine.pool.free == live.replica.engine.pool.total
        assert live.replica.requests == 0


async def test_an_idle_connection_is_closed_after_five_seconds() -> None:
    async with live_replica() as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        before = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
        idle = time.monotonic() - before
        writer.close()
        await writer.wait_closed()

    assert rest == b""
    assert KEEPALIVE_S == 5.0
    assert idle > KEEPALIVE_S - 1.5  # its timer may round a second


async def test_a_full_queue_is_a_503_that_holds_nothing() -> None:
    async with live_replica(time_scale=1.0) as live, sdk(live) as client:
        live.replica.engine._max_waiting = 0
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(
                model="tiny",
                messages=HI,
            )

        assert refused.value.status_code == 503
        assert live.replica.requests == 0
        assert live.replica._sinks == {}


async def test_a_client_that_does_not_read_is_not_buffered_for() -> None:
    body = orjson.dumps({"model": "tiny", "messages": HI, "max_tokens": 8000, "stream": True})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    async with live_replica(time_scale=0.0001) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=1024)
        writer.write(head.encode() + body)
        await settle(live, running=1)
        await settle(live, running=0)
        received = len(await reader.read())
        writer.close()

    assert received > 32_000  # all the text came
    assert live.replica.metrics.finished["length"] == 1


async def test_200_streams_at_a_tenth_of_the_time_all_end_whole() -> None:
    async with live_replica(time_scale=0.1, stream_interval=4) as live:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def one(number: int) -> bytes:
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": f"{number} " * 20}],
                    "max_tokens": 50,
                    "stream": True,
                }
                async with http.post(f"{live.url}/v1/chat/completions", json=body) as response:
                    return await response.read()

            async with asyncio.timeout(60):
                bodies = await asyncio.gather(*(one(number) for number in range(200)))
        engine = live.replica.engine

        assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
        assert engine.generation_tokens == 200 * 50
        assert engine.pool.free == engine.pool.total
        assert live.replica._sinks == {}


async def test_the_command_serves_until_it_is_told_to_stop() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli.main", "replica", "--port", "0", "--count", "2"),
        *("--profile", "demo", "--model", "m", "--time-scale", "0.01"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(2)]
    urls = [match[0] for line in lines if (match := re.search(r"http://\S+", line))]
    async with aiohttp.ClientSession() as http:
        for url in urls:
            async with http.get(f"{url}/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "m"
    process.send_signal(signal.SIGTERM)

    assert len(set(urls)) == 2
    assert await process.wait() == 0
