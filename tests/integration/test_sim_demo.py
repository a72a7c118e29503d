"""`radixgate demo` from the outside: figures, what it leaves behind, how it is interrupted."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson
import pytest

from gateway.cli import main
from gateway.sim import stage
from tests.unit.test_sim_report import KEYS


async def start(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli.main", "demo", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def children(parent: int) -> set[int]:
    """Return the live processes started by `parent`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.add(int(entry.name))
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


async def two_children(process: asyncio.subprocess.Process) -> set[int]:
    async with asyncio.timeout(60):
        while len(pids := children(process.pid)) < 2:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
    return pids


async def test_json_has_both_runs_with_the_contracts_keys() -> None:
    process = await start("--json", "--seconds", "5", "--replicas", "2")
    out, err = await process.communicate()

    assert process.returncode == 0, err
    figures = orjson.loads(out)
    assert list(figures) == ["round_robin", "radixgate"]
    for run, policy in zip(figures.values(), ("round_robin", "cost"), strict=True):
        assert set(KEYS) | {"trace", "policy", "load", "replicas", "classes"} <= set(run)
        assert (run["policy"], run["failed"], run["refused"]) == (policy, 0, 0)
        assert run["requests"] > 10
        assert set(run["classes"]) == {"chat", "coding"}
    assert figures["radixgate"]["hit_rate"] > figures["round_robin"]["hit_rate"]
    assert err == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupting_ends_every_child(number: signal.Signals) -> None:
    process = await start("--seconds", "30", "--replicas", "2")
    pids = await two_children(process)

    os.kill(process.pid, number)

    assert await process.wait() == 1
    assert alive(pids) == set()


async def test_a_gateway_that_cannot_start_is_reported() -> None:
    with pytest.raises(stage.StageError, match="policy"):
        async with stage.gateway(["http://127.0.0.1:9"], "no-such-policy"):
            pass


def test_too_short_a_run_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--seconds", "1"]) == 2
    assert "at least" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "17", "x"])
def test_replicas_are_bounded(count: str) -> None:
    assert main.main(["demo", "--replicas", count]) == 2
