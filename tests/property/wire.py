"""Fake transports and recorded samples, to drive the protocol objects without sockets."""

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SAMPLES = Path(__file__).parents[1] / "samples"
RESPONSES = sorted(p for p in SAMPLES.glob("*/*.response.http") if "_head." not in p.name)
REQUESTS = sorted(SAMPLES.glob("*/*.request.http"))


class FakeTransport(asyncio.Transport):
    """Collects what is written; does what a socket transport does, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.aborted = self.reading_paused = False

    def write(self, data: Any) -> None:
        assert isinstance(data, bytes | bytearray | memoryview)
        self.written += data

    def writelines(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.write(piece)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False


def splits(size: int) -> st.SearchStrategy[list[int]]:
    """Draw where to cut `size` bytes: at a few places, or everywhere in a steady step."""
    few = st.lists(st.integers(1, max(1, size - 1)), max_size=12).map(sorted)
    unit = 1 + size // 4000
    steady = st.integers(1, 40).map(lambda n: list(range(n * unit, size, n * unit)))
    return st.one_of(few, steady)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return `data` cut at `cuts`, without empty pieces."""
    edges = [0, *cuts, len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    return [part for part in parts if part]


def split_head(raw: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    """Return (first line, headers by lower-case name, the rest)."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    pairs = [line.partition(b":") for line in lines]
    return first, [(name.lower(), value.strip()) for name, _, value in pairs], rest


def unchunked(data: bytes) -> tuple[bytes, bytes]:
    """Return (payload, what follows the last chunk); assert that the framing is strict."""
    payload = b""
    while True:
        line, mark, data = data.partition(b"\r\n")
        assert mark
        size = int(line, 16)
        if size == 0:
            assert data[:2] == b"\r\n"
            return payload, data[2:]
        payload += data[:size]
        assert data[size : size + 2] == b"\r\n"
        data = data[size + 2 :]


def payload_of(raw: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    """Return (first line, headers, payload) of a whole message, framing removed."""
    first, headers, rest = split_head(raw)
    fields = dict(headers)
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        rest, after = unchunked(rest)
        assert after == b""
    elif (length := fields.get(b"content-length")) is not None:
        assert len(rest) == int(length)
    return first, headers, rest
