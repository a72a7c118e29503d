"""What a tester broke at the edge: keys and responses, heavy bodies, attempts, redirects, CORS."""

import asyncio
import contextlib
import gc
import hashlib
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.request import MAX_WEIGHT, RequestFault, parse_json
from gateway.core.types import Api
from tests.integration.rig import (
    Backend,
    Conn,
    Received,
    Rig,
    Script,
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
MIB = 1024 * 1024


# --- (a), (b): keys


def keyed(tmp_path: Path, served: list[Any] | None = None, **models: list[str]) -> str:
    """Write a configuration of keys `sk-NAME` by their names and the models they may use."""
    rows = [
        {"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), "models": allow}
        for name, allow in models.items()
    ]
    path = tmp_path / "keys.yaml"
    path.write_bytes(orjson.dumps({"keys": rows, "models": served or []}))  # JSON is YAML
    return str(path)


def auth(name: str) -> str:
    return f"authorization: Bearer sk-{name}"


async def make_response(conn: Conn, request: Received) -> None:
    asked = orjson.loads(request.body) if request.body else {}
    await conn.json({"id": asked.get("request_id", "resp_1"), "object": "response", "output": []})


def by_id(name: str, *, cancel: bool = False) -> bytes:
    if cancel:
        return post("/v1/responses/resp_1/cancel", b"", auth(name))
    return get("/v1/responses/resp_1", auth(name))


RESPONSE = {"model": "m", "input": "i"}


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_response_is_its_own_keys_alone(tmp_path: Path, cancel: bool) -> None:
    file = keyed(tmp_path, one=["*"], two=["*"], other=["else"])
    async with running(make_response, file=file) as rig:
        await rig.ask(post("/v1/responses", RESPONSE, auth("one")))
        for stranger in ("two", "other"):
            refused = await rig.ask(by_id(stranger, cancel=cancel))
            assert (refused.status, refused.code) == (404, "not_found")
        assert len(rig.backends[0].received) == 1

        own = await rig.ask(by_id("one", cancel=cancel))

        assert own.status == 200
        assert len(rig.backends[0].received) == 2


async def test_a_key_that_lost_its_model_reads_no_response_of_it(tmp_path: Path) -> None:
    async with running(make_response, file=keyed(tmp_path, one=["m"])) as rig:
        await rig.ask(post("/v1/responses", RESPONSE, auth("one")))
        keyed(tmp_path, one=["else"])
        assert (await rig.app.reload()).ok

        refused = await rig.ask(by_id("one"))

        assert (refused.status, refused.code) == (403, "permission_denied")
        assert len(rig.backends[0].received) == 1


async def test_no_key_takes_over_or_continues_anothers_response(tmp_path: Path) -> None:
    file = keyed(tmp_path, one=["*"], two=["*"])
    async with running(make_response, file=file) as rig:
        await rig.ask(post("/v1/responses", RESPONSE, auth("one")))
        same_id = RESPONSE | {"request_id": "resp_1"}  # vLLM lets a client choose it
        assert (await rig.ask(post("/v1/responses", same_id, auth("two")))).status == 200

        assert (await rig.ask(by_id("two"))).status == 404
        assert (await rig.ask(by_id("one"))).status == 200
        after = RESPONSE | {"previous_response_id": "resp_1"}
        assert (await rig.ask(post("/v1/responses", after, auth("two")))).status == 404
        assert (await rig.ask(post("/v1/responses", after, auth("one")))).status == 200


async def test_without_keys_every_response_can_be_read() -> None:
    async with running(make_response) as rig:
        await rig.ask(post("/v1/responses", RESPONSE))

        assert (await rig.ask(get("/v1/responses/resp_1"))).status == 200
        assert (await rig.ask(get("/v1/responses/resp_2"))).status == 404


@pytest.mark.parametrize(
    ("allowed", "asked", "status"),
    [
        (["coder"], "coder", 200),
        (["coder"], "m", 403),
        (["m"], "coder", 200),
        (["m"], "m", 200),
        (["x"], "coder", 403),
    ],
)
async def test_a_key_may_use_a_model_by_the_name_it_is_allowed(
    tmp_path: Path, allowed: list[str], asked: str, status: int
) -> None:
    backend = await Backend(ok_chat).start()
    try:
        models = [{"name": "m", "aliases": ["coder"], "backends": [{"url": backend.url}]}]
        file = keyed(tmp_path, models, one=allowed)
        async with running(file=file) as rig:
            answer = await rig.ask(post("/v1/chat/completions", chat(model=asked), auth("one")))
            listed = await rig.ask(get("/v1/models", auth("one")))

        assert answer.status == status
        assert {entry["id"] for entry in listed.json["data"]} == {"coder", "m"} & set(allowed)
    finally:
        await backend.stop()


# --- (c): bodies of very many values


def filled(item: bytes, size: int = 57 * MIB) -> bytes:
    start = b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":['
    return start + b",".join([item] * (size // (len(item) + 1))) + b"]}"


HEAVY = {
    "lists": lambda: filled(b"[]"),
    "objects": lambda: filled(b"{}"),
    "fields": lambda: filled(b'{"a":"b"}'),
    "nested": lambda: filled(b"[" * 900 + b"]" * 900),
    "numbers": lambda: filled(b"1"),
    "texts": lambda: filled(b'"abc"'),
    "one object": lambda: (
        b'{"model":"m","messages":[],"x":{%b}}' % b",".join(b'"%d":1' % i for i in range(2_000_000))
    ),
}


@pytest.mark.parametrize("name", HEAVY)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(name: str) -> None:
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", HEAVY[name]()))

        assert (answer.status, answer.code) == (400, "invalid_request")
        assert f"{MAX_WEIGHT:,}" in answer.json["error"]["message"]
        assert not rig.backends[0].received


async def test_a_small_coded_body_that_decodes_to_too_many_values_is_refused() -> None:
    data = zlib.compress(filled(b"[]"))
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", data, "content-encoding: deflate"))

        assert (answer.status, answer.code) == (400, "invalid_request")


async def test_a_prompt_of_a_million_token_ids_is_served() -> None:
    body = {"model": "m", "prompt": list(range(1_000_000))}
    async with running() as rig:
        answer = await rig.ask(post("/v1/completions", body))

        assert answer.status == 200
        assert orjson.loads(rig.backends[0].received[0].body) == body


async def test_a_large_body_arrives_unchanged_but_for_what_a_rule_changes() -> None:
    body = orjson.dumps(chat("x" * (3 * MIB), stream=True))
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", body))

        assert answer.status == 200
        assert b"usage" not in answer.body
        got = rig.backends[0].received[0].body
        assert got == body[:-1] + b',"stream_options":{"include_usage":true}}'
        await rig.at_rest()


async def test_errors_of_a_large_body_are_answered_as_ever() -> None:
    text = "x" * (2 * MIB)
    async with running() as rig:
        unknown = await rig.ask(post("/v1/chat/completions", chat(text, model="nope")))
        broken = await rig.ask(post("/v1/chat/completions", b"{" + text.encode()))
        after = await rig.ask(CHAT)

        assert (unknown.status, unknown.code) == (404, "model_not_found")
        assert (broken.status, broken.code) == (400, "invalid_json")
        assert after.status == 200
        assert gc.isenabled()
        await rig.at_rest()


async def test_a_client_that_leaves_while_its_large_body_is_read_leaves_nothing() -> None:
    async with running() as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat("x" * (24 * MIB))))
        client.reset()

        await rig.at_rest()
        assert (await rig.ask(CHAT)).status == 200
        assert len(rig.backends[0].received) <= 2


def test_the_limit_holds_by_weight_and_spares_small_bodies() -> None:
    with pytest.raises(RequestFault) as caught:
        parse_json(Api.CHAT, filled(b"[]", 2 * MIB))
    assert caught.value.code == "invalid_request"

    assert parse_json(Api.CHAT, filled(b"[]", MIB - 1024)).model == "m"
    ids = b'{"model":"m","prompt":[%b]}' % b",".join([b"1"] * 1_900_000)
    assert len(parse_json(Api.COMPLETIONS, ids).data["prompt"]) == 1_900_000


async def test_neither_body_nor_what_was_parsed_of_it_lives_as_long_as_the_stream() -> None:
    asked = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        asked.set()
        await conn.gone()

    mark = "held-" + "y" * 4096
    async with running(script) as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat(mark, stream=True)))
        await client.head()
        await client.chunk()
        await asked.wait()
        (exchange,) = rig.handler.live

        assert exchange._body == b""
        held = [
            getattr(exchange, name, None)
            for kind in type(exchange).__mro__
            for name in getattr(kind, "__slots__", ())
        ]
        assert not [value for value in held if type(value).__name__ == "ParsedRequest"]
        client.reset()
        await rig.at_rest()


