"""Compatibility cases D01-D15: what other gateways got wrong in streaming."""

import asyncio
import contextlib
import socket
from typing import Any

import anthropic
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionChunk

from gateway.core.types import Api
from gateway.edge.inband import KEEPALIVE, error_events, refusal_events
from tests.integration.rig import (
    DONE,
    HEAD_SSE,
    Client,
    Clock,
    Conn,
    Received,
    Rig,
    Script,
    Still,
    black_hole,
    chat,
    chat_event,
    eventually,
    ok_chat,
    post,
    running,
    usage_event,
)

STREAM = post("/v1/chat/completions", chat(stream=True))


def streaming(*events: bytes) -> Script:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(*events)
        await conn.end()

    return script


async def sdk_chunks(rig: Rig, **more: Any) -> list[ChatCompletionChunk]:
    async with rig.openai() as sdk:
        asked: dict[str, Any] = chat(stream=True, **more)
        stream = await sdk.chat.completions.create(**asked)
        return [chunk async for chunk in stream]


# --- D01


async def test_d01_each_event_is_visible_before_the_backend_writes_the_next() -> None:
    seen = asyncio.Semaphore(0)

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse()
        for number in range(10):
            await conn.chunk(chat_event(f"e{number}"))
            await seen.acquire()  # an intermediary that gathers events would stop here for ever
        await conn.chunk(DONE)
        await conn.end()

    async with running(script) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        for number in range(10):
            assert await client.chunk() == chat_event(f"e{number}")
            seen.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
        client.close()

    assert head.header("x-accel-buffering") == "no"
    assert "no-cache" in (head.header("cache-control") or "")
    assert head.header("content-length") is None
    assert head.header("content-type") == "text/event-stream; charset=utf-8"


async def test_d01_a_backends_own_buffering_headers_are_replaced() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.write(
            HEAD_SSE[:-2] + b"X-Accel-Buffering: yes\r\nCache-Control: max-age=60\r\n\r\n"
        )
        await conn.chunk(DONE)
        await conn.end()

    async with running(script) as rig:
        answer = await rig.ask(STREAM)

    assert answer.all("x-accel-buffering") == ["no"]
    assert answer.all("cache-control") == ["no-cache"]


# --- D02, D03


async def test_d02_characters_cut_anywhere_arrive_whole() -> None:
    events = chat_event("é 日 🌍") + DONE

    async def script(conn: Conn, _: Received) -> None:
        sock = conn.writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await conn.sse()
        for byte in events:
            await conn.chunk(bytes([byte]))
            await asyncio.sleep(0)
        await conn.end()

    async with running(script) as rig:
        answer = await rig.ask(STREAM)
        chunks = await sdk_chunks(rig)

    assert answer.body == events
    assert "\ufffd" not in answer.body.decode()
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["é 日 🌍"]


@pytest.mark.parametrize("inject", ["true", "false"])
async def test_d03_a_line_of_5_mib_is_delivered_unchanged(inject: str) -> None:
    long = chat_event("x" * (5 << 20))
    script = streaming(long, usage_event(), DONE)
    async with running(script, settings=(f"streams.inject_usage={inject}",)) as rig:
        answer = await rig.ask(STREAM)
        await rig.settled()

        assert answer.body == long + (b"" if inject == "true" else usage_event()) + DONE
        assert rig.outcomes() == {"ok": 1}
        assert rig.metric("gateway_completion_tokens_total") == 2


# --- D04, D10


async def broken(conn: Conn, _: Received) -> None:
    await conn.sse(chat_event("a"), chat_event("b"))
    conn.reset()


async def test_d04_a_backend_that_dies_in_mid_stream_is_reported_in_band() -> None:
    async with running(broken) as rig:
        answer = await rig.ask(STREAM)
        await rig.settled()

        assert answer.status == 200
        assert answer.body.startswith(chat_event("a") + chat_event("b"))
        error, done, rest = answer.body.split(b"\n\n")[2:]
        assert orjson.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        assert (done, rest) == (b"data: [DONE]", b"")
        assert rig.outcomes() == {"upstream_error": 1}


async def test_d04_the_connection_goes_on_after_an_in_band_error() -> None:
    async with running(broken) as rig:
        client = await rig.connect()
        for _ in range(2):
            await client.send(STREAM)
            assert (await client.answer()).body.endswith(DONE)
        client.close()


