"""Recorded traffic: block-hash traces (Mooncake, Bailian, our recorder's) and Azure's token counts.

Reads files that may be anything and says what is wrong with which line. Block ids become chained
hashes of 16 tokens, whatever block a trace counts in: equal prefixes stay equal, nothing else does.
Never keeps a line's text. Where to get public traces: docs/traces.md.
"""

import gzip
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import orjson
import xxhash

from gateway.core.settings import Slo
from gateway.sim.traffic import BLOCK_TOKENS, TRACE_SLO, Ask, Dialogue, Traffic, Workload, fresh

# Caches fill in the first part of a trace.
WARM_SHARE = 0.1
# A trace is held in memory, about 1 KB for each 2,000 tokens of a prompt.
MOST_REQUESTS = 200_000
_MOST_TOKENS = 10_000_000
_MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16
# Unknown because it was refused: what the core believes of an answer nobody has seen.
_UNKNOWN_OUTPUT = 250
# Requests of one timestamp are spread up to the next, at most this far: timestamps were rounded.
_MOST_ROUNDING_S = 5.0
_MASK = (1 << 64) - 1
_ODD, _STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # of splitmix64
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file that is no trace we read: the message names file, line and fault."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One request of a trace; `hashes` of its prompt's blocks, None = it shares nothing."""

    at_s: float
    cls: str | None
    prompt_tokens: int
    output_tokens: int
    hashes: "array[int] | None"


def recorded(path: Path, *, requests: int | None = None) -> Traffic:
    """Return the traffic of a trace file, or of its first `requests` lines.

    Its rate factor is speed-up: 2.0 sends twice as fast. The seed moves arrivals only within the
    rounding of their timestamps.

    Raises:
        OSError: the file cannot be read.
        TraceError: it is not a trace.
    """
    entries = read(path, requests=requests)
    slos = dict.fromkeys(_class_names(entries), TRACE_SLO)

    def traffic(rate: float, seed: int) -> Workload:
        return _workload(path.name, entries, slos, rate, seed)

    return traffic


def _class_names(entries: Sequence[Entry]) -> list[str]:
    """Return the classes a trace names; the built-in ones where it leaves that to the gateway."""
    named = {entry.cls for entry in entries}
    if None in named:
        named |= {"coding", "chat"}
    return sorted(name for name in named if name is not None)


