"""Files of whole lines: rotated, capped, mended after a crash."""

import os
from pathlib import Path

import pytest

from gateway.telemetry.rotating import RotatingFile


def test_lines_go_to_the_end_of_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for text in (b"one\n", b"two\n"):
        file = RotatingFile(path, most_bytes=100, kept=2)
        file.write(text)
        file.sync()
        file.close()
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("whole", [b"", b"a\nbb\n", b"x" * 200_000 + b"\n"])
@pytest.mark.parametrize("rest", [b"", b"half a li", b"y" * 150_000])
def test_a_line_that_a_crash_cut_is_taken_out_when_the_file_is_opened(
    tmp_path: Path, whole: bytes, rest: bytes
) -> None:
    path = tmp_path / "f"
    path.write_bytes(whole + rest)
    file = RotatingFile(path, most_bytes=1 << 20, kept=2)
    file.write(b"next\n")
    file.close()
    assert path.read_bytes() == whole + b"next\n"


def test_a_full_file_becomes_the_first_of_the_older_ones(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f", most_bytes=10, kept=3)
    for number in range(5):
        file.write(b"line %d\n" % number)
    file.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "f": b"line 4\n",
        "f.1": b"line 3\n",
        "f.2": b"line 2\n",
    }


def test_of_one_file_only_the_newest_lines_are_kept(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f", most_bytes=10, kept=1)
    for number in range(3):
        file.write(b"line %d\n" % number)
    file.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f": b"line 2\n"}


def test_what_is_longer_than_a_file_is_written_all_the_same(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f", most_bytes=4, kept=2)
    file.write(b"a long line\n")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"a long line\n"


def test_a_disk_that_fills_in_mid_line_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RotatingFile(tmp_path / "f", most_bytes=1000, kept=2)
    file.write(b"whole\n")
    write = os.write
    left = [3]

    def filling(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        done = write(fd, bytes(data)[: left[0]])
        left[0] = 0
        return done

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", filling)
        with pytest.raises(OSError, match="No space"):
            file.write(b"does not fit\n")
    file.write(b"fits again\n")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"whole\nfits again\n"
