"""Every row of the contract's error table, over real sockets."""

import asyncio
import gzip
import hashlib
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.rig import (
    Answer,
    Conn,
    Received,
    chat,
    eventually,
    get,
    post,
    running,
)

CHAT = "/v1/chat/completions"
KEY = "rg-test-key"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def config_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    return str(file)


def assert_error(answer: Answer, status: int, code: str) -> None:
    assert answer.status == status
    assert answer.header("content-type") == "application/json"
    assert len(answer.all("x-request-id")) == 1
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]


async def refuse(conn: Conn, _: Received) -> None:
    conn.reset()


async def silent(conn: Conn, _: Received) -> None:
    await conn.gone()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"3", b'{"a":1,}', b"\xff\xfe", b'{"a":NaN}', b"{}{}", b"[" * 100_000]
)
async def test_400_invalid_json(body: bytes) -> None:
    async with running() as rig:
        assert_error(await rig.ask(post(CHAT, body)), 400, "invalid_json")
        assert not rig.backends[0].received
        assert rig.metric("gateway_requests_total", outcome="bad_request") == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "model"),
        ({"model": 3, "messages": []}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": None}, "messages"),
        ({"model": "m", "messages": 123}, "messages"),
    ],
)
async def test_400_invalid_request(body: object, param: str) -> None:
    async with running() as rig:
        answer = await rig.ask(post(CHAT, body))

        assert_error(answer, 400, "invalid_request")
        assert answer.json["error"]["param"] == param


async def test_401_and_403_by_key(tmp_path: Path) -> None:
    async with running(models=[["m", "other"]], file=None) as plain:
        url = plain.backends[0].url
        text = f'backends: [{{url: "{url}"}}]\nkeys:\n  - {{name: k, sha256: {DIGEST}, models: ["m"]}}\n'
        async with running(file=config_file(tmp_path, text)) as rig:
            none = await rig.ask(post(CHAT, chat()))
            wrong = await rig.ask(post(CHAT, chat(), "Authorization: Bearer nope"))
            right = await rig.ask(post(CHAT, chat(), f"Authorization: Bearer {KEY}"))
            x_api = await rig.ask(post(CHAT, chat(), f"x-api-key: {KEY}"))
            other = await rig.ask(
                post(CHAT, {**chat(), "model": "other"}, f"Authorization: Bearer {KEY}")
            )
            listed = await rig.ask(get("/v1/models", f"Authorization: Bearer {KEY}"))
            health = await rig.ask(get("/healthz"))

        assert_error(none, 401, "invalid_api_key")
        assert none.header("www-authenticate") == "Bearer"
        assert_error(wrong, 401, "invalid_api_key")
        assert right.status == x_api.status == 200
        assert_error(other, 403, "permission_denied")
        assert [model["id"] for model in listed.json["data"]] == ["m"]
        assert health.status == 200


async def test_401_comes_before_400_and_404(tmp_path: Path) -> None:
    text = f'backends: [{{url: "http://127.0.0.1:9"}}]\nkeys: [{{name: k, sha256: {DIGEST}}}]\n'
    async with running(file=config_file(tmp_path, text)) as rig:
        assert_error(await rig.ask(post(CHAT, b"{")), 401, "invalid_api_key")
        assert_error(await rig.ask(post(CHAT, {**chat(), "model": "x"})), 401, "invalid_api_key")


async def test_404_unknown_path_and_model_405_method() -> None:
    async with running() as rig:
        assert_error(await rig.ask(get("/v1/nope")), 404, "not_found")
        assert_error(await rig.ask(post("/sleep", {})), 404, "not_found")
        assert_error(await rig.ask(post(CHAT, {**chat(), "model": "nope"})), 404, "model_not_found")
        wrong = await rig.ask(get(CHAT))
        assert_error(wrong, 405, "method_not_allowed")
        assert wrong.header("allow") == "POST"
        assert_error(await rig.ask(get("/v1/models/nope")), 404, "model_not_found")
        options = await rig.ask(get(CHAT, "Origin: http://a", method="OPTIONS"))
        assert_error(options, 405, "method_not_allowed")


async def test_408_when_head_or_body_do_not_come() -> None:
    async with running(settings=("timeouts.header_s=0.2", "timeouts.body_s=0.2")) as rig:
        for part in (b"POST /v1/chat", post(CHAT, chat())[:-5]):
            client = await rig.connect()
            await client.send(part)
            assert_error(await client.answer(), 408, "request_timeout")
            assert await client.at_eof()


async def test_413_by_length_by_chunks_and_by_decoded_size() -> None:
    async with running(settings=("limits.body_mib=1",)) as rig:
        big = b'{"model":"' + b"x" * 1_100_000 + b'"}'
        declared = await rig.ask(post(CHAT, b"", "X: y").replace(b"Length: 0", b"Length: 1100000"))
        assert_error(declared, 413, "body_too_large")
        assert "1048576" in declared.json["error"]["message"]
        chunked = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (
            CHAT.encode(),
            len(big),
            big,
        )
        assert_error(await rig.ask(chunked), 413, "body_too_large")
        packed = gzip.compress(big)
        assert_error(
            await rig.ask(post(CHAT, packed, "Content-Encoding: gzip")), 413, "body_too_large"
        )


