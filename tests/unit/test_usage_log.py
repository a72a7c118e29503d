"""The usage log: what a line says, that it is bounded, and that a killed writer leaves whole lines."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest

from gateway.core.types import Outcome
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.usage_log import UsageLog


def record(number: int = 0, *, completion: int | None = 7, ran: bool = True) -> RequestRecord:
    return RequestRecord(
        f"r{number}",
        "/v1/chat/completions",
        100.0,
        "chat",
        "m",
        "a",
        "team",
        outcome=Outcome.OK,
        total_s=1.23456,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=completion,
        ran=ran,
        chunks=3,
    )


def opened(path: Path, **more: int) -> UsageLog:
    limits = {"most_bytes": 1 << 24, "kept": 3} | more
    return UsageLog(
        path, fsync_s=0.1, today=lambda: datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC), **limits
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(text) for text in path.read_bytes().splitlines()]


def test_a_line_says_who_used_what(tmp_path: Path) -> None:
    log = opened(tmp_path / "u")
    log.note(record())
    log.close()
    assert lines(tmp_path / "u") == [
        {
            "ts": "2030-01-02T03:04:05.000+00:00",
            "request_id": "r0",
            "key": "team",
            "class": "chat",
            "model": "m",
            "api": "/v1/chat/completions",
            "backend": "a",
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 7,
            "estimated": False,
            "outcome": "ok",
            "total_s": 1.235,
        }
    ]


def test_d51_an_answer_whose_usage_never_came_is_counted_by_its_chunks(tmp_path: Path) -> None:
    log = opened(tmp_path / "u")
    log.note(record(completion=None))
    log.close()
    (line,) = lines(tmp_path / "u")
    assert (line["completion_tokens"], line["estimated"]) == (3, True)


def test_what_never_ran_used_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path / "u")
    log.note(record(ran=False))
    log.close()
    assert lines(tmp_path / "u") == []


def test_every_request_has_one_line_in_order_also_after_a_restart(tmp_path: Path) -> None:
    for start in (0, 2500):
        log = opened(tmp_path / "u")
        for number in range(start, start + 2500):
            log.note(record(number))
        log.close()
    assert [line["request_id"] for line in lines(tmp_path / "u")] == [f"r{n}" for n in range(5000)]


def test_files_are_rotated_and_capped(tmp_path: Path) -> None:
    for _ in range(5):
        log = opened(tmp_path / "u", most_bytes=300, kept=2)
        log.note(record())
        log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["u", "u.1"]


def test_what_finds_no_room_is_dropped_and_counted(tmp_path: Path) -> None:
    log = opened(tmp_path / "u", most_waiting=0)
    log.note(record())
    log.close()
    assert log.dropped == 1


def test_a_full_disk_costs_lines_is_told_once_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    log = opened(full)
    for number in range(1500):
        log.note(record(number))
    log.close()
    assert log.dropped == 1500
    assert caplog.text.count("usage is not recorded") == 1


WRITER = """
import sys
from pathlib import Path
from gateway.telemetry.usage_log import UsageLog
from tests.unit.test_usage_log import record
log = UsageLog(Path(sys.argv[1]), most_bytes=1 << 30, kept=2, fsync_s=0.1, most_waiting=5000)
number = 0
print("writing", flush=True)
while True:
    log.note(record(number))
    number += log.dropped == 0
    log.dropped = 0
"""


def test_a_writer_that_is_killed_leaves_whole_lines_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "u"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while path.stat().st_size < 500_000:
            assert writer.poll() is None
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    log = opened(path, most_bytes=1 << 30)
    log.note(record(-1))
    log.close()
    ids = [line["request_id"] for line in lines(path)]
    assert ids[-1] == "r-1"
    assert ids[:-1] == [f"r{n}" for n in range(len(ids) - 1)]