# --- (d): one result per attempt


async def hang(conn: Conn, _: Received) -> None:
    await conn.gone()


async def half_stream(conn: Conn, _: Received) -> None:
    await conn.sse(chat_event("a"))
    await conn.gone()


async def cut_stream(conn: Conn, _: Received) -> None:
    await conn.sse(chat_event("a"))
    conn.reset()


async def cut(conn: Conn, _: Received) -> None:
    conn.reset()


async def truncated(conn: Conn, _: Received) -> None:
    await conn.sse(chat_event("a"))
    await conn.end()


def answering(status: int) -> Script:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({"error": {}}, status)

    return script


async def read(rig: Rig) -> None:
    await rig.ask(STREAM)


async def read_whole(rig: Rig) -> None:
    await rig.ask(CHAT)


async def read_twice(rig: Rig) -> None:
    """The second answer's head is known by then, and takes the shorter way."""
    client = await rig.connect()
    for _ in range(2):
        await client.send(CHAT)
        await client.answer()


async def leave(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(STREAM)
    await eventually(lambda: bool(rig.backends[0].received))
    client.reset()


async def leave_in_mid_stream(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(STREAM)
    await client.head()
    await client.chunk()
    client.reset()


async def shut_down(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(STREAM)
    await eventually(lambda: bool(rig.backends[0].received))
    (exchange,) = rig.handler.live
    exchange.shut_down()
    await client.answer()


async def shut_down_in_mid_stream(rig: Rig) -> None:
    client = await rig.connect()
    await client.send(STREAM)
    answer = await client.head()
    await client.chunk()
    (exchange,) = rig.handler.live
    exchange.shut_down()
    await client.body(answer)


FIRST_BYTE, IDLE = "timeouts.first_byte_s=0.3", "timeouts.idle_s=0.3"
ENDINGS: dict[str, tuple[Script, Callable[[Rig], Awaitable[None]], dict[str, int], str]] = {
    "stream": (ok_chat, read, {"ok": 1}, ""),
    "whole": (ok_chat, read_whole, {"ok": 1}, ""),
    "whole, head known": (ok_chat, read_twice, {"ok": 2}, ""),
    "3xx": (answering(307), read_whole, {"3xx": 1}, ""),
    "3xx, head known": (answering(307), read_twice, {"3xx": 2}, ""),
    "4xx": (answering(422), read_whole, {"4xx": 1}, ""),
    "5xx": (answering(500), read_twice, {"5xx": 2}, ""),
    "truncated": (truncated, read, {"ok": 1}, ""),
    "reset": (cut, read, {"reset": 1}, ""),
    "reset in mid-stream": (cut_stream, read, {"reset": 1}, ""),
    "first byte": (hang, read, {"timeout": 1}, FIRST_BYTE),
    "idle": (half_stream, read, {"timeout": 1}, IDLE),
    "client left": (hang, leave, {"aborted": 1}, ""),
    "client left in mid-stream": (half_stream, leave_in_mid_stream, {"aborted": 1}, ""),
    "shutdown": (hang, shut_down, {"aborted": 1}, ""),
    "shutdown in mid-stream": (half_stream, shut_down_in_mid_stream, {"aborted": 1}, ""),
}


def attempts(rig: Rig) -> dict[str, int]:
    results = ("ok", "3xx", "4xx", "5xx", "connect_failed", "reset", "timeout", "aborted")
    counts = {r: int(rig.metric("gateway_upstream_attempts_total", result=r)) for r in results}
    assert sum(counts.values()) == rig.metric("gateway_upstream_attempts_total")
    return {result: count for result, count in counts.items() if count}


@pytest.mark.parametrize("name", ENDINGS)
async def test_every_attempt_is_counted_once(name: str) -> None:
    script, act, counted, setting = ENDINGS[name]
    async with running(script, settings=(setting,) if setting else ()) as rig:
        await act(rig)
        await rig.at_rest()

        assert attempts(rig) == counted
        assert sum(counted.values()) == len(rig.backends[0].received)


@contextlib.contextmanager
def refusing(rig: Rig) -> Iterator[None]:
    """Point the first backend's pool at a port where nobody listens."""
    pool = rig.app._upstreams.all()[0].pool
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        origin, pool.origin = pool.origin, replace(pool.origin, port=unused.getsockname()[1])
        try:
            yield
        finally:
            pool.origin = origin


async def test_an_attempt_that_never_reached_its_backend_is_counted_once_too() -> None:
    async with running(settings=("timeouts.connect_s=30",)) as rig:
        with black_hole(rig):
            client = await rig.connect()
            await client.send(CHAT)
            await eventually(lambda: bool(rig._connecting()))
            client.reset()
            await rig.at_rest()

        assert attempts(rig) == {"aborted": 1}
        assert not rig.backends[0].received


async def test_an_attempt_that_moves_on_is_counted_where_it_failed_and_where_it_went() -> None:
    async with running(ok_chat, ok_chat) as rig:
        with refusing(rig):
            answers = [await rig.ask(CHAT) for _ in range(2)]
        await rig.at_rest()

        counted = attempts(rig)
        assert [answer.status for answer in answers] == [200, 200]
        assert counted["ok"] == sum(len(backend.received) for backend in rig.backends) == 2
        moved = sum(int(answer.header("x-gateway-attempts") or 0) - 1 for answer in answers)
        assert counted.get("connect_failed", 0) == moved


async def test_a_response_read_by_its_id_is_an_attempt_counted_once() -> None:
    async with running(make_response) as rig:
        await rig.ask(post("/v1/responses", RESPONSE))
        await rig.ask(get("/v1/responses/resp_1"))
        await rig.at_rest()

        assert attempts(rig) == {"ok": 2}
        assert len(rig.backends[0].received) == 2


# --- (e): CORS


async def test_a_preflight_is_named_and_tells_no_length() -> None:
    lines = ("origin: https://app.example", "access-control-request-method: POST")
    async with running(settings=("cors.origins=[https://app.example]",)) as rig:
        client = await rig.connect()
        await client.send(get("/v1/chat/completions", *lines, method="OPTIONS"))
        answer = await client.answer()

        assert answer.status == 204
        assert len(answer.all("x-request-id")) == 1
        assert answer.all("content-length") == answer.all("transfer-encoding") == []
        assert answer.header("access-control-allow-origin") == "https://app.example"
        await client.send(CHAT)  # the connection's framing is intact
        assert (await client.answer()).status == 200


# --- (f): redirects


def redirecting(place: Callable[[int], str], name: str = "Location") -> Script:
    async def script(conn: Conn, _: Received) -> None:
        port = conn.writer.get_extra_info("sockname")[1]
        await conn.json({}, 307, f"{name}: {place(port)}\r\n".encode())

    return script


@pytest.mark.parametrize("name", ["Location", "content-location"])
@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:{}/v1/x",
        "HTTP://user@127.0.0.1:{}/v1/x",
        "//127.0.0.1:{}/x",
        "https://127.0.0.1/x",  # another port of it is its address still
        "\\\\127.0.0.1:{}\\x",
        "http://[127.0.0.1:{}/x",
    ],
)
async def test_a_redirect_never_shows_the_backends_address(place: str, name: str) -> None:
    async with running(redirecting(place.format, name)) as rig:
        client = await rig.connect()
        for _ in range(2):  # the second one's head is known
            await client.send(CHAT)
            answer = await client.answer()

            assert answer.status == 307
            assert answer.header(name) is None
        await rig.at_rest()
        assert len(rig.backends[0].received) == 2
        assert attempts(rig) == {"3xx": 2}
        assert rig.outcomes() == {"upstream_error": 2}


@pytest.mark.parametrize("place", ["/v2/chat", "x?y=127.0.0.1", "https://elsewhere.example/x"])
async def test_a_redirect_that_shows_nothing_is_passed_back(place: str) -> None:
    async with running(redirecting(lambda _: place)) as rig:
        answer = await rig.ask(CHAT)

        assert (answer.status, answer.header("location")) == (307, place)
