import signal
import subprocess
import sys

import pytest

import gateway
from gateway.cli.main import COMMANDS, available, load_command, main


def test_help_lists_the_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in available())


@pytest.mark.parametrize("name", available())
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0

    out = capsys.readouterr().out
    assert out.startswith(f"usage: radixgate {name}")
    assert load_command(name).HELP in " ".join(out.split())
    assert "exit codes" in out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["check"], ["key", "old"]])
def test_bad_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: radixgate" in captured.err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"radixgate {gateway.__version__}\n"


def test_commands_are_known_by_name() -> None:
    assert {"check", "key"} <= set(available()) <= set(COMMANDS)


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; from gateway.cli.main import main; main(['check', '/nonexistent']);"
        "print([n for n in ('aiohttp', 'gateway.cli.serve', 'gateway.cli.key') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "[]\n"


def test_a_reader_that_left_early_is_no_traceback() -> None:
    command = (
        f"{sys.executable} -m gateway.cli.main check config/reference.yaml | head -0; "
        "echo ${PIPESTATUS[0]}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )

    assert "Traceback" not in done.stderr
    assert done.stdout in {"0\n", "1\n"}


def test_a_reload_asked_for_while_a_gateway_is_imported_does_not_end_it() -> None:
    code = (
        "import signal; from gateway.cli import main;"
        "main.load_command = lambda name: print(signal.getsignal(signal.SIGHUP)) or exit();"
        "main.main(['serve'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{signal.SIG_IGN}\n"
