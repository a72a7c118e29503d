"""What every command does when its output goes nowhere: one line and exit code 1, no traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import explain, main, top
from gateway.cli.output import guarded

FULL = "/dev/full"
NO_SPACE = "radixgate: output not written: No space left on device\n"
BODY = "tests/golden/conversations.json"
SMALL = ["--requests", "50", "--jobs", "1", "--replicas", "2", "--rate", "12"]
COMMAND = [sys.executable, "-m", "gateway.cli.main"]
ANSWER = {
    "class": "chat",
    "class_rule": "default",
    "prompt_tokens": 1,
    "prompt_tokens_exact": True,
    "policy": "cost",
    "winner": None,
    "reason": "nobody",
    "backends": [],
}

pytestmark = pytest.mark.skipif(not os.access(FULL, os.W_OK), reason="no device that is full")


def full_disk(command: Callable[[], int], buffering: int) -> int:
    """Run a command with a device that is full as its output.

    Closing it at the end would fail on what it still held, as the interpreter's end would.
    """
    with Path(FULL).open("w", buffering=buffering) as stream, redirect_stdout(stream):
        return command()


either_way = pytest.mark.parametrize("buffering", [1, -1], ids=["by lines", "in blocks"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in main.available()),
        ["check", "config/gateway.yaml"],
        ["key", "new", "bob"],
        ["demo", "--seconds", "5"],
        ["replay", "synthetic:unique", "--policy", "random", *SMALL],
        ["tune", "synthetic:groups", "--seeds", "1", "--trials", "1", *SMALL],
    ],
    ids=" ".join,
)
@either_way
def test_a_full_disk_is_one_line(
    arguments: list[str], buffering: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert full_disk(lambda: main.main(arguments), buffering) == 1

    told = capsys.readouterr().err.splitlines(keepends=True)
    assert told[-1] == NO_SPACE
    assert all(line.startswith("warning: ") for line in told[:-1])


@either_way
@pytest.mark.parametrize(
    "arguments",
    [["explain", BODY], ["explain", BODY, "--json"], ["top", "--once"]],
    ids=" ".join,
)
def test_a_full_disk_is_one_line_of_the_commands_that_ask_a_gateway(
    arguments: list[str],
    buffering: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def frames(*_: Any) -> AsyncIterator[dict[str, Any]]:
        yield {}

    monkeypatch.setattr(explain, "ask", lambda *_: ANSWER)
    monkeypatch.setattr(top, "frames", frames)
    monkeypatch.setattr(top, "plain", lambda _: "a frame")

    assert full_disk(lambda: main.main(arguments), buffering) == 1
    assert capsys.readouterr().err == NO_SPACE


@pytest.mark.parametrize("arguments", [["check", "config/reference.yaml"], ["key", "new", "bob"]])
def test_a_reader_that_left_is_told_nothing(arguments: list[str]) -> None:
    """As `| head` does, but gone for certain before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: ")] == []


def test_closed_streams_are_no_fault() -> None:
    """Of a daemon that closed them: the first socket would be standard output else."""
    command = f"exec {sys.executable} -m gateway.cli.main check config/gateway.yaml <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_error_that_is_not_the_outputs_is_no_matter_of_it(tmp_path: Path) -> None:
    def command() -> int:
        (tmp_path / "not there" / "file").read_bytes()
        return 0

    with pytest.raises(FileNotFoundError):
        guarded(command)


@either_way
def test_a_command_that_failed_keeps_its_code(
    buffering: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        with suppress(OSError):  # as argparse does
            sys.stdout.write("a line\n")
        return 2

    assert full_disk(lambda: guarded(command), buffering) == 2
    assert capsys.readouterr().err == NO_SPACE


def test_a_gateway_serves_though_nobody_takes_its_line() -> None:
    options = ["--backend", "http://127.0.0.1:1", "--port", "0", "--admin-port", "0"]
    with (
        Path(FULL).open("w") as full,
        subprocess.Popen(
            [*COMMAND, "serve", *options, "--set", "log.format=console"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("radixgate ready: "))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert "stopping: " in rest
    assert rest.endswith(NO_SPACE)
    assert "Traceback" not in rest
    assert process.returncode == 1