async def test_d04_the_openai_sdk_raises_an_api_error() -> None:
    async with running(broken) as rig:
        with pytest.raises(openai.APIError, match="mid-stream"):
            await sdk_chunks(rig)


async def test_d04_an_error_after_half_an_event_is_an_event_of_its_own() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"), b'data: {"id": "half')
        conn.reset()

    async with running(script, settings=("streams.inject_usage=false",)) as rig:
        answer = await rig.ask(STREAM)

    events = answer.body.split(b"\n\n")
    assert events[1] == b'data: {"id": "half'
    assert "error" in orjson.loads(events[2].removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", {"model": "m", "prompt": "p", "stream": True}, b"data: [DONE]"),
        ("/v1/messages", chat(stream=True, max_tokens=5), b"event: error\ndata: "),
        ("/v1/responses", {"model": "m", "input": "i", "stream": True}, b"event: response.failed"),
    ],
)
async def test_d04_each_api_hears_of_it_in_its_own_form(
    path: str, body: object, last: bytes
) -> None:
    async with running(broken) as rig:
        answer = await rig.ask(post(path, body))
        await rig.settled()

        assert answer.body.split(b"\n\n")[-2].startswith(last)
        assert rig.outcomes() == {"upstream_error": 1}


async def test_d04_the_anthropic_sdk_raises_an_api_error() -> None:
    start = (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":'
        b'"message","role":"assistant","content":[],"model":"m","stop_reason":null,'
        b'"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
    )

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(start)
        conn.reset()

    async with running(script) as rig, rig.anthropic() as sdk:
        asked: dict[str, Any] = chat(stream=True, max_tokens=5)
        stream = await sdk.messages.create(**asked)
        with pytest.raises(anthropic.APIError, match="mid-stream"):
            [event async for event in stream]


async def test_d04_the_openai_sdk_sees_a_failed_response() -> None:
    async def script(conn: Conn, _: Received) -> None:
        created = b'{"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}'
        await conn.sse(b"event: response.created\ndata: " + created + b"\n\n")
        conn.reset()

    async with running(script) as rig, rig.openai() as sdk:
        stream = await sdk.responses.create(model="m", input="i", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"


async def test_d04_a_stream_that_ends_cleanly_without_its_terminal_event_is_an_error() -> None:
    async with running(streaming(chat_event("a"))) as rig:
        answer = await rig.ask(STREAM)
        await rig.settled()

        assert b'"error"' in answer.body
        assert answer.body.endswith(DONE)
        assert rig.outcomes() == {"upstream_truncated": 1}


async def test_d04_a_broken_answer_that_is_no_stream_ends_by_cutting_the_connection() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        conn.reset()

    async with running(script) as rig:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await rig.ask(post("/v1/chat/completions", chat()))
        await rig.settled()
        assert rig.outcomes() == {"upstream_error": 1}


async def test_d10_nothing_is_tried_again_after_the_first_byte() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("once"))
        conn.reset()

    async with running(script, script) as rig:
        answer = await rig.ask(STREAM)

        assert sum(len(backend.received) for backend in rig.backends) == 1
        assert answer.body.count(b"once") == 1
        assert b'"error"' in answer.body


async def test_d10_nothing_is_tried_again_once_a_backend_may_have_read_the_request() -> None:
    async def script(conn: Conn, _: Received) -> None:
        conn.reset()

    async with running(script, script) as rig:
        answer = await rig.ask(STREAM)

        assert (answer.status, answer.code) == (502, "upstream_error")
        assert sum(len(backend.received) for backend in rig.backends) == 1


# --- D05, D06


async def silent_then_done(conn: Conn, _: Received) -> None:
    await conn.sse()
    await conn.gone()


