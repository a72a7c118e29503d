"""Cases D59, D60, D64, D65, D67, R13 and R14 over real sockets: what an operator meets every day."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pytest

from gateway.prompt.jobs import BUSY
from gateway.prompt.pool import EncoderPool
from tests.integration.rig import (
    Answer,
    Conn,
    Received,
    Rig,
    Script,
    chat,
    get,
    ok_chat,
    post,
    running,
)
from tests.integration.test_encoding import Gated, encoding, exact_count

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MIB = 1 << 20
KEY = "rg-daily"
DEBUG = ("backend", "class", "policy", "prefix", "queue-ms", "attempts")


def hit_of(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    return int((answer.header("x-gateway-prefix") or "").partition("/")[0])


# --- D59


async def test_d59_unique_prompts_without_end_keep_the_index_under_its_cap() -> None:
    """Every prompt begins alike for a block, so an old one is compared with one never seen."""

    def prompt(number: int) -> bytes:
        text = hashlib.shake_256(b"%d" % number).hexdigest(8 * 1024)
        return post(CHAT, chat(text))

    async with running(settings=("index.max_mib=1",)) as rig:
        client = await rig.connect()
        most = 0.0
        for number in range(1_500):
            await client.send(prompt(number))
            assert (await client.answer()).status == 200
            if number % 50 == 49:
                most = max(most, rig.metric("gateway_index_bytes"))
        latest = hit_of(await rig.ask(prompt(1_499)))
        unseen = hit_of(await rig.ask(prompt(1_500)))
        oldest = hit_of(await rig.ask(prompt(0)))

    assert MIB / 2 < most <= MIB  # it was filled, and it turned over
    assert latest > unseen
    assert oldest == unseen


# --- D60


async def test_d60_eight_large_prompts_at_once_hold_up_nobody() -> None:
    """Two are encoded, apart from the loop; the others do not queue for it but go by bytes."""
    encoder = Gated()
    body = chat("z" * (512 * 1024))
    exact = f"/{exact_count(body)}"
    async with encoding(encoder, EncoderPool(threads=2)) as (rig, pool, _):
        clients = [await rig.connect() for _ in range(8)]
        waiting = {asyncio.ensure_future(_asked(client, body)) for client in clients}
        for _ in range(2):
            await encoder.at_work()
        quick: list[Answer] = []
        while len(quick) < 6:  # the gate is shut: only those that went by bytes can end
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            quick += [task.result() for task in done]
            assert (await rig.ask(get("/healthz"))).status == 200

        assert pool.jobs == len(waiting) == 2
        assert rig.metric("gateway_fallback_total", reason=BUSY) == 6
        encoder.go.set()
        encoded = await asyncio.gather(*waiting)
        assert {answer.status for answer in (*quick, *encoded)} == {200}
        assert all((a.header("x-gateway-prefix") or "").endswith(exact) for a in encoded)
        await rig.at_rest()
        assert rig.outcomes() == {"ok": 8}


async def _asked(client: Any, body: object) -> Answer:
    await client.send(post(CHAT, body))
    answer: Answer = await client.answer()
    return answer


# --- D64


async def messages(conn: Conn, request: Received) -> None:
    """Answer as an engine that speaks Anthropic's API."""
    if request.target.partition("?")[0].endswith("/count_tokens"):
        await conn.json({"input_tokens": 7})
        return
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "usage": usage}
    content = [{"type": "text", "text": "ab"}]
    await conn.json({**message, "content": content, "stop_reason": "end_turn"})


@pytest.mark.parametrize("style", ["api_key", "auth_token"])
async def test_d64_the_anthropic_sdk_is_served_by_either_kind_of_key(
    style: str, tmp_path: Path
) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    file = tmp_path / "gateway.yaml"
    file.write_bytes(orjson.dumps({"keys": [{"name": "k", "sha256": digest}]}))
    async with running(messages, file=str(file)) as rig, _sdk(rig, **{style: KEY}) as sdk:
        asked: dict[str, Any] = chat(max_tokens=5)
        answer = await sdk.messages.create(**asked, extra_headers={"anthropic-beta": "b-1"})
        counted = await sdk.messages.count_tokens(model="m", messages=asked["messages"])
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await sdk.messages.create(**{**asked, "model": "unknown"})
        async with _sdk(rig, **{style: "wrong"}) as stranger:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await stranger.messages.create(**asked)
        first, second = rig.backends[0].received

    assert answer.content[0].type == "text"
    assert answer.content[0].text == "ab"
    assert counted.input_tokens == 7
    assert [first.target, second.target] == ["/v1/messages", "/v1/messages/count_tokens"]
    assert first.header("anthropic-beta") == "b-1"
    assert first.header("anthropic-version") == sdk.default_headers["anthropic-version"]
    assert KEY.encode() not in first.raw_head
    assert _anthropic_error(unknown.value) == "not_found_error"
    assert _anthropic_error(refused.value) == "authentication_error"


def _sdk(rig: Rig, **keys: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=rig.app.url, max_retries=0, timeout=20, **keys)  # type: ignore[arg-type]