def _workload(
    name: str, entries: Sequence[Entry], slos: Mapping[str, Slo], rate: float, seed: int
) -> Workload:
    rng = Random(f"{name} {seed}")  # noqa: S311 - reproducible traffic, not secrets
    dialogues = []
    for at, entry in sorted(_spread(entries, rng), key=lambda pair: pair[0]):
        hashes = entry.hashes
        if hashes is None:
            hashes = fresh(rng, entry.prompt_tokens // BLOCK_TOKENS)
        ask = Ask(entry.prompt_tokens, entry.output_tokens)
        dialogues.append(Dialogue(at / rate, entry.cls, hashes, (ask,)))
    seconds = max(dialogues[-1].start_s, 1e-3)
    default = "chat" if "chat" in slos else next(iter(slos))
    return Workload(name, dialogues, seconds, seconds * WARM_SHARE, slos, rate, default)


def _spread(entries: Sequence[Entry], rng: Random) -> Iterator[tuple[float, Entry]]:
    """Yield arrival times; several with one timestamp are moved apart, towards the next one."""
    groups = [(at, list(group)) for at, group in groupby(entries, key=lambda entry: entry.at_s)]
    for number, (at, group) in enumerate(groups):
        following = groups[number + 1][0] if number + 1 < len(groups) else at
        room = min(_MOST_ROUNDING_S, following - at) if len(group) > 1 else 0.0
        for entry in group:
            yield at + room * rng.random(), entry


def read(path: Path, *, requests: int | None = None) -> list[Entry]:
    """Return a trace's requests in order of time, the first at 0; see `recorded`."""
    limit = MOST_REQUESTS if requests is None else min(requests, MOST_REQUESTS)
    entries: list[Entry] = []
    try:
        with _opened(path) as lines:
            for entry in _entries(path, lines):
                entries.append(entry)
                if len(entries) >= limit:
                    break
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: not a whole gzip file: {error}") from error
    if not entries:
        raise TraceError(f"{path}: no requests in it")
    entries.sort(key=lambda entry: entry.at_s)
    start = entries[0].at_s
    return [
        Entry(e.at_s - start, e.cls, e.prompt_tokens, e.output_tokens, e.hashes) for e in entries
    ]


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _entries(path: Path, lines: Iterable[bytes]) -> Iterator[Entry]:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind not in {"csv", "jsonl"}:
        raise TraceError(f"{path}: its name must end in .jsonl, .jsonl.gz, .csv or .csv.gz")
    columns: list[str] | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            if kind == "jsonl":
                yield _block_hash_entry(orjson.loads(text))
            elif columns is None:
                columns = _azure_columns(text)
            else:
                yield _azure_entry(dict(zip(columns, text.decode().split(","), strict=True)))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise TraceError(f"{path}:{number}: {what}") from error


def _azure_columns(header: bytes) -> list[str]:
    columns = header.decode().lstrip("\ufeff").split(",")
    if not set(_AZURE) <= set(columns):
        raise ValueError(f"the header must name {', '.join(_AZURE)}")
    return columns


def _azure_entry(row: Mapping[str, str]) -> Entry:
    at = datetime.fromisoformat(row["TIMESTAMP"])
    start = datetime(2000, 1, 1, tzinfo=at.tzinfo)  # any: only differences count
    tokens = _length(int(row["ContextTokens"]))
    return Entry(
        (at - start).total_seconds(), None, tokens, _length(int(row["GeneratedTokens"])), None
    )


def _block_hash_entry(row: Any) -> Entry:
    """Read one line of Mooncake (512-token blocks), Bailian (16, seconds) or our recorder."""
    if not isinstance(row, dict):
        raise TypeError("not a JSON object")
    bailian = "chat_id" in row
    block_tokens = float(row.get("block_tokens", _BAILIAN_BLOCK if bailian else _MOONCAKE_BLOCK))
    if not 1.0 <= block_tokens <= 1e6:
        raise ValueError("block_tokens must be from 1 to 1,000,000")
    at = float(row["timestamp"])
    tokens = _length(row["input_length"])
    output = row["output_length"]
    if output is None or (not output and "outcome" in row):
        output = _UNKNOWN_OUTPUT
    cls = row.get("class")
    return Entry(
        at if bailian else at / 1000,
        cls if cls is None else str(cls),
        tokens,
        _length(output),
        chain(row["hash_ids"], block_tokens, tokens),
    )


def _length(value: Any) -> int:
    tokens = int(value)
    if tokens > _MOST_TOKENS or tokens < 0:
        raise ValueError(f"a length must be from 0 to {_MOST_TOKENS}")
    return max(1, tokens)


def chain(ids: Sequence[int | str], block_tokens: float, tokens: int) -> "array[int]":
    """Return the 16-token blocks of a prompt of `tokens` whose blocks of `block_tokens` have `ids`.

    Each id is chained with those before it (Bailian's say only what is in their block). Ends where
    the ids end: what they leave out is shared with nobody.
    """
    hashes = array("Q")
    whole = tokens // BLOCK_TOKENS
    state = 0
    end = 0
    for number, ident in enumerate(ids, 1):
        known = xxhash.xxh3_64_intdigest(ident.encode()) if isinstance(ident, str) else ident
        state = ((state ^ (known & _MASK)) * _ODD + _STEP) & _MASK
        state ^= state >> 29
        start = end
        end = min(whole, int(number * block_tokens) // BLOCK_TOKENS)
        if number == len(ids) and number * block_tokens >= tokens:
            end = whole  # the last id covers the rest of the prompt
        base = state >> 1
        hashes.extend(range(base + start, base + end))
        if end == whole:
            break
    return hashes
