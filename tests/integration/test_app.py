"""Start, reload and refusal of the whole process."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.rig import chat, eventually, post, running

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


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
def test_an_address_in_use_is_one_line_and_code_1(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        free = {"--port": "0", "--admin-port": "0"} | {which: port}
        options = [word for pair in free.items() for word in pair]
        ended = serve("--backend", "http://127.0.0.1:9", *options)

    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith("radixgate: ")
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
