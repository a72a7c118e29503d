"""SIGTERM and Ctrl-C on a real process (case D62); what requests see of it."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from gateway.tasks import spawn
from tests.integration.rig import (
    DONE,
    Client,
    Conn,
    Received,
    chat,
    chat_event,
    closed,
    eventually,
    get,
    post,
    running,
)
from tests.integration.scripts import (
    CHAT,
    PLAIN,
    Gate,
    finished,
    one_waits,
    streaming,
    uploading,
)
from tests.integration.serve_rig import WAIT_S, Served, scripted, served


async def not_ready(gateway: Served) -> None:
    """Wait until the admin listener says so; it has no other way to be told when."""
    async with asyncio.timeout(WAIT_S):
        while (await gateway.ask(get("/readyz"), gateway.admin)).status != 503:
            pass


async def broken_off(stream: Client) -> None:
    """Read an error and the end in the stream's own form."""
    text = b"".join(await finished(stream))
    assert b"shutting down" in text
    assert text.endswith(DONE)


async def test_d62_streams_outlive_sigterm_and_the_process_ends_well() -> None:
    gate = Gate()
    delay = ("--set", "timeouts.drain_delay_s=3600")
    async with scripted(gate) as backends, served(*delay, backends=backends) as gateway:
        streams = [await streaming(gateway) for _ in range(5)]
        kept = await gateway.connect()
        await kept.send(PLAIN)
        assert (await kept.answer()).header("connection") != "close"

        gateway.signal()
        await not_ready(gateway)
        assert (await gateway.ask(get("/readyz"))).status == 503  # and it accepts
        assert (await gateway.ask(get("/healthz"))).status == 200
        fresh = await gateway.ask(PLAIN)
        assert (fresh.status, fresh.header("connection")) == (200, "close")
        await kept.send(PLAIN)
        answer = await kept.answer()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await kept.at_eof()

        gate.open.set()
        for stream in streams:
            assert DONE in await finished(stream)
            assert await stream.at_eof()
        gate.open.clear()
        late = await streaming(gateway)
        gateway.signal()  # a second one waits for nothing
        await broken_off(late)
        assert await gateway.ended() == 0


async def test_after_the_delay_the_listener_is_closed_and_streams_go_on() -> None:
    gate = Gate()
    async with (
        scripted(gate) as backends,
        served("--set", "timeouts.drain_delay_s=0.2", backends=backends) as gateway,
    ):
        stream = await streaming(gateway)
        gateway.signal()
        await gateway.refuses()
        assert gateway.process.returncode is None
        gate.open.set()
        assert DONE in await finished(stream)
        assert await gateway.ended() == 0


async def test_ctrl_c_waits_for_no_load_balancer_and_a_second_one_for_no_stream() -> None:
    gate = Gate()
    settings = ("--set", "timeouts.drain_delay_s=3600", "--set", "timeouts.drain_s=3600")
    async with scripted(gate) as backends, served(*settings, backends=backends) as gateway:
        stream = await streaming(gateway)
        gateway.signal(signal.SIGINT)
        await gateway.refuses()
        gateway.signal(signal.SIGINT)
        await broken_off(stream)
        assert await gateway.ended() == 0


async def test_what_is_left_after_the_drain_time_gets_its_error_in_band(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "radixgate.stopping")
    gate = Gate()
    async with running(gate, settings=("timeouts.drain_s=0.1",)) as rig:
        stream = await streaming(rig)
        await rig.app.stop()
        await broken_off(stream)
        said = [line.getMessage() for line in caplog.records if line.name == "radixgate.stopping"]

    assert said == [
        "stopping: serving for 0 s more, then what is open has 0.1 s",
        "draining, requests open: 1",
        "requests that timeouts.drain_s was too short for: 1",
    ]


async def test_a_request_on_a_kept_socket_is_told_draining_once_nothing_new_may_begin() -> None:
    gate = Gate()
    async with running(gate, settings=("timeouts.drain_s=3600",)) as rig:
        await streaming(rig)
        kept = await rig.connect()
        await kept.send(PLAIN[:-5])  # begun before, complete after
        await eventually(lambda: any(c._request is not None for c in rig.app._listener.connections))
        stopping = spawn(rig.app.stop(), name="stop")
        await eventually(lambda: rig.handler.draining)
        await kept.send(PLAIN[-5:])
        answer = await kept.answer()
        assert (answer.status, answer.code) == (503, "draining")
        assert answer.header("connection") == "close"
        assert answer.header("retry-after")
        assert await kept.at_eof()
        gate.open.set()
        await stopping


async def test_what_is_uploaded_when_nothing_else_is_left_is_waited_for_and_told_draining() -> None:
    async with running(Gate(), settings=("timeouts.drain_s=3600",)) as rig:
        slow = await uploading(rig, PLAIN[:-5])
        stopping = spawn(rig.app.stop(), name="stop")
        await eventually(rig.handler.quiet.is_set)
        await slow.send(PLAIN[-5:])
        answer = await slow.answer()
        assert (answer.status, answer.code) == (503, "draining")
        assert await slow.at_eof()
        await stopping


