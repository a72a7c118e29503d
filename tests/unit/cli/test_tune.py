"""`radixgate tune`: what it prints, and how it fails."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from gateway.cli.main import main
from gateway.config.load import load
from gateway.sim.tune import Tuner

SHIPPED = str(Path(__file__).parents[2] / "traces" / "mix.jsonl.gz")
TINY = ["tune", "synthetic:groups", "--requests", "60", "--rate", "12", "--replicas", "2"]
FAST = [*TINY, "--seeds", "1", "--jobs", "1"]
KEYS = {"trace", "policy", "rate", "replicas", "objectives", "trials", "front", "found"}


def test_the_printed_fragment_is_a_valid_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*FAST, "--trials", "9", "--policy", "weights"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""  # nobody watches
    text = shown.out[shown.out.index("# radixgate tune") :]
    file = tmp_path / "found.yaml"
    file.write_text(text)
    config = load(file, backends=["http://127.0.0.1:8001"]).config
    assert config.routing.policy == "weights"
    assert not config.queue.enabled  # as was simulated
    for section in ("Pareto front", "Held-out traffic (seeds 1000001 to 1000003)", "round_robin"):
        assert section in shown.out


def test_json_is_told_of_a_recorded_trace(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rate", "1", "--replicas", "2", "--trials", "2", "--seeds", "1", "--jobs", "1"]
    goals = ["--objective", "coding.ttft_p95", "--objective", "slo"]
    assert main(["tune", SHIPPED, *asked, *goals, "--slo", "coding:1:0.05", "--json"]) == 0
    shown = orjson.loads(capsys.readouterr().out)
    assert set(shown) >= KEYS
    assert shown["objectives"] == ["coding.ttft_p95", "slo"]
    assert [trial["number"] for trial in shown["trials"]] == [0, 1]
    assert set(shown["held_out"]["rows"]) >= {"defaults", "round_robin"}
    assert "requests are counted in a held-out run" in shown["warning"]


def test_auto_tells_how_many_replicas_are_needed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    png = tmp_path / "front.png"
    asked = ["--rate", "30", "--replicas", "auto", "--slo-share", "0.9", "--trials", "2"]
    assert main([*FAST, *asked, "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert "Replicas that keep 90.0% within SLO on held-out traffic: defaults " in out
    assert "GPUs" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_configuration_is_what_is_tuned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "radixgate.yaml"
    file.write_text(
        "backends: [{url: 'http://127.0.0.1:8001'}]\n"
        "routing: {cost: {stall_weight: 0.3}}\n"
        "classes: {chat: {slo: {ttft_s: 0.001}}}\n"
    )
    asked = [*FAST, "--trials", "1", "--config", str(file)]
    assert main([*asked, "--json"]) == 0
    shown = orjson.loads(capsys.readouterr().out)
    assert shown["trials"][0]["values"]["routing.cost.stall_weight"] == 0.3
    assert shown["trials"][0]["figures"]["slo_ratio"] == 0.0  # by its targets
    assert main([*asked, "--slo", "chat:5:0.1"]) == 0
    out = capsys.readouterr().out
    assert "trial 0 = your configuration" in out
    assert "100.00%" in out  # the option's targets come first


def test_a_configuration_with_mistakes_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "radixgate.yaml"
    file.write_text("backends: [{url: 'http://127.0.0.1:8001'}]\nrouting: {policy: best}\n")
    assert main([*FAST, "--config", str(file)]) == 2
    assert f"{file}:2: routing.policy" in capsys.readouterr().err


def test_an_interrupt_prints_what_was_found_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuner, "_check", interrupted)
    assert main([*FAST, "--trials", "2"]) == 1
    shown = capsys.readouterr()
    assert "Pareto front" in shown.out
    assert "Interrupted: not checked" in shown.out
    assert shown.err == "radixgate tune: interrupted\n"


def test_ctrl_c_on_a_terminal_ends_children_quietly() -> None:
    """With the real signal, progress and child processes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gateway.cli.main", *TINY, "--trials", "100000", "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    told = b""
    try:
        while b"8/100000 trials" not in told and b"9/100000 trials" not in told:
            told += os.read(ours, 4096)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    try:
        while more := os.read(ours, 4096):
            told += more
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.returncode == 1
    assert b"Pareto front" in out
    assert b"Interrupted: not checked" in out
    assert b"Traceback" not in told
    assert told.endswith(b"radixgate tune: interrupted\r\n")


@pytest.mark.parametrize(("module", "more"), [("optuna", []), ("matplotlib.figure", ["--png"])])
def test_a_missing_extra_is_told_before_anything_is_run(
    module: str,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    picture = [str(tmp_path / "front.png")] if more else []
    assert main([*FAST, *more, *picture]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "needs the extra `tune`: pip install" in shown.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["synthetic:nothing"], "unknown synthetic workload 'nothing': one of coding, chat"),
        ([__file__], "must end in .jsonl"),
        (["synthetic:chat", "--policy", "round_robin"], "invalid choice: 'round_robin'"),
        (["synthetic:chat", "--objective", "speed"], "unknown objective 'speed': one of ttft_p95"),
        (["synthetic:chat", "--objective", "x.slo"], "no class 'x' in the trace: one of chat,"),
        (["synthetic:chat", "--slo", "x:1:1"], "no class 'x' in the trace"),
        (["synthetic:chat", "--slo", "chat:1"], "expected CLASS:TTFT_S:TPOT_S"),
        (["synthetic:chat", "--keys", "queue.nothing"], "names no key of policy cost"),
        (["synthetic:chat", "--load", "1", "--rate", "1"], "not allowed with"),
        (["synthetic:chat", "--load", "0"], "must be above 0"),
        (["synthetic:chat", "--slo-share", "1.1"], "must be above 0 and at most 1"),
        (["synthetic:chat", "--trials", "0"], "must be at least 1"),
        (["synthetic:chat", "--replicas", "auto"], "needs the --rate of synthetic traffic"),
        (["synthetic:chat", "--replicas", "auto", "--load", "1"], "needs a --rate"),
        (["synthetic:chat", "--png", "front.svg"], "must end in .png"),
        (["synthetic:chat", "--png", "/nowhere/front.png"], "cannot be written to"),
    ],
)
def test_bad_usage_is_told_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err


def test_a_fleet_that_cannot_be_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "--rate", "200", "--replicas", "auto", "--most", "2"]) == 1
    assert "2 replicas do not keep 99.0% within SLO" in capsys.readouterr().err
