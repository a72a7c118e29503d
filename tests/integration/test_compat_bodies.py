"""Compatibility cases D38-D47: JSON and request shapes. With D48, D49, D52, D53 at the end."""

import hashlib
import inspect
import logging
import math
import time
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from gateway.config.schema import KeyConfig
from gateway.edge import keys
from gateway.telemetry.record import RequestRecord
from tests.integration.rig import (
    DONE,
    Answer,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    ok_chat,
    post,
    running,
)

KEY = "rg-canary-0a1b2c3d4e"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
AUTH = f"Authorization: Bearer {KEY}"
ALIASED = (
    "models:\n  - {{name: m, aliases: [coder], backends: [{{url: 'http://127.0.0.1:{port}'}}]}}\n"
)


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return str(path)


def one_key(**more: Any) -> str:
    fields = {"name": "team", "sha256": DIGEST, **more}
    return f"keys: [{orjson.dumps(fields).decode()}]\n"


async def crossed(rig: Rig, body: bytes, *, path: str = "/v1/chat/completions") -> bytes:
    """Return the body the backend received."""
    answer = await rig.ask(post(path, body))
    assert answer.status == 200, answer.body
    return rig.backends[0].received[-1].body


# --- D38, D39


ODD = (
    b'\t{ "zeta" : [ 1.0,1.50 , 1E2, -0 ],\r\n"messages":[{"content":"\\u00e9\\ud83c\\udf0d \\/",'
    b'"role":"user","role":"user"}] ,"model" : "m","seed":9007199254740993,"temperature":1.0,'
    b'"a":{"b":{"model":"inner"}},"n":123456789012345678901234567890 ,"model":"m"}\n '
)


async def test_d38_a_body_nothing_must_change_in_crosses_byte_for_byte() -> None:
    async with running() as rig:
        assert await crossed(rig, ODD) == ODD


async def test_d38_a_stream_body_gains_only_the_usage_wish() -> None:
    body = ODD.rstrip()[:-1] + b',"stream":true}'
    async with running() as rig:
        sent = await crossed(rig, body)
        assert sent == body[:-1] + b',"stream_options":{"include_usage":true}}'
    async with running(settings=("streams.inject_usage=false",)) as rig:
        assert await crossed(rig, body) == body


async def test_d38_a_pretty_printed_body_keeps_its_shape() -> None:
    body = orjson.dumps(chat(stream_options={"x": [1]}, stream=True), option=orjson.OPT_INDENT_2)
    async with running() as rig:
        sent = await crossed(rig, body)
        wish = b'"stream_options": {"include_usage":true,'
        assert sent.replace(wish, b'"stream_options": {') == body


@pytest.mark.parametrize("number", ["9007199254740993", "123456789012345678901234567890", "1e400"])
async def test_d39_numbers_keep_every_digit_with_an_alias_too(number: str) -> None:
    async with running(settings=()) as rig:
        digits = number.encode()
        plain = b'{"seed":%b,"model":"m","messages":[]}' % digits
        answer = await rig.ask(post("/v1/chat/completions", plain))
        if number == "1e400":  # no parser of ours reads it, so none of ours may route it
            assert (answer.status, answer.code) == (400, "invalid_json")
            return
        assert rig.backends[0].received[0].body == plain


async def aliased(tmp_path: Path, body: bytes) -> bytes:
    """Return what a backend gets of a request for the alias `coder`."""
    async with running(ok_chat) as spare:
        text = ALIASED.format(port=spare.backends[0].port)
        async with running(ok_chat, models=[["other"]], file=config(tmp_path, text)) as rig:
            answer = await rig.ask(post("/v1/chat/completions", body))
            assert answer.status == 200, answer.body
        return spare.backends[0].received[-1].body