@pytest.mark.parametrize("sent", [PLAIN[:-5], PLAIN[:20]], ids=["body", "head"])
async def test_an_upload_that_outlasts_the_drain_time_is_answered_not_cut(sent: bytes) -> None:
    async with running(Gate(), settings=("timeouts.drain_s=0",)) as rig:
        slow = await uploading(rig, sent)
        stopping = spawn(rig.app.stop(), name="stop")
        answer = await slow.answer()
        assert (answer.status, answer.code) == (503, "draining")
        assert answer.header("retry-after")
        assert await slow.at_eof()
        await slow.send(PLAIN[-5:])  # one that goes on sending is not reset before it has read
        await closed(slow.writer)
        await stopping


async def test_a_second_signal_answers_what_is_uploaded() -> None:
    async with running(Gate(), settings=("timeouts.drain_s=3600",)) as rig:
        slow = await uploading(rig, PLAIN[:-5])
        stopping = spawn(rig.app.stop(), name="stop")
        await eventually(rig.handler.quiet.is_set)
        rig.app.hurry()
        answer = await slow.answer()
        assert (answer.status, answer.code) == (503, "draining")
        await closed(slow.writer)
        await stopping


async def test_a_thread_that_hangs_in_a_reload_does_not_keep_the_process(tmp_path: Path) -> None:
    """What a file on a dead mount does: here a pipe whose other end says nothing."""
    async with scripted() as backends:
        file = tmp_path / "g.yaml"
        file.write_text(f"backends: [{{name: a, url: '{backends[0].url}'}}]\n")
        async with served("--set", "timeouts.drain_delay_s=0", file=str(file)) as gateway:
            file.unlink()
            os.mkfifo(file)
            gateway.signal(signal.SIGHUP)
            writing = await until_read(file)
            gateway.signal()
            assert await gateway.ended() == 0
            os.close(writing)


async def until_read(pipe: Path) -> int:
    """Wait until somebody reads from a pipe; return a descriptor that holds him there."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody does
                await asyncio.sleep(0.01)


async def test_a_second_signal_ends_a_stop_that_saves_to_a_dead_disk() -> None:
    async with running(Gate()) as rig:
        saving = asyncio.Event()

        async def hang() -> bool:
            saving.set()
            await asyncio.Event().wait()
            return True

        rig.app._state.save = hang  # type: ignore[method-assign]
        stopping = spawn(rig.app.stop(), name="stop")
        await asyncio.wait_for(saving.wait(), WAIT_S)
        rig.app.hurry()
        await asyncio.wait_for(stopping, WAIT_S)


async def test_a_request_that_has_just_come_is_answered_not_reset() -> None:
    """Closing a socket that holds what nobody has read resets it: its client would see no answer."""
    gate = Gate()
    async with running(gate, settings=("timeouts.drain_s=3600",)) as rig:
        await streaming(rig)
        kept = await rig.connect()
        await kept.send(PLAIN)
        assert (await kept.answer()).status == 200
        (mine,) = [c for c in rig.app._listener.connections if c._exchange is None]
        mine.transport.pause_reading()  # it is in the kernel, and stays there
        await kept.send(PLAIN)
        await eventually(lambda: mine._polled(1))
        stopping = spawn(rig.app.stop(), name="stop")
        await eventually(lambda: rig.handler.draining)
        mine.transport.resume_reading()
        answer = await kept.answer()
        assert (answer.status, answer.code) == (503, "draining")
        gate.open.set()
        await stopping


async def test_requests_that_wait_at_the_gateway_are_served_while_it_drains() -> None:
    gate = Gate()
    async with running(gate, settings=("timeouts.drain_s=3600", "queue.owed_s=0.001")) as rig:
        long = chat("x" * 200_000, stream=True)
        first, second = await rig.connect(), await rig.connect()

        async def hold(conn: Conn, request: Received) -> None:
            if rig.backends[0].received[-1] is request and len(rig.backends[0].received) == 1:
                await gate.open.wait()
            await conn.sse(chat_event("a"), DONE)
            await conn.end()

        rig.backends[0].script = hold
        await first.send(post(CHAT, long))
        await eventually(lambda: len(rig.backends[0].received) == 1)
        await second.send(post(CHAT, chat("y" * 200_000, stream=True)))
        await one_waits(rig)
        stopping = spawn(rig.app.stop(), name="stop")
        await eventually(lambda: rig.handler.draining)
        gate.open.set()
        for client in (first, second):
            answer = await client.answer()
            assert answer.status == 200
            assert answer.body.endswith(DONE)
        await stopping
        assert rig.outcomes() == {"ok": 2}


async def test_requests_that_still_wait_when_the_drain_time_is_over_are_told_so() -> None:
    async def silent(conn: Conn, _: Received) -> None:
        await conn.gone()

    async with running(silent, settings=("timeouts.drain_s=0.2", "queue.owed_s=0.001")) as rig:
        clients = [await rig.connect() for _ in range(2)]
        for number, client in enumerate(clients):
            await client.send(post(CHAT, chat(f"{number}" * 200_000, stream=True)))
        await one_waits(rig)
        await rig.app.stop()
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.code) == (503, "draining")
            assert answer.header("retry-after")