async def test_d05_silence_is_broken_by_comments_and_ends_with_an_in_band_error() -> None:
    settings, clock = ("streams.keepalive_s=100", "timeouts.first_byte_s=600"), Clock()
    async with running(silent_then_done, settings=settings, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        for _ in range(3):
            clock.skip(100.0)
            assert await client.chunk() == KEEPALIVE
        clock.skip(300.0)
        answer = await client.body(head)
        client.close()
        await rig.settled()

        assert answer.body.startswith(b"data: ")
        error = answer.body.removeprefix(b"data: ")
        assert orjson.loads(error.partition(b"\n\n")[0])["error"]["code"]
        assert rig.outcomes() == {"upstream_timeout": 1}


async def test_d05_a_backend_silent_before_its_head_gets_comments_too() -> None:
    go_on = asyncio.Event()

    async def script(conn: Conn, request: Received) -> None:
        await go_on.wait()
        await ok_chat(conn, request)

    async with running(script, settings=("streams.keepalive_s=0.05",)) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        assert await client.chunk() == KEEPALIVE
        assert await client.chunk() == KEEPALIVE
        go_on.set()
        answer = await client.body(head)
        client.close()
        await rig.settled()

        assert answer.status == 200
        assert answer.header("content-type") == "text/event-stream"
        assert answer.header("x-gateway-attempts") == "1"
        assert answer.body.replace(KEEPALIVE, b"") == chat_event("a") + chat_event("b") + DONE
        assert rig.outcomes() == {"ok": 1}


async def test_d05_an_error_status_after_a_comment_becomes_an_in_band_error() -> None:
    go_on = asyncio.Event()
    error = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}

    async def script(conn: Conn, _: Received) -> None:
        await go_on.wait()
        await conn.json(error, 400)

    async with running(script, settings=("streams.keepalive_s=0.05",)) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        assert await client.chunk() == KEEPALIVE
        go_on.set()
        answer = await client.body(head)
        client.close()
        await rig.settled()

        events = answer.body.replace(KEEPALIVE, b"")
        assert orjson.loads(events.partition(b"\n\n")[0].removeprefix(b"data: ")) == error
        assert events.endswith(DONE)
        assert rig.outcomes() == {"upstream_4xx": 1}


async def test_d05_a_failure_after_a_comment_is_told_in_band() -> None:
    go_on = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        await go_on.wait()
        conn.reset()

    async with running(script, settings=("streams.keepalive_s=0.05",)) as rig:
        client = await rig.connect()
        for _ in range(2):  # the connection can go on
            go_on.clear()
            await client.send(STREAM)
            head = await client.head()
            assert await client.chunk() == KEEPALIVE
            go_on.set()
            answer = await client.body(head)
            events = answer.body.replace(KEEPALIVE, b"")
            assert b"upstream_error" in events
            assert events.endswith(DONE)
        await rig.at_rest()
        assert rig.outcomes() == {"upstream_error": 2}


async def test_d05_the_first_byte_limit_holds_after_comments() -> None:
    settings, clock = ("streams.keepalive_s=100", "timeouts.first_byte_s=600"), Clock()
    async with running(silent, settings=settings, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        await eventually(lambda: bool(rig.backends[0].received))
        clock.skip(100.0)
        head = await client.head()
        assert await client.chunk() == KEEPALIVE
        clock.skip(500.0)
        answer = await client.body(head)
        client.close()
        assert answer.status == 200
        assert b"first_byte_s" in answer.body
        assert rig.outcomes() == {"upstream_timeout": 1}


async def test_d05_an_answer_that_is_no_stream_is_not_opened_early() -> None:
    async with running(
        silent, settings=("streams.keepalive_s=0.05", "timeouts.first_byte_s=0.3")
    ) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat()))
        assert (answer.status, answer.code) == (504, "upstream_timeout")


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"why","type":"t"}}', b'{"detail":"x"}', b"<html>", b"", b"[1]"]
)
def test_d05_an_engines_late_refusal_is_told_in_the_apis_form(api: Api, body: bytes) -> None:
    events = refusal_events(api, 400, body)
    first = events.split(b"\n\n")[0].split(b"data: ")[1]
    told = orjson.loads(first)

    assert ("why" if b"why" in body else "400") in first.decode()
    if api is Api.MESSAGES:
        assert told["type"] == "error"
    elif api is Api.RESPONSES:
        assert told["response"]["status"] == "failed"
    else:
        assert "error" in told
        assert events.endswith(DONE)


async def test_d05_comments_are_off_by_default() -> None:
    clock = Clock()
    async with running(silent_then_done, clock=clock) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        await client.head()
        for _ in range(3):
            clock.skip(60.0)
            await asyncio.sleep(0.12)  # a tick looks at the deadlines
        client.close()
        assert not client.reader._buffer  # type: ignore[attr-defined]