async def test_d39_an_alias_changes_its_own_value_and_nothing_else(tmp_path: Path) -> None:
    body = ODD.replace(b'"model" : "m"', b'"model" : "x"').replace(
        b'"model":"m"', b'"model":"coder"'
    )
    sent = await aliased(tmp_path, body)

    assert sent == body.replace(b'"model" : "x"', b'"model" : "m"').replace(
        b'"model":"coder"', b'"model":"m"'
    )


# --- D40, D41, D42


async def refused(rig: Rig, body: bytes, *, path: str = "/v1/chat/completions") -> Answer:
    answer = await rig.ask(post(path, body))
    assert rig.backends[0].received == []
    assert (await rig.ask(post("/v1/chat/completions", chat()))).status == 200
    rig.backends[0].received.clear()
    return answer


@pytest.mark.parametrize("text", [r"x \ud83d y", r"\udf0d", r"\ud83d\ud83d", r"\uDC00\uD800"])
async def test_d40_a_lone_surrogate_is_400_and_names_the_fault(text: str) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text.encode()
    async with running(ok_chat, ok_chat) as rig:
        answer = await refused(rig, body)

        assert (answer.status, answer.code) == (400, "invalid_json")
        assert "surrogate" in answer.json["error"]["message"]


NESTED = {
    "brackets": b"[" * 1_000_000,
    "closed": b"[" * 500_000 + b"]" * 500_000,
    "in messages": b'{"model":"m","messages":[{"content":' + b'{"a":' * 20_000 + b"1"
    + b"}" * 20_000 + b"}]}",
    "in an unread field": b'{"model":"m","messages":[],"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("case", NESTED)
async def test_d41_a_nested_bomb_is_400_at_once(case: str) -> None:
    async with running() as rig:
        answer = await refused(rig, NESTED[case])
        assert (answer.status, answer.code) == (400, "invalid_json")


async def test_d41_a_nested_bomb_costs_less_than_a_tenth_of_a_second_of_cpu() -> None:
    from gateway.core.request import RequestFault, parse_json  # noqa: PLC0415
    from gateway.core.types import Api  # noqa: PLC0415

    def cost(body: bytes) -> float:
        began = time.process_time()
        with pytest.raises(RequestFault):
            parse_json(Api.CHAT, body)
        return time.process_time() - began

    # the best of some: a collection of all the suite's garbage is not the parser's
    assert max(min(cost(body) for _ in range(5)) for body in NESTED.values()) < 0.1


@pytest.mark.parametrize("depth", [10, 100, 500, 1000])
async def test_d41_nesting_that_the_parser_takes_is_routed(depth: int) -> None:
    inner = b'{"a":' * depth + b"1" + b"}" * depth
    messages = b'[{"role":"user","content":[%b],"x":%b}]' % (inner, inner)
    body = b'{"model":"m","messages":%b,"tools":[%b],"metadata":%b}' % (messages, inner, inner)
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", body))
        assert answer.status == 200, answer.body
        assert rig.backends[0].received[0].body == body


GOOD = orjson.dumps(chat())
NOT_JSON = {
    "nan": GOOD[:-1] + b',"temperature":NaN}',
    "infinity": GOOD[:-1] + b',"temperature":-Infinity}',
    "bom": b"\xef\xbb\xbf" + GOOD,
    "utf-16": GOOD.decode().encode("utf-16"),
    "utf-16-le": GOOD.decode().encode("utf-16-le"),
    "utf-32": GOOD.decode().encode("utf-32"),
    "latin-1": '{"model":"m","messages":[{"content":"é"}]}'.encode("latin-1"),
    "truncated utf-8": GOOD[:-1] + b',"x":"\xe2\x82"}',
    "overlong": GOOD[:-1] + b',"x":"\xc0\xaf"}',
    "raw surrogate": GOOD[:-1] + b',"x":"\xed\xa0\xbd"}',
    "trailing comma": GOOD[:-1] + b",}",
    "two documents": GOOD + GOOD,
    "comment": b"/* c */" + GOOD,
    "single quotes": b"{'model':'m'}",
    "control character": GOOD[:-1] + b',"x":"a\nb"}',
    "null byte after": GOOD + b"\x00",
    "empty": b"",
    "spaces": b"   \r\n",
    "string": b'"hello"',
    "number": b"123",
    "null": b"null",
    "true": b"true",
    "array": b"[" + GOOD + b"]",
    "form": b"model=m&messages=1",
    "cut": GOOD[:-4],
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_JSON)
async def test_d42_what_is_not_one_json_object_is_400_and_not_echoed(case: str) -> None:
    body = NOT_JSON[case]
    async with running() as rig:
        answer = await refused(rig, body)

        assert (answer.status, answer.code) == (400, "invalid_json")
        assert answer.header("content-type") == "application/json"
        if len(body) > 12:
            assert body not in answer.body
            assert b"messages" not in answer.body


async def test_d42_secrets_of_a_bad_body_are_not_echoed() -> None:
    async with running() as rig:
        answer = await refused(
            rig, b'{"model":"m","messages":[{"content":"s3cret-word" nonsense}]}'
        )
        assert b"s3cret" not in answer.body
        assert b"nonsense" not in answer.body


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_d42_anthropic_routes_answer_in_anthropics_form(path: str) -> None:
    async with running() as rig:
        answer = await refused(rig, b"{", path=path)
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"


# --- D43, D44


async def test_d43_checks_come_in_order(tmp_path: Path) -> None:
    async with running(file=config(tmp_path, one_key(models=["x*"]))) as rig:

        async def code(body: Any, *lines: str) -> tuple[int, str]:
            answer = await rig.ask(post("/v1/chat/completions", body, *lines))
            return answer.status, answer.code

        assert await code(b"{") == (401, "invalid_api_key")
        assert await code(b"{", AUTH) == (400, "invalid_json")
        assert await code({"model": "zz"}, AUTH) == (400, "invalid_request")
        assert await code(chat() | {"model": "zz"}, AUTH) == (404, "model_not_found")
        assert await code(chat(), AUTH) == (403, "permission_denied")
        assert rig.backends[0].received == []


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": None}, 400, "model"),
        ({"model": 5}, 400, "model"),
        ({"model": ["m"]}, 400, "model"),
        ({"model": {"a": 1}}, 400, "model"),
        ({"model": "zz"}, 404, "model"),
        ({"model": ""}, 404, "model"),
        ({"model": "M"}, 404, "model"),
        ({"model": "m\x00"}, 404, "model"),
        ({"messages": None}, 400, "messages"),
        ({"messages": 123}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": {}}, 400, "messages"),
    ],
)
async def test_d43_each_shape_fault_names_its_field(
    change: dict[str, Any], status: int, param: str
) -> None:
    async with running() as rig:
        answer = await refused(rig, orjson.dumps(chat() | change))
        missing = {k: v for k, v in chat().items() if k != param}

        assert answer.status == status
        assert answer.code == ("model_not_found" if status == 404 else "invalid_request")
        assert answer.json["error"]["param"] == param
        assert (await refused(rig, orjson.dumps(missing))).json["error"]["param"] == param


