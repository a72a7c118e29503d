"""The state file's form: what is whole is read, all else is a fault."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from gateway.config.state import StateConfig
from gateway.core.restore import SavedFault
from gateway.core.saved import VERSION, Learnt
from gateway.state import Head, State, Writer, pieces_of, read

LEARNT = msgspec.msgpack.encode(Learnt(5.0, [], []))


def write(path: Path, head: Head | None = None, *, ago: float = 0.0) -> Path:
    now = time.time()  # noqa: TID251 - the file is dated
    writer = Writer(path)
    writer.add(msgspec.msgpack.encode(head or Head(VERSION, sys.byteorder, now - ago, 5.0, 7)))
    writer.add(LEARNT)
    writer.commit()
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path / "s"), 600.0, 10_000)
    assert found is not None
    assert (found[0].salt, found[0].clock, found[1].learnt.at) == (7, 5.0, 5.0)


def test_no_file_is_no_fault(tmp_path: Path) -> None:
    assert read(tmp_path / "none", 600.0, 10_000) is None


def test_nothing_is_to_be_seen_before_the_commit(tmp_path: Path) -> None:
    path = write(tmp_path / "s")
    before = path.read_bytes()
    writer = Writer(path)
    writer.add(b"more")
    assert path.read_bytes() == before
    writer.discard()
    assert [file.name for file in tmp_path.iterdir()] == ["s"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("ago", [601.0, -61.0])
def test_a_file_too_old_or_from_the_future_is_a_fault(tmp_path: Path, ago: float) -> None:
    with pytest.raises(SavedFault, match="old"):
        read(write(tmp_path / "s", ago=ago), 600.0, 10_000)


@pytest.mark.parametrize(
    "head",
    [
        Head(VERSION + 1, sys.byteorder, 0.0, 0.0, 0),
        Head(VERSION, "middle", 0.0, 0.0, 0),
    ],
)
def test_another_versions_file_is_a_fault(tmp_path: Path, head: Head) -> None:
    with pytest.raises(SavedFault, match="version"):
        read(write(tmp_path / "s", head), 600.0, 10_000)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"x" * 100),
        lambda path: path.write_bytes(b"radixgate state\n"),
        lambda path: path.write_bytes(b"radixgate state\n" + b"\xff" * 20),
        lambda path: path.write_bytes(b"radixgate state\n" + bytes(4)),
        lambda path: write(path).write_bytes(path.read_bytes() + bytes(10_000)),
    ],
    ids=count(),
)
def test_what_is_no_such_file_is_a_fault(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "s")
    with pytest.raises(SavedFault):
        read(tmp_path / "s", 600.0, 10_000)


def test_every_cut_and_every_turned_bit_is_a_fault(tmp_path: Path) -> None:
    raw = write(tmp_path / "s").read_bytes()
    assert len(list(pieces_of(raw))) == 2
    for end in range(len(raw)):
        with pytest.raises(SavedFault):
            list(pieces_of(raw[:end]))
    for at in range(len(raw)):
        turned = bytearray(raw)
        turned[at] ^= 0x10
        with contextlib.suppress(SavedFault):
            assert list(pieces_of(bytes(turned))) == []


def test_every_state_has_a_salt_of_its_own() -> None:
    assert State(StateConfig(), float).salt != State(StateConfig(), float).salt


def test_what_is_no_file_is_never_replaced_by_one(tmp_path: Path) -> None:
    """A rename replaces whatever is there: as root, with `state.path: /dev/null`, that too."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="something else than a file"):
        write(path)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]
