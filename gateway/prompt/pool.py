"""Encoding off the loop: a few threads, and a bound on how far behind they may be.

A text is worth waiting for as long as the wait is short beside its prefill; past that the caller
takes byte blocks. Must never run Python for long in a thread: encoders release the interpreter's
lock for the whole of a text, and ids come back as arrays.
"""

import asyncio
import os
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

MAX_WAIT_S: Final = 0.25
"""How much work may be ahead of a text: the prefill of a text is some ten times its encoding."""

MAX_JOBS: Final = 256
"""Texts of requests held at once, whatever their size."""


class Encodes(Protocol):
    """What the pool needs of an encoder (`engines.Encoder`)."""

    @property
    def chars_per_s(self) -> float:
        """Return its speed, as measured when it was loaded."""

    def encode(self, text: str) -> "array[int]":
        """Return the token ids; called from any thread."""


class PoolBehind(Exception):
    """More waits to be encoded than a request should wait for."""


class _Work:
    """One request's texts; none when nobody waits for them any more."""

    __slots__ = ("encoder", "seconds", "texts")

    def __init__(self, encoder: Encodes, texts: Sequence[str], seconds: float) -> None:
        self.encoder = encoder
        self.texts = texts
        self.seconds = seconds


class EncoderPool:
    """Threads that encode. `close` when nothing is to be encoded any more."""

    def __init__(self, threads: int | None = None, max_wait_s: float = MAX_WAIT_S) -> None:
        self._threads = threads or _default_threads()
        self._max_wait_s = max_wait_s
        self._executor = ThreadPoolExecutor(self._threads, "encoder")
        self._lock = threading.Lock()  # the two below are lowered by the threads
        self._owed_s = 0.0
        self._jobs = 0

    @property
    def jobs(self) -> int:
        """Return how many are being encoded or wait for it."""
        return self._jobs

    @property
    def owed_s(self) -> float:
        """Return the seconds of one thread's work that are waiting or begun."""
        return self._owed_s

    def behind(self) -> bool:
        """Return whether a text would have to wait too long now."""
        if self._jobs < self._threads:  # whatever the others encode, a thread is free
            return False
        return self._jobs >= MAX_JOBS or self._owed_s > self._max_wait_s * self._threads

    async def encode(self, encoder: Encodes, texts: Sequence[str]) -> "list[array[int]]":
        """Return the ids of each text. A cancelled wait gives the texts up at once.

        Raises:
            PoolBehind: there is too much to do.
            ValueError: a text that has no encoding.
        """
        if self.behind():
            raise PoolBehind
        work = _Work(encoder, texts, sum(map(len, texts)) / encoder.chars_per_s)
        with self._lock:
            self._jobs += 1
            self._owed_s += work.seconds
        try:
            future = self._executor.submit(_encode, work)
        except RuntimeError:  # closed
            self._settle(work)
            raise PoolBehind from None
        future.add_done_callback(lambda _: self._settle(work))  # a cancelled one is done, too
        try:
            return await asyncio.wrap_future(future)
        finally:
            work.texts = ()  # a thread that has not begun finds nothing to do

    def close(self) -> None:
        """Take nothing more; what runs ends by itself."""
        self._executor.shutdown(wait=False)

    def _settle(self, work: _Work) -> None:
        with self._lock:
            self._jobs -= 1
            self._owed_s = self._owed_s - work.seconds if self._jobs else 0.0


def _encode(work: _Work) -> "list[array[int]]":
    done = []
    for text in work.texts:
        if not work.texts:  # nobody waits any more
            break
        done.append(work.encoder.encode(text))
    return done


def _default_threads() -> int:
    """Return one thread per core beside the loop's; two at least: one text may be very long."""
    return max(2, min(4, (os.cpu_count() or 1) - 1))
