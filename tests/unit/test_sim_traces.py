"""Reading traces: every format gives the same kind of traffic, and faults are told by line."""

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from gateway.sim.cells import run_cell
from gateway.sim.generators import synthetic
from gateway.sim.trace_lines import lines
from gateway.sim.traces import TraceError, chain, read, recorded

SHIPPED = Path(__file__).parents[1] / "traces" / "mix.jsonl.gz"
# Where public traces lie, for those who have them (docs/traces.md).
PUBLIC = Path(os.environ.get("RADIXGATE_TRACES", "no/such/directory"))


def written(path: Path, *rows: object) -> Path:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
    return path


def mooncake(at: int, tokens: int, output: int, *ids: int) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": ids}


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_a_mooncake_block_is_512_tokens_and_equal_ids_are_equal_prefixes(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl", mooncake(0, 1100, 7, 0, 1, 2), mooncake(3000, 1536, 9, 0, 1, 3)
    )
    first, second = read(path)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert (first.prompt_tokens, first.output_tokens) == (1100, 7)
    assert first.hashes is not None
    assert second.hashes is not None
    assert (len(first.hashes), len(second.hashes)) == (1100 // 16, 96)
    assert shared(first.hashes, second.hashes) == 64
    assert len(set(second.hashes)) == 96


def test_a_bailian_block_is_16_tokens_in_seconds_and_means_nothing_without_its_prefix(
    tmp_path: Path,
) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 5}
    path = written(
        tmp_path / "t.jsonl",
        row | {"timestamp": 10.5, "input_length": 48, "hash_ids": [4, 5, 6]},
        row | {"timestamp": 12.0, "input_length": 48, "hash_ids": [9, 5, 6]},
    )
    first, second = read(path)
    assert second.at_s == 1.5
    assert first.hashes is not None
    assert second.hashes is not None
    assert len(first.hashes) == 3
    assert not set(first.hashes) & set(second.hashes)


def test_our_recorders_lines_keep_class_and_block_size(tmp_path: Path) -> None:
    row = mooncake(0, 200, 0, 11, 12, 13) | {
        "block_tokens": 64.0,
        "class": "coding",
        "outcome": "rejected_full",
        "cached_tokens": None,
    }
    (entry,) = read(written(tmp_path / "t.jsonl", row))
    assert entry.cls == "coding"
    assert entry.output_tokens == 250  # nobody knows: it was refused
    assert entry.hashes is not None
    assert len(entry.hashes) == 12  # three blocks of 64; the rest is shared with nobody


@pytest.mark.parametrize("block_tokens", [16, 61.7, 256, 512])
def test_a_longer_prompt_of_the_same_beginning_begins_the_same(block_tokens: float) -> None:
    ids = list(range(100, 140))
    short = chain(ids[:20], block_tokens, int(20 * block_tokens))
    long = chain(ids, block_tokens, int(40 * block_tokens))
    assert long[: len(short)] == short
    assert len(short) == int(20 * block_tokens) // 16


def test_text_ids_are_ids(tmp_path: Path) -> None:
    rows = [{**mooncake(0, 1024, 1), "hash_ids": ["ab12", "cd34"]} for _ in range(2)]
    first, second = read(written(tmp_path / "t.jsonl", *rows))
    assert first.hashes == second.hashes


def test_an_azure_trace_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    path.write_bytes(gzip.compress(text.encode()))
    first, second = recorded(path)(2.0, 1).dialogues
    assert second.start_s - first.start_s == pytest.approx(0.026)
    assert (first.cls, first.asks[0].prompt_tokens, first.asks[0].output_tokens) == (None, 4808, 10)
    assert not set(first.hashes) & set(second.hashes)


def test_requests_of_one_rounded_time_are_spread_up_to_the_next(tmp_path: Path) -> None:
    rows = [mooncake(at, 600, 5, at + n, n) for at in (0, 3000, 6000) for n in range(20)]
    starts = [d.start_s for d in recorded(written(tmp_path / "t.jsonl", *rows))(1.0, 1).dialogues]
    assert len(set(starts[:40])) == 40
    assert all(start < 3.0 for start in starts[:20])
    assert starts == sorted(starts)


def test_only_as_many_requests_are_read_as_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", *(mooncake(n, 600, 5, n, n) for n in range(9)))
    assert len(read(path, requests=4)) == 4


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "t.jsonl:2: "),
        (b"[1]", "t.jsonl:2: not a JSON object"),
        (b'{"timestamp": 1, "output_length": 3, "hash_ids": []}', "'input_length' is missing"),
        (b'{"timestamp": 1, "input_length": 3e9, "output_length": 3, "hash_ids": []}', "a length"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": 7}', "t.jsonl:2: "),
        (b'{"timestamp": "x", "input_length": 5, "output_length": 3, "hash_ids": []}', ":2: "),
    ],
)
def test_a_faulty_line_is_told(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(orjson.dumps(mooncake(0, 600, 5, 1, 2)) + b"\n" + line + b"\n")
    with pytest.raises(TraceError) as caught:
        read(path)
    assert told in str(caught.value)


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    other = tmp_path / "t.parquet"
    other.write_bytes(b"x")
    empty = tmp_path / "t.jsonl"
    empty.write_bytes(b"\n")
    header = tmp_path / "t.csv"
    header.write_bytes(b"a,b\n1,2\n")
    cut = tmp_path / "u.jsonl.gz"
    cut.write_bytes(gzip.compress(orjson.dumps(mooncake(0, 600, 5, 1, 2)) * 50)[:-12])
    for path in (other, empty, header, cut):
        with pytest.raises(TraceError, match=path.name):
            read(path)


def test_a_generated_workload_survives_being_written_and_read(tmp_path: Path) -> None:
    workload = synthetic("groups", requests=200)(20.0, 1)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines(workload)))
    entries = read(path)
    assert len(entries) == sum(len(d.asks) for d in workload.dialogues)
    assert {entry.cls for entry in entries} == {"chat"}
    prefixes = {tuple(entry.hashes[: 5632 // 16]) for entry in entries if entry.hashes}
    assert len(prefixes) == len({tuple(d.hashes[:352]) for d in workload.dialogues})


def test_the_shipped_trace_runs_and_hits() -> None:
    figures = run_cell(recorded(SHIPPED)(1.0, 1), "cost")
    assert figures["requests"] > 150
    assert set(figures["classes"]) == {"chat", "coding"}
    assert figures["hit_rate"] > 0.5


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="RADIXGATE_TRACES names no directory of traces")
@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "azure_llm_2023_code.csv.gz"])
def test_public_traces_run(name: str) -> None:
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"no {name}")
    figures = run_cell(recorded(path, requests=2000)(2.0, 1), "lmetric")
    assert figures["requests"] > 1500
    assert figures["failed"] == 0
    assert figures["slo_ratio"] > 0.8