async def test_d43_a_megabyte_of_model_name_is_not_repeated() -> None:
    async with running() as rig:
        answer = await refused(rig, orjson.dumps(chat() | {"model": "z" * (1 << 20)}))
        assert answer.status == 404
        assert len(answer.body) < 500


LEFT_TO_THE_ENGINE: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [1, None, "x", [], {"role": 5, "content": {"a": 1}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": "none", "functions": 3, "tool_choice": []},
    {"stream": "yes", "stream_options": 3, "n": -1, "max_tokens": "many"},
    {"max_tokens": -5, "max_completion_tokens": 1.5, "n": 10**18},
    {"session_id": 5, "metadata": [], "user": {}, "prompt_cache_key": None},
    {"cache_salt": 7, "chat_template_kwargs": "x", "documents": 1, "mm_processor_kwargs": []},
    {"response_format": {"json_schema": {"z": 1, "a": 2}}, "vllm_xargs": {"k": [1]}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None}, 5]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": None}, 1]}]},
    {"priority": "high", "temperature": -3, "": 1, "unknown": {"deep": [{}]}},
]


@pytest.mark.parametrize("change", LEFT_TO_THE_ENGINE)
async def test_d44_what_routing_does_not_read_is_the_engines_to_judge(
    change: dict[str, Any],
) -> None:
    async with running(settings=("streams.inject_usage=false",)) as rig:
        body = orjson.dumps(chat() | change)
        assert await crossed(rig, body) == body