async def test_d05_comments_never_fall_into_an_event() -> None:
    go_on = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        event = chat_event("whole")
        await conn.sse(event[:20])
        await go_on.wait()
        await conn.chunk(event[20:])
        await conn.chunk(DONE)
        await conn.end()

    settings = ("streams.keepalive_s=0.05", "streams.inject_usage=false")
    async with running(script, settings=settings) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        head = await client.head()
        while (first := await client.chunk()) == KEEPALIVE:
            pass  # of the time before the event began
        await asyncio.sleep(0.3)
        go_on.set()
        answer = await client.body(head)
        client.close()

    assert first + answer.body == chat_event("whole") + DONE


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
def test_d06_frames_of_ours_are_comments_or_events_with_data(api: Api) -> None:
    assert KEEPALIVE.startswith(b": ")
    assert KEEPALIVE.endswith(b"\n\n")
    for event in error_events(api, "line\none", "code").split(b"\n\n")[:-1]:
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        assert set(fields) <= {b"event", b"data"}
        assert fields[b"data"]
        if fields[b"data"] != b"[DONE]":
            assert isinstance(orjson.loads(fields[b"data"]), dict)


async def test_d06_sdks_read_past_our_comments() -> None:
    go_on = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse()
        await go_on.wait()
        await conn.chunk(chat_event("a"))
        await conn.chunk(DONE)
        await conn.end()

    async with running(script, settings=("streams.keepalive_s=0.02",)) as rig:
        reading = asyncio.ensure_future(sdk_chunks(rig))
        await eventually(lambda: any(e._relay and e._relay.written_at for e in rig.handler.live))
        go_on.set()
        assert [c.choices[0].delta.content for c in await reading] == ["a"]


# --- D07, D08: for the gateway no time passes, so that no tick or limit of it does the noticing


async def silent(conn: Conn, _: Received) -> None:
    await conn.gone()


async def leave(client: Client, *, reset: bool) -> None:
    client.reset() if reset else client.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_d07_a_client_that_leaves_before_the_first_byte_stops_the_backend(
    stream: bool, reset: bool
) -> None:
    async with running(silent, clock=Still()) as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat(stream=stream)))
        await eventually(lambda: bool(rig.backends[0].received))
        await leave(client, reset=reset)
        await eventually(lambda: rig.backends[0].served == 1, within_s=1.0)
        await rig.at_rest()

        assert rig.outcomes() == {"client_closed": 1}
        assert rig.metric("gateway_upstream_attempts_total", result="aborted") == 1
        assert rig.metric("gateway_upstream_attempts_total") == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_d07_a_client_that_leaves_after_pipelining_far_ahead_stops_the_backend(
    reset: bool,
) -> None:
    """Its socket is no longer read, so its leaving must be noticed otherwise."""
    async with running(silent, clock=Still()) as rig:
        client = await rig.connect()
        await client.send(STREAM * 40)
        await eventually(lambda: bool(rig.backends[0].received))
        await leave(client, reset=reset)
        await eventually(lambda: rig.backends[0].served == 1, within_s=1.5)
        await rig.at_rest()
        assert rig.outcomes() == {"client_closed": 1}


async def test_d07_a_client_that_leaves_while_we_connect_leaves_nothing_behind() -> None:
    async with running(settings=("poll.interval_s=60",)) as rig:
        with black_hole(rig):
            client = await rig.connect()
            await client.send(STREAM)
            await eventually(lambda: bool(rig._connecting()))
            client.close()
            await rig.at_rest()
        assert rig.outcomes() == {"client_closed": 1}


@pytest.mark.parametrize("reset", [False, True])
async def test_d08_a_client_that_leaves_in_mid_stream_stops_the_backend(reset: bool) -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(*(chat_event(f"e{n}") for n in range(3)))
        await conn.gone()

    async with running(script, clock=Still()) as rig:
        client = await rig.connect()
        await client.send(STREAM)
        await client.head()
        for _ in range(3):
            await client.chunk()
        await leave(client, reset=reset)
        await eventually(lambda: rig.backends[0].served == 1, within_s=1.0)
        await rig.at_rest()

        assert rig.outcomes() == {"client_closed": 1}