def _anthropic_error(problem: anthropic.APIStatusError) -> str:
    body: Any = problem.body
    assert body["type"] == "error"
    assert body["error"]["message"]
    return str(body["error"]["type"])


# --- D65


CREATED = (
    b"event: response.created\n"
    b'data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}\n\n'
)
COMPLETED = (
    b"event: response.completed\n"
    b'data: {"type":"response.completed","sequence_number":1,'
    b'"response":{"id":"resp_1","status":"completed"}}\n\n'
)


async def resets(conn: Conn, _: Received) -> None:
    await conn.sse(CREATED)
    conn.reset()


async def ends_early(conn: Conn, _: Received) -> None:
    await conn.sse(CREATED)
    await conn.end()


async def resets_in_an_event(conn: Conn, _: Received) -> None:
    await conn.sse(CREATED, COMPLETED[:40])
    conn.reset()


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (resets, "upstream_error"),
        (ends_early, "upstream_truncated"),
        (resets_in_an_event, "upstream_error"),
    ],
)
async def test_d65_a_responses_stream_that_breaks_ends_with_response_failed(
    script: Script, outcome: str
) -> None:
    async with running(script) as rig:
        answer = await rig.ask(post(RESPONSES, {"model": "m", "input": "i", "stream": True}))
        await rig.settled()

        assert answer.body.startswith(CREATED)
        name, _, data = answer.body.split(b"\n\n")[-2].partition(b"\n")
        told = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: response.failed"
        assert told["type"] == "response.failed"
        assert told["response"]["status"] == "failed"
        assert told["response"]["error"]["message"]
        assert rig.outcomes() == {outcome: 1}


async def test_d65_nothing_is_added_to_a_responses_stream_that_was_completed() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(CREATED, COMPLETED)
        await conn.end()

    async with running(script) as rig:
        answer = await rig.ask(post(RESPONSES, {"model": "m", "input": "i", "stream": True}))
        await rig.settled()

        assert answer.body == CREATED + COMPLETED
        assert rig.outcomes() == {"ok": 1}


# --- D67


@pytest.mark.parametrize("stream", [False, True])
async def test_d67_an_answer_says_where_its_request_went_and_why(stream: bool) -> None:
    async with running(ok_chat) as rig:
        answer = await rig.ask(post(CHAT, chat(stream=stream)))

    told = {name: answer.all(f"x-gateway-{name}") for name in DEBUG}
    assert told["backend"] == ["backend-1"]
    assert told["class"] == ["chat"]
    assert told["policy"] == ["cost"]
    assert told["attempts"] == ["1"]
    hit, _, whole = told["prefix"][0].partition("/")
    assert int(hit) == 0 < int(whole)
    assert float(told["queue-ms"][0]) >= 0
    assert {len(values) for values in told.values()} == {1}


@pytest.mark.parametrize("stream", [False, True])
async def test_d67_with_debug_headers_off_it_says_nothing_of_that(stream: bool) -> None:
    async with running(ok_chat, settings=("debug_headers=false",)) as rig:
        answer = await rig.ask(post(CHAT, chat(stream=stream)))

    assert answer.status == 200
    assert [name for name, _ in answer.headers if name.lower().startswith("x-gateway-")] == []
    assert len(answer.all("x-request-id")) == 1


# --- R13, R14


async def test_r13_token_id_prompts_of_one_length_have_different_keys() -> None:
    async def hit(ids: list[int]) -> int:
        return hit_of(await rig.ask(post(COMPLETIONS, {"model": "m", "prompt": ids})))

    one, other = list(range(1_000)), list(range(5_000, 6_000))
    async with running() as rig:
        assert await hit(one) == 0
        assert await hit(other) == 0
        assert await hit(one) > 900
        assert await hit(other) > 900


LONG = "the quick brown fox " * 200
PIXEL = "data:image/png;base64," + "iVBORw0KGgo" * 100
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 100}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(LONG)),
    "chat with parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]}]},
    ),
    "chat with tools": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": LONG},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": LONG},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ),
    "text": (COMPLETIONS, {"prompt": LONG}),
    "texts": (COMPLETIONS, {"prompt": [LONG, LONG + "!"]}),
    "token ids": (COMPLETIONS, {"prompt": list(range(1_000))}),
    "messages": (
        "/v1/messages",
        {"max_tokens": 5, "system": LONG, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "messages with parts": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": SOURCE},
                        {"type": "text", "text": LONG},
                    ],
                }
            ],
        },
    ),
    "responses": (RESPONSES, {"instructions": LONG, "input": "hi"}),
    "responses with items": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_r14_the_second_of_two_equal_requests_is_a_hit_in_every_shape(shape: str) -> None:
    path, body = SHAPES[shape]
    request = post(path, {**body, "model": "m"})
    async with running() as rig:
        assert hit_of(await rig.ask(request)) == 0
        again = await rig.ask(request)
        whole = int((again.header("x-gateway-prefix") or "").partition("/")[2])
        assert hit_of(again) > whole / 2  # a share: the rig's usage teaches a scale of its own