async def test_d44_the_engines_own_refusal_comes_back() -> None:
    refusal = b'{"detail":[{"loc":["body","tools"],"msg":"field required"}]}'

    async def script(conn: Conn, _: Received) -> None:
        await conn.json(refusal, 422)

    async with running(script) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(tools=[{}])))
        assert (answer.status, answer.body) == (422, refusal)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_d44_a_strange_content_type_is_the_engines_to_judge(kind: str) -> None:
    async with running() as rig:
        data = orjson.dumps(chat())
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Length: {len(data)}\r\n"
        head += f"Content-Type: {kind}\r\n" if kind else ""
        assert (await rig.ask(head.encode() + b"\r\n" + data)).status == 200
        assert rig.backends[0].received[0].header("content-type") == (kind or None)


# --- D45


async def hit(rig: Rig, prompt: Any) -> int:
    answer = await rig.ask(post("/v1/completions", {"model": "m", "prompt": prompt}))
    assert answer.status == 200
    return int((answer.header("x-gateway-prefix") or "").partition("/")[0])


async def test_d45_every_form_of_prompt_is_routed_and_remembered() -> None:
    numbers = list(range(2000))
    async with running() as rig:
        for prompt in (
            "x" * 4000,
            ["y" * 4000],
            ["a" * 2000, "b" * 2000],
            numbers,
            [numbers[::-1]],
        ):
            assert await hit(rig, prompt) == 0
            assert await hit(rig, prompt) > 0


async def test_d45_different_prompts_never_share_a_prefix() -> None:
    numbers = list(range(1000))
    as_text = orjson.dumps(numbers).decode()
    async with running() as rig:
        assert await hit(rig, numbers) == 0
        assert await hit(rig, as_text) == 0
        assert await hit(rig, as_text.strip("[]")) == 0
        assert await hit(rig, [str(number) for number in numbers]) == 0
        assert await hit(rig, [number + 1 for number in numbers]) == 0
        assert await hit(rig, [[number] for number in numbers]) == 0
        assert await hit(rig, numbers) > 0


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], [None], [1, "a"], [1.5], [True], [[1], "a"], [-1], [2**70]]
)
async def test_d45_a_strange_prompt_is_the_engines_to_judge(prompt: Any) -> None:
    async with running() as rig:
        body = orjson.dumps({"model": "m", "prompt": 0}).replace(
            b"0",
            str(prompt).replace("'", '"').replace("None", "null").replace("True", "true").encode(),
        )
        assert await crossed(rig, body, path="/v1/completions") == body


# --- D46


async def test_d46_infinite_logprobs_cross_unchanged() -> None:
    body = (
        b'{"choices":[{"logprobs":{"content":[{"token":"a","logprob":-Infinity},{"logprob":NaN}]}}]'
        b',"usage":{"prompt_tokens":3,"completion_tokens":2,"x":1}}'
    )

    async def script(conn: Conn, _: Received) -> None:
        await conn.json(body)

    async with running(script) as rig:
        assert (await rig.ask(post("/v1/chat/completions", chat(logprobs=True)))).body == body
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}
        assert rig.metric("gateway_completion_tokens_total") == 2