async def test_d08_the_openai_sdk_closing_its_stream_stops_the_backend() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.gone()

    async with running(script, clock=Still()) as rig, rig.openai() as sdk:
        stream = await sdk.chat.completions.create(**chat(stream=True))
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: rig.backends[0].served == 1, within_s=1.0)
        await rig.at_rest()


async def test_d08_a_client_that_half_closes_has_left_even_when_it_does_not_read() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse()
        with contextlib.suppress(ConnectionError):
            while True:
                await conn.chunk(chat_event("x" * 60_000))

    async with running(script, clock=Still()) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(STREAM)
        await eventually(lambda: any(e._relay and e._relay.paused_at for e in rig.handler.live))
        client.writer.write_eof()
        await eventually(lambda: rig.backends[0].served == 1, within_s=1.0)
        await rig.at_rest()
        client.close()


# --- D11, D12, D13


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
async def test_d11_a_usage_chunk_reaches_only_who_asked(
    options: dict[str, Any], wanted: bool
) -> None:
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(stream=True, **options)))
        chunks = await sdk_chunks(rig, **options)

        plain = chat_event("a") + chat_event("b")
        assert answer.body == plain + (usage_event() if wanted else b"") + DONE
        assert all(chunk.choices for chunk in chunks) is not wanted
        explicit = "include_usage" in (options.get("stream_options") or {})
        sent = orjson.loads(rig.backends[0].received[0].body)
        if explicit:
            assert sent["stream_options"] == options["stream_options"]
        else:
            assert sent["stream_options"] == {"include_usage": True}


async def test_d11_no_coding_may_hide_a_usage_chunk_we_asked_for() -> None:
    async with running() as rig:
        await rig.ask(post("/v1/chat/completions", chat(stream=True), "Accept-Encoding: gzip"))
        await rig.ask(post("/v1/chat/completions", chat(), "Accept-Encoding: gzip, br"))

        injected, plain = rig.backends[0].received
        assert injected.header("accept-encoding") == "identity"
        assert plain.header("accept-encoding") == "gzip, br"


async def test_d12_unknown_delta_fields_cross_unchanged() -> None:
    events = [
        b'data: {"choices":[{"index":0,"delta":{"zzz":1e400,"reasoning":"r"},"x":[ ]}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"\\ud83c\\udf0d"}}] , "y" : 1}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_items":[{"a":9007199254740993}]}}]}\n\n',
        DONE,
    ]
    async with running(streaming(*events)) as rig:
        assert (await rig.ask(STREAM)).body == b"".join(events)


async def test_d13_interleaved_tool_call_deltas_cross_unchanged() -> None:
    def delta(index: int, **call: object) -> bytes:
        calls = [{"index": index, **call}]
        data = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
        return b"data: " + orjson.dumps(data) + b"\n\n"

    events = [
        delta(0, id="call_a", function={"name": "f", "arguments": ""}),
        delta(1, id="call_b", function={"name": "g", "arguments": ""}),
        *(delta(n % 2, function={"arguments": part}) for n, part in enumerate("{}{}")),
        DONE,
    ]
    async with running(streaming(*events)) as rig:
        assert (await rig.ask(STREAM)).body == b"".join(events)


# --- D15


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_d15_an_error_answer_to_a_stream_request_crosses_as_it_is(status: int) -> None:
    body = orjson.dumps({"error": {"message": "é", "type": "t", "param": None, "code": status}})

    async def script(conn: Conn, _: Received) -> None:
        await conn.json(body, status)

    async with running(script, script) as rig:
        answer = await rig.ask(STREAM)
        await rig.settled()

        assert (answer.status, answer.body) == (status, body)
        assert answer.header("content-type") == "application/json"
        assert sum(len(backend.received) for backend in rig.backends) == 1
        expected = "upstream_4xx" if status < 500 else "upstream_5xx"
        assert rig.outcomes() == {expected: 1}


async def test_d15_an_error_the_engine_reports_in_band_is_no_success() -> None:
    error = b'data: {"error": {"message": "CUDA", "type": "x", "code": 500}}\n\n'
    async with running(streaming(chat_event("a"), error, DONE)) as rig:
        answer = await rig.ask(STREAM)
        await rig.settled()

        assert answer.body == chat_event("a") + error + DONE
        assert rig.outcomes() == {"upstream_error": 1}
