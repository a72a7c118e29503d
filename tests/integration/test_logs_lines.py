"""What the line of a request says, over real sockets."""

import asyncio
import io

import orjson

from gateway.config.schema import LogConfig
from gateway.telemetry.logs import Logs, setup
from tests.integration.rig import Conn, Received, Rig, chat, eventually, ok_chat, post, running
from tests.integration.test_queue import TIGHT, ask, waiting

CHAT = "/v1/chat/completions"


def listen(rig: Rig, **settings: object) -> tuple[list[dict[str, object]], Logs]:
    """Return a list that gets every request's line, read back."""
    stream = io.BytesIO()
    logs = setup(LogConfig(**settings), stream)  # type: ignore[arg-type]
    lines: list[dict[str, object]] = []
    write = logs._writer.write

    def keep(line: bytes) -> None:
        lines.append(orjson.loads(line))
        write(line)

    logs._writer.write = keep  # type: ignore[method-assign]
    rig.app.telemetry.log = logs.access
    return lines, logs


async def test_a_line_has_what_was_asked_done_and_paid() -> None:
    async def late(conn: Conn, request: Received) -> None:
        await asyncio.sleep(0.02)  # the line has milliseconds
        await ok_chat(conn, request)

    async with running(late) as rig:
        lines, logs = listen(rig)
        await rig.ask(post(CHAT, chat(stream=True), "x-request-id: mine"))
        await rig.settled()
        logs.close()

    (line,) = (line for line in lines if line["event"] == "request")
    told = {
        "request_id": "mine",
        "class": "chat",
        "model": "m",
        "backend": "backend-1",
        "status": 200,
        "outcome": "ok",
        "attempts": 1,
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "uncached_tokens": 10,
        "queue_s": 0.0,
        "stream": True,
        "trace_id": None,
    }
    assert {name: line[name] for name in told} == told
    assert isinstance(line["ttft_s"], float)
    assert isinstance(line["total_s"], float)
    assert 0.01 < line["ttft_s"] <= line["total_s"]


async def test_who_is_refused_at_the_head_is_named() -> None:
    bad_method = b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    async with running() as rig:
        lines, logs = listen(rig)
        assert (await rig.ask(post("/v1/nothing", {}))).status == 404
        assert (await rig.ask(bad_method)).status >= 400
        await rig.settled()
        logs.close()

    requests = [line for line in lines if line["event"] == "request"]
    assert [line["client"] for line in requests] == ["127.0.0.1"] * 2


async def test_who_leaves_the_queue_has_waited() -> None:
    go = asyncio.Event()

    async def held(conn: Conn, request: Received) -> None:
        await go.wait()
        await ok_chat(conn, request)

    async with running(held, settings=TIGHT) as rig:
        lines, logs = listen(rig)
        first, second = await rig.connect(), await rig.connect()
        await first.send(ask("first"))
        await eventually(lambda: len(rig.backends[0].received) == 1)
        await second.send(ask("second"))
        await eventually(lambda: waiting(rig) == 1)
        second.close()
        await eventually(lambda: len(rig.handler.live) == 1)
        go.set()
        await first.answer()
        await rig.settled()
        logs.close()

    waits = {line["request_id"]: line["queue_s"] for line in lines if line["event"] == "request"}
    assert waits["first"] == 0.0
    assert isinstance(waits["second"], float)
    assert waits["second"] > 0.0
