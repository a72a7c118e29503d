"""Turn 2 of a conversation, over sockets: what is predicted is what the engine reports, answer and all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest

from gateway.app import App
from gateway.source import Source
from tests.integration.sim_rig import TINY, live_replica

ROOMY = replace(TINY, block_tokens=16, engine=replace(TINY.engine, kv_tokens=64_000))
BLOCK_TOKENS = 64  # of the gateway: 256 bytes, four to a token of the simulated tokenizer
ANSWER_TOKENS = 300
QUESTION = "Tell me all you know of the matter at hand, in order. " * 40
AGAIN = "And what came after that? " * 20


class Turn(NamedTuple):
    predicted: int
    cached: int
    prompt: int
    answer: dict[str, Any]
    text: str


class Api(NamedTuple):
    path: str
    limit: str
    usage: tuple[str, str, str]


CHAT = Api("/v1/chat/completions", "max_tokens", ("prompt_tokens", "prompt_tokens_details", ""))
COMPLETIONS = Api("/v1/completions", "max_tokens", ("prompt_tokens", "prompt_tokens_details", ""))
MESSAGES = Api("/v1/messages", "max_tokens", ("input_tokens", "", "cache_read_input_tokens"))
RESPONSES = Api("/v1/responses", "max_output_tokens", ("input_tokens", "input_tokens_details", ""))


def body_of(api: Api, turns: list[str]) -> dict[str, Any]:
    """The request whose conversation is these texts, the user's and the assistant's in turn."""
    if api is COMPLETIONS:
        return {"prompt": "".join(turns)}
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"input" if api is RESPONSES else "messages": messages}


def text_of(api: Api, value: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if api is CHAT:
        return str(value["choices"][0]["message"]["content"])
    if api is COMPLETIONS:
        return str(value["choices"][0]["text"])
    if api is MESSAGES:
        return str(value["content"][0]["text"])
    return "".join(p["text"] for item in value["output"] for p in item.get("content") or ())


def delta_of(api: Api, event: dict[str, Any]) -> str:
    """The text that one event of a stream adds."""
    if api is CHAT:
        return "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
    if api is COMPLETIONS:
        return "".join(c["text"] for c in event.get("choices", ()))
    if api is MESSAGES:
        return str((event.get("delta") or {}).get("text", ""))
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


@asynccontextmanager
async def gateway(tmp_path: Path) -> AsyncIterator[tuple[App, aiohttp.ClientSession]]:
    async with live_replica(profile=ROOMY) as live:
        file = tmp_path / "gateway.yaml"
        file.write_text(f"models: [{{name: tiny, backends: [{{url: '{live.url}'}}]}}]\n")
        source = Source(str(file), (), ("listen.port=0", "admin.port=0", "poll.interval_s=0.05"))
        app = App(source, source.load())
        await app.start()
        try:
            async with aiohttp.ClientSession() as session:
                yield app, session
        finally:
            await app.stop()


async def ask(
    app: App, session: aiohttp.ClientSession, api: Api, turns: list[str], *, stream: bool
) -> Turn:
    body = {"model": "tiny", api.limit: ANSWER_TOKENS, "stream": stream, **body_of(api, turns)}
    if stream and api in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    async with session.post(app.url + api.path, json=body) as answer:
        data = await answer.read()
        assert answer.status == 200, data
        predicted = int(answer.headers["x-gateway-prefix"].split("/")[0])
    if stream:
        lines = [line[5:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        values = [orjson.loads(line) for line in lines]
        text = "".join(delta_of(api, value) for value in values)
    else:
        values = [orjson.loads(data)]
        text = text_of(api, values[0])
    cached, prompt = cached_of(api, values)
    async with asyncio.timeout(60):
        while app.handler.live:  # noqa: ASYNC110 - the books close a moment after the last byte
            await asyncio.sleep(0)
    return Turn(predicted, cached, prompt, values[-1], text)


def cached_of(api: Api, values: list[dict[str, Any]]) -> tuple[int, int]:
    """Cached and all prompt tokens, from the last usage in the answer that tells them."""
    count, details, beside = api.usage
    found = (0, 0)
    for value in values:
        for holder in (value, value.get("message") or {}, value.get("response") or {}):
            usage = holder.get("usage") or {}
            if count in usage:
                cached = (
                    usage.get(beside) if beside else (usage.get(details) or {}).get("cached_tokens")
                )
                total = usage[count] + (cached or 0 if beside else 0)
                found = (cached or 0, total)
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, MESSAGES, RESPONSES], ids=lambda api: api.path)
async def test_the_next_turn_hits_the_answer_as_predicted(
    tmp_path: Path, api: Api, stream: bool
) -> None:
    async with gateway(tmp_path) as (app, session):
        turns = [QUESTION]
        for number in range(4):
            turn = await ask(app, session, api, turns, stream=stream)
            assert len(turn.text) == 4 * ANSWER_TOKENS
            if number:
                # all but the unfinished block of either side's kind
                assert abs(turn.predicted - turn.cached) <= BLOCK_TOKENS
                assert turn.predicted > sum(map(len, turns[:-1])) / 4 - BLOCK_TOKENS
            turns += [turn.text, AGAIN]
