"""A stream that waits for a backend: comments keep its client's patience, errors come in-band."""

import asyncio

import openai
import orjson
import pytest

from tests.integration.rig import DONE, Answer, Rig, chat, eventually, ok_chat, post, running
from tests.integration.test_queue import CHAT, TIGHT, Held, ask, begin, lapse, waiting

KEEPING = (*TIGHT, "streams.keepalive_s=0.05")
COMMENT = b": keep-alive\n\n"


async def kept_in_vain(rig: Rig, request: bytes) -> Answer:
    """Ask; once a comment has come, let the time of all that wait be over."""
    client = await rig.connect()
    await client.send(request)
    head = await client.head()
    assert await client.chunk() == COMMENT
    lapse(rig)
    answer = await client.body(head)
    client.close()
    return answer


async def test_a_stream_that_waits_gets_comments_and_then_its_answer() -> None:
    backend = Held()
    async with running(backend, settings=KEEPING) as rig:
        first = await begin(rig, ask("first"))
        await backend.saw(1)
        client = await rig.connect()
        await client.send(ask("second"))
        head = await client.head()
        assert head.status == 200
        assert head.header("content-type") == "text/event-stream"
        assert head.header("x-gateway-class") == "chat"
        assert head.header("x-gateway-backend") is None  # nobody knows yet
        assert [await client.chunk(), await client.chunk()] == [COMMENT, COMMENT]
        assert waiting(rig) == 1

        for _ in range(2):
            backend.go.release()
        rest = b""
        while part := await client.chunk():
            rest += part
        assert rest.replace(COMMENT, b"").endswith(DONE)
        assert b'"content":"a"' in rest
        await asyncio.gather(*first)
        await rig.settled()
        assert rig.outcomes() == {"ok": 2}
        await rig.at_rest()


async def test_a_wait_in_vain_is_told_in_band_and_counted_as_expired() -> None:
    backend = Held()
    async with running(backend, settings=KEEPING) as rig:
        first = await begin(rig, ask("first"))
        answer = await kept_in_vain(rig, ask("late"))

        assert answer.status == 200
        events = [event for event in answer.body.split(b"\n\n") if event.startswith(b"data: ")]
        error = orjson.loads(events[0][6:])["error"]
        assert error["code"] == "queue_timeout"
        assert events[1:] == [b"data: [DONE]"]
        backend.go.release()
        await asyncio.gather(*first)
        await rig.settled()
        assert rig.outcomes() == {"ok": 1, "expired": 1}
        await rig.at_rest()


@pytest.mark.parametrize(
    ("path", "mark"),
    [("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: response.failed\n")],
)
async def test_each_api_is_told_in_its_own_form(path: str, mark: bytes) -> None:
    async with running(ok_chat, settings=KEEPING) as rig:
        dispatcher, clock = rig.handler.dispatcher, rig.handler.clock
        dispatcher.set_up(dispatcher.backends(clock())[0].name, False, clock())
        body = chat("hi", stream=True, max_tokens=5, input="hi")
        answer = await kept_in_vain(rig, post(path, body))

        assert answer.status == 200
        assert mark in answer.body


async def test_the_sdk_reads_through_the_comments_and_raises_the_error_in_band() -> None:
    backend = Held()
    async with running(backend, settings=KEEPING) as rig, rig.openai() as sdk:
        first = await begin(rig, ask("first"))
        stream = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x " * 4000}], stream=True
        )
        lapse(rig)  # the stream is open: a comment has come
        with pytest.raises(openai.APIError, match="could start this within"):
            async for _ in stream:
                pass
        backend.go.release()
        await asyncio.gather(*first)


async def test_a_client_that_leaves_while_it_is_kept_frees_its_place_and_used_nothing() -> None:
    backend = Held()
    async with running(backend, settings=KEEPING) as rig:
        first = await begin(rig, ask("first"))
        client = await rig.connect()
        await client.send(ask("leaver"))
        assert (await client.head()).status == 200
        client.reset()
        await eventually(lambda: waiting(rig) == 0)
        backend.go.release()
        await asyncio.gather(*first)
        await rig.settled()
        assert backend.came == ["first"]
        assert rig.outcomes() == {"ok": 1, "client_closed": 1}
        await rig.at_rest()


async def test_who_asked_for_no_stream_waits_in_silence() -> None:
    backend = Held()
    async with running(backend, settings=KEEPING) as rig:
        first = await begin(rig, ask("first"))
        second = await begin(rig, post(CHAT, chat("second " + "word " * 1600)))
        await eventually(lambda: waiting(rig) == 1)
        await asyncio.sleep(0.2)  # four intervals in which a stream would have been opened
        for _ in range(2):
            backend.go.release()
        answers = await asyncio.gather(*first, *second)
        assert answers[1].json["choices"][0]["message"]["content"] == "ab"
        assert answers[1].header("content-type") == "application/json"


async def test_the_end_of_the_gateway_is_told_in_band() -> None:
    backend = Held()
    async with running(backend, settings=(*KEEPING, "timeouts.drain_s=0")) as rig:
        first = await begin(rig, ask("first"))
        client = await rig.connect()
        await client.send(ask("second"))
        await client.head()
        await rig.app.stop()
        rest = b""
        while part := await client.chunk():
            rest += part
        assert b'"draining"' in rest
        await asyncio.gather(*first)
