"""Start, reload and refusal of the whole process."""

import asyncio
import gc
import signal
import socket
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from gateway import tasks
from tests.integration.rig import Conn, Received, chat, eventually, get, post, running

CHAT = "/v1/chat/completions"


def serve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "gateway.cli.main", "serve", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


async def test_before_a_backend_has_told_its_models_nothing_is_not_found(tmp_path: Path) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        file = tmp_path / "g.yaml"
        file.write_text(f"backends: [{{url: 'http://127.0.0.1:{hole.getsockname()[1]}'}}]\n")
        async with running(file=str(file)) as rig:
            answer = await rig.ask(post(CHAT, {**chat(), "model": "later"}))
            assert (answer.status, answer.code) == (503, "no_backend")
            assert answer.header("retry-after")
            assert (await rig.ask(post(CHAT, chat()))).status == 200


async def test_once_all_have_told_an_unknown_model_is_not_found() -> None:
    async with running() as rig:
        answer = await rig.ask(post(CHAT, {**chat(), "model": "never"}))
        assert (answer.status, answer.code) == (404, "model_not_found")


async def test_a_reload_names_what_it_cannot_apply(tmp_path: Path) -> None:
    async with running() as plain:
        file = tmp_path / "g.yaml"
        file.write_text(f"backends: [{{url: '{plain.backends[0].url}'}}]\n")
        async with running(file=str(file)) as rig:
            text = file.read_text()
            file.write_text(text + "listen: {host: 127.0.0.2}\n")
            result = await rig.app.reload()
            assert result.ok
            assert result.needs_restart == ("listen.host",)
            file.write_text(text + "nonsense: 1\n")
            assert not (await rig.app.reload()).ok
            assert (await rig.ask(post(CHAT, chat()))).status == 200


async def test_a_reload_adds_and_removes_backends_under_traffic(tmp_path: Path) -> None:
    async with running() as plain, running() as other:
        first, second = plain.backends[0].url, other.backends[0].url
        file = tmp_path / "g.yaml"
        file.write_text(f"backends: [{{name: a, url: '{first}'}}]\n")
        async with running(file=str(file), models=[["unasked"]]) as rig:
            assert (await rig.ask(post(CHAT, chat()))).header("x-gateway-backend") == "a"
            file.write_text(f"backends: [{{name: b, url: '{second}'}}]\n")
            assert (await rig.app.reload()).ok
            await eventually(lambda: bool(rig.app.dispatcher.models))
            await eventually(lambda: not rig.handler.awaiting_models)
            assert (await rig.ask(post(CHAT, chat()))).header("x-gateway-backend") == "b"
            assert 'backend="a"' not in rig.metrics()


async def test_stopping_delivers_answers_that_a_slow_client_has_not_read() -> None:
    size = 8_000_000

    async def big(conn: Conn, _: Received) -> None:
        await conn.json(b'"' + b"x" * size + b'"')

    async with running(big) as rig:
        client = await rig.connect()
        await client.send(post(CHAT, chat()))
        await eventually(lambda: rig.metric("gateway_requests_total") == 1)
        stopping = tasks.spawn(rig.app.stop(), name="stop")
        answer = await client.answer()
        await stopping

    assert len(answer.body) == size + 2


async def test_at_the_end_of_the_drain_unanswered_requests_are_told_draining() -> None:
    async def silent(conn: Conn, _: Received) -> None:
        await conn.gone()

    async with running(silent, settings=("timeouts.drain_s=0.1",)) as rig:
        client = await rig.connect()
        await client.send(post(CHAT, chat()))
        await eventually(lambda: bool(rig.backends[0].received))
        await rig.app.stop()
        answer = await client.answer()

    assert (answer.status, answer.code) == (503, "draining")


async def test_a_refused_reload_leaves_the_addresses_alone(tmp_path: Path) -> None:
    async with running() as plain:
        port = plain.backends[0].port
        file = tmp_path / "g.yaml"
        good = f"backends: [{{name: d, dns: localhost, port: {port}}}]\n"
        file.write_text(good)
        async with running(file=str(file), models=[["unasked"]]) as rig:
            before = dict(rig.app._found)
            missing = tmp_path / "none.json"
            backends = "[{url: 'http://127.0.0.1:9'}]"
            file.write_text(
                f"models: [{{name: x, tokenizer: '{missing}', backends: {backends}}}]\n"
            )
            assert not (await rig.app.reload()).ok
            rig.app._on_models(rig.app._catalog.served())

            assert dict(rig.app._found) == before
            assert before[f"dns:localhost:{port}"]
            assert (await rig.ask(post(CHAT, chat()))).status == 200


async def test_drained_backends_make_the_gateway_not_ready() -> None:
    async with running() as rig:
        assert (await rig.ask(get("/readyz"))).status == 200
        rig.app.dispatcher.drain("backend-1")
        assert (await rig.ask(get("/readyz"))).status == 503


async def test_a_signal_before_the_start_ends_in_order() -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()  # accepts, never answers: the start waits for its probe
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        argv = [sys.executable, "-m", "gateway.cli.main", "serve", "--backend", url]
        process = await asyncio.create_subprocess_exec(*argv, "--port", "0", "--admin-port", "0")
        accepted = asyncio.get_running_loop().run_in_executor(None, hole.accept)
        conn, _ = await accepted
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 60)
        conn.close()

    assert code == 0


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
def test_an_address_in_use_is_one_line_and_code_1(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        free = {"--port": "0", "--admin-port": "0"} | {which: port}
        options = [word for pair in free.items() for word in pair]
        ended = serve("--backend", "http://127.0.0.1:9", *options)

    assert ended.returncode == 1
    assert (
        ended.stderr.strip().splitlines()[-1].startswith("radixgate: cannot listen on 127.0.0.1:")
    )
    assert "Traceback" not in ended.stderr
    assert "Unclosed" not in ended.stderr


def test_a_tokenizer_that_does_not_load_is_one_line_and_code_2(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    missing = tmp_path / "tokenizer.json"
    backends = "[{url: 'http://127.0.0.1:9'}]"
    file.write_text(f"models: [{{name: m, tokenizer: '{missing}', backends: {backends}}}]\n")
    ended = serve(str(file), "--port", "0", "--admin-port", "0")

    assert ended.returncode == 2
    assert str(missing) in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_forgotten_backend_s_memory_comes_back_without_any_request() -> None:
    async with running() as rig:
        fleet = rig.app.dispatcher._fleet
        (row,) = fleet.by_name.values()
        fleet.trie.set_capacity(row.slot, 10**6)
        for number in range(5_000):
            fleet.trie.insert(row.slot, array("Q", [number, 1]), 0.0)
        fleet.trie.drop(row.slot)
        assert fleet.trie.nodes > 4_000
        await eventually(lambda: fleet.trie.nodes == 1)


async def test_the_collector_is_left_as_it_was_found() -> None:
    before = gc.get_threshold()
    async with running() as rig:
        assert gc.get_threshold() != before
        assert (await rig.ask(post(CHAT, chat()))).status == 200
        await eventually(lambda: "gateway_collector_pause_seconds 0\n" not in rig.metrics())
    assert gc.get_threshold() == before