@pytest.mark.parametrize(
    "usage",
    [b'{"prompt_tokens":NaN}', b'{"prompt_tokens":-Infinity,"completion_tokens":2}', b"null", b"3",
     b'{"prompt_tokens":"3"}', b'{"prompt_tokens":[1]}', b'{"prompt_tokens":1e400}', b"{" * 5000,
     b'{"prompt_tokens":-1,"completion_tokens":-2}', b'{"prompt_tokens_details":7}', b'{"a":"}'],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_d46_a_strange_usage_is_unknown_at_worst(usage: bytes, stream: bool) -> None:
    body = b'{"choices":[],"usage":%b}' % usage
    event = b"data: " + body + b"\n\n"

    async def script(conn: Conn, _: Received) -> None:
        if stream:
            await conn.sse(chat_event("a"), event, DONE)
            await conn.end()
        else:
            await conn.json(body)

    async with running(script, settings=("streams.inject_usage=false",)) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(stream=stream)))
        await rig.settled()

        assert answer.body == (chat_event("a") + event + DONE if stream else body)
        assert rig.outcomes() == {"ok": 1}
        assert rig.metric("gateway_completion_tokens_total") in (0, 1, 2)
        assert math.isfinite(rig.metric("gateway_prompt_tokens_total"))
        await rig.at_rest()


# --- D47


PRIORITY = b'{"priority": -100,"model":"m","messages":[{"priority":3}],"x":{"priority":9}}'


async def test_d47_the_priority_header_never_crosses() -> None:
    async with running() as rig:
        await rig.ask(post("/v1/chat/completions", chat(), "X-Vllm-Priority: -100"))
        received = rig.backends[0].received[0]

        assert received.header("x-vllm-priority") is None
        assert "priority" not in orjson.loads(received.body)  # and none is injected


async def test_d47_a_keys_requests_have_no_priority_unless_it_may_choose(tmp_path: Path) -> None:
    for choose, expected in (
        (False, PRIORITY.replace(b"-100", b"0")),
        (True, PRIORITY),
    ):
        text = one_key(choose_priority=choose)
        async with running(file=config(tmp_path, text)) as rig:
            answer = await rig.ask(post("/v1/chat/completions", PRIORITY, AUTH))
            assert answer.status == 200
            assert rig.backends[0].received[0].body == expected


async def test_d47_on_an_open_listener_the_body_is_the_clients() -> None:
    async with running() as rig:
        assert await crossed(rig, PRIORITY) == PRIORITY


# --- of section E: D48, D49, D52, D53


BUCKET = """
classes:
  chat: {default: true, bucket: {tokens_per_second: 1, burst_tokens: 1000}}
"""


async def no_usage(conn: Conn, _: Received) -> None:
    """Answer without figures, which would teach the gateway what a byte costs."""
    await conn.json({})


def retry_hint(answer: Answer) -> int:
    """Return the milliseconds; both headers must be there and agree."""
    seconds = int(answer.header("retry-after") or "x")
    ms = int(answer.header("retry-after-ms") or "x")
    assert 1 <= seconds <= 60
    assert 0 < ms <= 60_000
    assert seconds * 1000 >= ms
    return ms


async def test_d48_every_429_and_503_says_when_to_come_back(tmp_path: Path) -> None:
    async with running(no_usage, file=config(tmp_path, BUCKET)) as rig:
        # Each a prompt of its own: what is cached costs the bucket nothing.
        requests = [post("/v1/chat/completions", chat(f"{n}" * 40_000)) for n in range(3)]
        rate = [await rig.ask(request) for request in requests][-1]
        assert rate.code == "rate_limited"
        retry_hint(rate)

        rig.handler.drain()
        draining = await rig.ask(post("/v1/chat/completions", chat()))
        assert (draining.status, draining.code) == (503, "draining")
        retry_hint(draining)


async def test_d48_no_backend_up_is_503_with_a_hint() -> None:
    async with running() as rig:
        rig.app.dispatcher.set_up("backend-1", False, rig.handler.clock())
        answer = await rig.ask(post("/v1/chat/completions", chat()))
        assert (answer.status, answer.code) == (503, "no_backend")
        retry_hint(answer)


