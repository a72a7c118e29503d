"""Who used how many tokens: metrics and the usage log of a running gateway agree."""

import asyncio
from pathlib import Path

import orjson

from tests.integration.rig import Conn, Received, chat, eventually, get, ok_chat, post, running
from tests.integration.test_key_limits import AUTH, keyed
from tests.integration.test_queue import CHAT, Held, ask, begin


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(text) for text in path.read_bytes().splitlines()]


async def test_d51_streams_and_whole_answers_are_counted_alike_and_refusals_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "usage.jsonl"
    settings = keyed("requests_per_minute: 2", f"usage_log.path={path}")
    async with running(ok_chat, settings=settings) as rig:
        await rig.ask(post(CHAT, chat("hi", stream=True), AUTH))
        await rig.ask(post(CHAT, chat("hi"), AUTH))
        refused = await rig.ask(post(CHAT, chat("hi"), AUTH))
        await rig.settled()

        assert refused.status == 429
        tokens = "gateway_key_tokens_total"
        assert rig.metric(tokens, key="team", kind="prompt") == 20
        assert rig.metric(tokens, key="team", kind="completion") == 4
        assert rig.metric("gateway_key_requests_total", key="team", outcome="ok") == 2
        assert rig.metric("gateway_key_requests_total", outcome="rejected_rate") == 1
    written = lines(path)  # the gateway has stopped: all of it is there
    assert [(line["key"], line["outcome"]) for line in written] == [("team", "ok")] * 2
    assert [line["prompt_tokens"] for line in written] == [10, 10]
    assert [line["completion_tokens"] for line in written] == [2, 2]
    assert not any(line["estimated"] for line in written)
    assert "sk-team" not in path.read_text()


async def test_d51_a_client_that_leaves_has_used_what_was_sent_for_it(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    backend = Held()
    async with running(backend, settings=(f"usage_log.path={path}",)) as rig:
        client = await rig.connect()
        await client.send(ask("leaver", "word " * 100))
        await backend.saw(1)
        client.reset()
        await rig.settled()
        backend.go.release()
    (line,) = lines(path)
    assert (line["outcome"], line["key"], line["completion_tokens"]) == ("client_closed", None, 0)
    assert int(str(line["prompt_tokens"])) > 50


async def test_what_only_waited_used_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    backend = Held()
    settings = keyed("streams: 1", f"usage_log.path={path}")
    async with running(backend, settings=settings) as rig:
        first = await begin(rig, ask("first", "hi", AUTH))
        await backend.saw(1)
        client = await rig.connect()
        await client.send(ask("leaver", "hi", AUTH))
        await eventually(lambda: len(rig.handler.live) == 2)
        client.reset()
        await eventually(lambda: len(rig.handler.live) == 1)
        backend.go.release()
        await asyncio.gather(*first)
        await rig.settled()
    assert [line["request_id"] for line in lines(path)] == ["first"]


async def test_a_response_that_is_read_again_is_not_paid_again(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"

    async def script(conn: Conn, _: Received) -> None:
        usage = {"input_tokens": 10, "output_tokens": 2}
        await conn.json({"id": "resp_1", "object": "response", "usage": usage})

    async with running(script, settings=(f"usage_log.path={path}",)) as rig:
        await rig.ask(post("/v1/responses", {"model": "m", "input": "hi"}))
        await rig.settled()
        again = await rig.ask(get("/v1/responses/resp_1"))
        assert again.status == 200
        await rig.settled()
    (line,) = lines(path)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (10, 2)


async def test_status_says_how_full_and_what_w_is() -> None:
    async with running(ok_chat, settings=("queue.adaptive=true", "queue.owed_s=0.4")) as rig:
        row = rig.handler.dispatcher.backends(rig.handler.clock())[0]
        assert row.owed_limit_s == 0.4
        assert row.owed_limit_reason == "no sign against the configured value"
        assert rig.metric("gateway_backend_saturation_ratio") == 0
        assert rig.metric("gateway_pool_saturation_ratio", model="m") == 0
