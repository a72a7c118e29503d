import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gateway.cli.main import main
from gateway.config.build import core_settings
from gateway.config.load import load

GOOD = """\
models:
  - name: m
    backends:
      - {name: a, url: "http://h:1"}
poll: {interval_s: 0.5}
"""

SIX = """\
listn: {port: 1}
listen: {port: high}
poll: {interval_s: 1000}
models:
  - name: m
    backends:
      - {name: a, url: "http://h:1"}
      - {name: a, url: "http://h:2"}
routing: {policy: fastest}
keys: [{name: k, sha256: abc}]
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXGATE_LISTEN__PORT", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "g.yaml"
    path.write_text(GOOD)
    return path


def test_a_good_file_prints_what_is_in_effect_and_from_where(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RADIXGATE_LISTEN__PORT", "81")

    assert main(["check", str(file), "--set", "routing.policy=random"]) == 0

    captured = capsys.readouterr()
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in captured.out.splitlines()}
    assert lines["interval_s: 0.5"] == f"{file}:5"
    assert lines["port: 81"] == "RADIXGATE_LISTEN__PORT"
    assert lines["policy: random"] == "--set routing.policy"
    assert lines["timeout_s: 1.0"] == "default"
    assert lines["- min_prompt_tokens: 8000"] == "built-in"
    assert captured.err == ""


def test_what_is_printed_is_a_file_of_the_same_meaning(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(file), "--backend", "http://h:3"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)

    again = load(printed).config

    before = load(file, backends=["http://h:3"]).config
    assert core_settings(again, {}) == core_settings(before, {})
    assert again.timeouts == before.timeouts
    assert yaml.safe_load(printed.read_text())["poll"]["interval_s"] == 0.5


def test_six_mistakes_are_six_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "six.yaml"
    file.write_text(SIX)

    assert main(["check", str(file)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" ")[0] + " " + line.split(" ")[1] for line in lines[:-1]] == [
        f"{file}:1: listn:",
        f"{file}:2: listen.port:",
        f"{file}:3: poll.interval_s:",
        f"{file}:8: models[0].backends[1].name:",
        f"{file}:9: routing.policy:",
        f"{file}:10: keys[0].sha256:",
    ]
    assert lines[-1] == "6 mistakes"


def test_warnings_go_to_standard_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--set", "listen.host=0.0.0.0"]) == 0

    captured = capsys.readouterr()
    assert captured.err.startswith("warning: --set listen.host: keys: open to everyone")
    assert yaml.safe_load(captured.out)["listen"]["host"] == "0.0.0.0"


def test_warnings_stand_below_the_listing(file: Path) -> None:
    check = [sys.executable, "-m", "gateway.cli.main", "check", str(file)]
    done = subprocess.run(
        [*check, "--set", "listen.host=0.0.0.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
    )

    assert [line.startswith("warning: ") for line in done.stdout.splitlines()].index(True) > 100


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