async def test_d49_clients_refused_together_do_not_return_together(tmp_path: Path) -> None:
    async with running(no_usage, file=config(tmp_path, BUCKET)) as rig:
        client = await rig.connect()
        for n in range(12):
            await client.send(post("/v1/chat/completions", chat(chr(65 + n) * 40_000)))
        answers = [await client.answer() for _ in range(12)]
        hints = [retry_hint(answer) for answer in answers if answer.status == 429]

        assert len(hints) >= 10
        assert len(set(hints)) >= len(hints) - 2


async def test_d48_the_openai_sdk_obeys_the_hint() -> None:
    async with running() as rig:
        rig.handler.drain()
        async with rig.openai() as sdk:
            with pytest.raises(openai.InternalServerError) as caught:
                await sdk.chat.completions.create(**chat())
        assert "retry-after-ms" in caught.value.response.headers


def test_d52_keys_are_looked_up_by_digest_and_never_compared() -> None:
    ring = keys.KeyRing([KeyConfig(name="team", sha256=DIGEST.upper())])
    found = ring.check(f"Bearer {KEY}".encode(), None)

    assert found is not None
    assert found.name == "team"
    assert KEY not in repr(vars(ring))
    source = inspect.getsource(keys.KeyRing.check)
    assert "sha256(secret)" in source
    assert "==" not in source


async def test_d53_a_clients_key_is_neither_logged_nor_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(file=config(tmp_path, one_key())) as rig:
        records: list[RequestRecord] = []
        rig.app.telemetry.log = records.append
        secrets = (AUTH, f"x-api-key: {KEY}", f"Proxy-Authorization: Bearer {KEY}")
        for line in secrets:
            await rig.ask(post("/v1/chat/completions", chat(), line))
        await rig.ask(post("/v1/chat/completions", b"{" + KEY.encode(), AUTH))
        await rig.ask(post("/v1/chat/completions", chat(), f"Authorization: Bearer {KEY}x"))
        await rig.ask(b"nonsense " + KEY.encode() + b"\r\n\r\n")
        await rig.settled()

        assert rig.backends[0].received
        for received in rig.backends[0].received:
            assert KEY.encode() not in received.raw_head
            assert received.header("authorization") is None
        assert records
        assert KEY not in repr(records)
    assert KEY not in caplog.text


async def test_d53_the_backend_sees_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIG_BACKEND_KEY", "backend-secret")
    async with running(ok_chat) as spare:
        url = f"http://127.0.0.1:{spare.backends[0].port}"
        text = (
            one_key()
            + f"models: [{{name: m, backends: [{{url: '{url}', api_key_env: RIG_BACKEND_KEY}}]}}]\n"
        )
        async with running(ok_chat, models=[["other"]], file=config(tmp_path, text)) as rig:
            assert (await rig.ask(post("/v1/chat/completions", chat(), AUTH))).status == 200
        received = spare.backends[0].received[-1]
        assert received.header("authorization") == "Bearer backend-secret"
        assert received.raw_head.lower().count(b"authorization") == 1


async def test_d54_random_models_and_paths_make_no_new_series() -> None:
    async with running() as rig:
        client = await rig.connect()

        async def ask(number: int) -> None:
            await client.send(
                post("/v1/chat/completions", chat() | {"model": f"x{number}"}, "X-Gateway-Class: y")
                + post(f"/v1/x{number}", chat())
                + post("/v1/chat/completions", chat(), f"User-Agent: agent-{number}")
            )
            assert [(await client.answer()).status for _ in range(3)] == [404, 404, 200]

        await ask(0)
        await rig.settled()
        before = len(rig.metrics().splitlines())
        for number in range(1, 150):
            await ask(number)
        await rig.settled()

        assert len(rig.metrics().splitlines()) == before
        assert "x1" not in rig.metrics()