async def test_415_and_431() -> None:
    async with running(settings=("limits.header_kib=4",)) as rig:
        answer = await rig.ask(post(CHAT, b"x", "Content-Encoding: br"))
        assert_error(answer, 415, "unsupported_encoding")
        long = await rig.ask(post(CHAT, chat(), "X-Long: " + "x" * 5000))
        assert_error(long, 431, "headers_too_large")
        many = await rig.ask(post(CHAT, chat(), *(f"X-{i}: y" for i in range(300))))
        assert_error(many, 431, "headers_too_large")


async def test_429_says_honestly_when_and_no_two_alike(tmp_path: Path) -> None:
    async with running() as plain:
        text = (
            f'backends: [{{url: "{plain.backends[0].url}"}}]\n'
            "classes: {chat: {default: true, bucket: {tokens_per_second: 10, burst_tokens: 50}}}\n"
        )
        async with running(file=config_file(tmp_path, text)) as rig:
            first = await rig.ask(post(CHAT, chat(max_tokens=400)))
            refused = [await rig.ask(post(CHAT, chat(max_tokens=40))) for _ in range(3)]

            assert first.status == 200
            for answer in refused:
                assert_error(answer, 429, "rate_limited")
                assert 1 <= int(answer.header("retry-after") or 0) <= 60
                assert 0 < int(answer.header("retry-after-ms") or 0) <= 60_000
                assert answer.header("x-gateway-class") == "chat"
            assert len({answer.header("retry-after-ms") for answer in refused}) > 1
            assert rig.metric("gateway_admission_total", result="rejected_rate") == 3


async def test_502_when_the_backend_breaks_before_its_head() -> None:
    async with running(refuse) as rig:
        assert_error(await rig.ask(post(CHAT, chat())), 502, "upstream_error")
        assert rig.metric("gateway_requests_total", outcome="upstream_error") == 1
        assert len(rig.backends[0].received) == 1


async def test_503_without_a_backend_and_when_full() -> None:
    async with running() as rig:
        await rig.backends[0].stop()
        name = rig.app.dispatcher.backends(0.0)[0].name
        rig.app.dispatcher.set_up(name, False, rig.app.handler.clock())
        answer = await rig.ask(post(CHAT, chat()))
        assert_error(answer, 503, "no_backend")
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        assert (await rig.ask(get("/readyz"))).status == 503
    async with running(silent, settings=("limits.streams=1",)) as rig:
        busy = await rig.connect()
        await busy.send(post(CHAT, chat()))
        await eventually(lambda: bool(rig.backends[0].received))
        answer = await rig.ask(post(CHAT, chat()))
        assert_error(answer, 503, "overloaded")
        assert answer.header("retry-after-ms")
        busy.close()


async def test_503_while_draining() -> None:
    async with running(silent) as rig:
        busy = await rig.connect()
        await busy.send(post(CHAT, chat()))
        await eventually(lambda: bool(rig.backends[0].received))
        rig.app.handler.drain()
        assert_error(await rig.ask(post(CHAT, chat())), 503, "draining")
        busy.close()
        await rig.settled()


async def test_504_tells_clients_not_to_repeat_the_prefill() -> None:
    async with running(silent, settings=("timeouts.first_byte_s=0.2",)) as rig:
        answer = await rig.ask(post(CHAT, chat()))
        assert_error(answer, 504, "upstream_timeout")
        assert answer.header("x-should-retry") == "false"
        await eventually(lambda: rig.metric("gateway_inflight_requests") == 0)
        assert rig.metric("gateway_requests_total", outcome="upstream_timeout") == 1


async def test_messages_errors_take_anthropics_form() -> None:
    async with running() as rig:
        for data in (post("/v1/messages", b"{"), post("/v1/messages?beta=true", {"model": "x"})):
            answer = await rig.ask(data)
            assert answer.status == 400
            assert answer.json["type"] == "error"
            assert answer.json["error"]["type"] == "invalid_request_error"
        unknown = await rig.ask(post("/v1/messages", {**chat(), "model": "x"}))
        assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")


async def test_a_body_of_any_bytes_never_gives_a_500() -> None:
    async with running() as rig:
        loop = asyncio.get_running_loop()

        @settings(
            max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.sampled_from(["/v1/chat/completions", "/v1/messages", "/v1/responses"]), BODIES)
        def check(path: str, body: bytes) -> None:
            future = asyncio.run_coroutine_threadsafe(rig.ask(post(path, body)), loop)
            answer = future.result(60)
            assert answer.status < 500
            assert answer.status == 200 or orjson.loads(answer.body)["error"]

        await asyncio.to_thread(check)
        assert rig.metric("gateway_requests_total", outcome="internal_error") == 0


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
_shaped = st.fixed_dictionaries(
    {"model": st.just("m") | _json, "messages": st.lists(_json, max_size=3) | _json},
    optional={
        "stream": _json,
        "tools": _json,
        "input": _json,
        "system": _json,
        "n": _json,
        "stream_options": _json,
        "max_tokens": _json,
        "metadata": _json,
    },
)


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits
        return repr(value).encode("utf-8", "replace")


BODIES = st.binary(max_size=200) | _shaped.map(_dump) | _json.map(_dump)
