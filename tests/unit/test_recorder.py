"""The trace recorder: what it writes, that it is bounded, and that what it writes can be replayed."""

from array import array
from pathlib import Path

import orjson
import pytest

from gateway.core.types import Chain, Outcome, Query, Usage
from gateway.sim.traces import read
from gateway.telemetry.recorder import Note, Recorder, even, line

CHAIN = Chain(array("Q", [7, (1 << 64) - 1, 9]), 64.0, 200)
QUERY = Query("m", "chat", CHAIN, 10)


def written(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(text) for text in path.read_bytes().splitlines()]


def recorded(path: Path, count: int = 1, **limits: int) -> Recorder:
    recorder = Recorder(path, 100.0, **limits)
    for number in range(count):
        recorder.note(QUERY, Usage(250, 5, 128), 4, Outcome.OK, 101.5 + number)
    recorder.close()
    return recorder


def test_a_line_has_the_contracts_keys_and_no_more(tmp_path: Path) -> None:
    recorded(tmp_path / "t.jsonl")
    assert written(tmp_path / "t.jsonl") == [
        {
            "timestamp": 1500,
            "class": "chat",
            "input_length": 250,
            "output_length": 5,
            "hash_ids": [7, (1 << 64) - 1, 9],
            "block_tokens": 80.0,  # the engine counted a quarter more tokens than we believed
            "cached_tokens": 128,
            "outcome": "ok",
        }
    ]


def test_without_usage_our_own_counts_stand() -> None:
    row = orjson.loads(line(Note(0, "chat", CHAIN, Usage(), 4, Outcome.CLIENT_CLOSED)))
    assert (row["input_length"], row["output_length"], row["block_tokens"]) == (200, 4, 64.0)
    assert (row["cached_tokens"], row["outcome"]) == (None, "client_closed")


def test_wide_blocks_are_told_as_two() -> None:
    chain = Chain(array("Q", [10, 20, 30]), 64.0, 400, narrow_blocks=1)
    assert list(even(chain)) == [10, 21, 20, 31, 30]


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    recorded(tmp_path / "t.jsonl", 3)
    entries = read(tmp_path / "t.jsonl")
    assert [entry.at_s for entry in entries] == [0.0, 1.0, 2.0]
    assert {(e.cls, e.prompt_tokens, e.output_tokens) for e in entries} == {("chat", 250, 5)}
    first, second, _ = entries
    assert first.hashes == second.hashes
    assert first.hashes is not None
    assert len(first.hashes) == 240 // 16


def test_files_are_rotated_and_capped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for _ in range(8):
        recorded(path, 10, most_bytes=1000, kept=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "t.jsonl",
        "t.jsonl.1",
        "t.jsonl.2",
    ]
    for file in tmp_path.iterdir():
        assert len(written(file)) == 10  # one batch may pass the limit, never two


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    recorded(tmp_path / "t.jsonl", 2)
    recorded(tmp_path / "t.jsonl", 3)
    assert len(written(tmp_path / "t.jsonl")) == 5


def test_what_finds_no_room_is_dropped_and_counted(tmp_path: Path) -> None:
    recorder = recorded(tmp_path / "t.jsonl", 5, most_waiting=0)
    assert recorder.dropped == 5
    assert written(tmp_path / "t.jsonl") == []


def test_requests_that_prefill_nothing_are_no_traffic(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", 0.0)
    recorder.note(Query("m", "chat", CHAIN, 0, prefills=False), Usage(), 0, Outcome.OK, 1.0)
    recorder.close()
    assert written(tmp_path / "t.jsonl") == []


def test_a_path_that_cannot_be_written_is_the_starts_failure(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"t\.jsonl"):
        Recorder(tmp_path / "missing" / "t.jsonl", 0.0)


def test_a_disk_that_fills_ends_the_trace_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    recorder = recorded(full, 3)
    assert "no longer recorded" in caplog.text
    recorder.note(QUERY, Usage(), 0, Outcome.OK, 1.0)
    assert recorder.dropped == 1
