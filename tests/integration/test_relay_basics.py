import asyncio

from tests.integration.rig import (
    DONE,
    Conn,
    Received,
    chat,
    chat_event,
    post,
    running,
    usage_event,
)


async def test_a_chat_answer_crosses_with_the_contract_headers() -> None:
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat()))

        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "ab"
        assert len(answer.all("x-request-id")) == 1
        assert answer.header("x-gateway-backend") == "backend-1"
        assert answer.header("x-gateway-class") == "chat"
        assert answer.header("x-gateway-policy") == "cost"
        hit, _, prompt = (answer.header("x-gateway-prefix") or "").partition("/")
        assert int(hit) == 0
        assert int(prompt) > 0
        assert answer.header("x-gateway-queue-ms") == "0"
        assert answer.header("x-gateway-attempts") == "1"


async def test_a_stream_crosses_byte_for_byte() -> None:
    events = [chat_event("é 日 🌍", zzz=1), chat_event("b"), DONE]

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(*events)
        await conn.end()

    async with running(script) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(stream=True)))

        assert answer.body == b"".join(events)
        assert answer.header("x-accel-buffering") == "no"
        assert "no-cache" in (answer.header("cache-control") or "")
        assert answer.header("content-length") is None
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        await rig.settled()
        assert rig.metric("gateway_requests_total", outcome="ok") == 1


async def test_a_client_that_closes_on_the_last_event_had_its_whole_answer() -> None:
    held = asyncio.Event()

    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"), usage_event(prompt=7, completion=1), DONE)
        await held.wait()  # the end of the chunked body is still to come

    async with running(script) as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat(stream=True)))
        await client.head()
        while await client.chunk() != DONE:
            pass
        client.close()
        await rig.settled()
        held.set()

        assert rig.metric("gateway_requests_total", outcome="ok") == 1
        assert rig.metric("gateway_requests_total", outcome="client_closed") == 0
        assert rig.metric("gateway_upstream_attempts_total", result="ok") == 1
        assert rig.metric("gateway_prompt_tokens_total") == 7
