"""A file of lines that is begun anew when it is full; older ones are kept under numbers, and capped.

For threads that write: every call may wait for the disk. After a crash in the middle of a line the
rest of that line is cut off when the file is opened again, so that every file holds whole lines.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

_LOOK_BACK = 64 * 1024


class RotatingFile:
    """`path`, appended to until it has `most_bytes`; then it becomes `path.1`, that one `path.2`...

    `kept` files exist at most, the one being written included.
    """

    def __init__(self, path: Path, *, most_bytes: int, kept: int) -> None:
        """Open it.

        Raises:
            OSError: it cannot be written.
        """
        self.path = path
        self._most_bytes = most_bytes
        self._kept = kept
        self._fd = _opened(path)
        self._size = self._repaired()

    def configure(self, *, most_bytes: int, kept: int) -> None:
        """Take new limits; from any thread."""
        self._most_bytes = most_bytes
        self._kept = kept

    def write(self, lines: bytes) -> None:
        """Append whole lines; begin a new file first if they would not fit into this one.

        Raises:
            OSError: none of them is in the file.
        """
        if self._size and self._size + len(lines) > self._most_bytes:
            self._rotate()
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with suppress(OSError):  # no part of a line is left behind
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(lines)

    def sync(self) -> None:
        """See that what was written survives the machine.

        Raises:
            OSError: the disk did not take it.
        """
        if self._regular():
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def _rotate(self) -> None:
        self.sync()
        for number in range(self._kept - 1, 0, -1):
            newer = self._numbered(number - 1) if number > 1 else self.path
            if newer.exists():
                newer.replace(self._numbered(number))
        if self._kept == 1:
            os.ftruncate(self._fd, 0)
        else:
            fresh = _opened(self.path)
            os.close(self._fd)
            self._fd = fresh
        self._size = 0

    def _repaired(self) -> int:
        """Cut off the start of a line that a crash left; return the size."""
        if not self._regular():
            return 0
        size = end = os.fstat(self._fd).st_size
        while end:
            start = max(0, end - _LOOK_BACK)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
        return end

    def _regular(self) -> bool:
        return stat.S_ISREG(os.fstat(self._fd).st_mode)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
