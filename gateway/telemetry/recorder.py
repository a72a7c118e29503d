"""The trace recorder: who asked when for how much, as block hashes; what `radixgate replay` reads.

The event loop notes a tuple; a thread makes lines of them and writes. A slow disk never stalls a
request: beyond a bound, requests are dropped from the trace and counted. Files are rotated and
capped. Must never hold a prompt, a key or a client: hashes are salted with the process's own salt.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

import orjson

from gateway.core.types import Chain, Outcome, Query, Usage
from gateway.telemetry.rotating import RotatingFile

_log = logging.getLogger("radixgate.record")
# A prompt of 128k tokens is 2,000 hashes in byte mode, 16 KB: at most some 100 MB wait, mostly 2.
_MOST_WAITING = 4_096
_BATCH = 256
_PAUSE_S = 0.2  # between batches: one write for many requests
MOST_BYTES = 64 * 1024 * 1024
KEPT_FILES = 4  # with the one being written, 256 MB: a million short requests


class Note(NamedTuple):
    """One request: when it came, what it asked, and what became of it."""

    at_ms: int
    cls: str
    chain: Chain
    usage: Usage
    chunks: int
    outcome: Outcome


class Recorder:
    """Writes one line per request to `path`, which is begun anew when it has `most_bytes`.

    Older files are `path.1` (the newest) to `path.N`. `dropped` counts what found no room. Times
    are told since `started_at`, monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        started_at: float,
        *,
        most_bytes: int = MOST_BYTES,
        kept: int = KEPT_FILES,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self.dropped = 0
        self.path = path
        self._started_at = started_at
        self._most_waiting = most_waiting
        self._queue: SimpleQueue[Note | None] = SimpleQueue()
        self._closing = Event()
        # an error is the caller's: a path we cannot write
        self._file = RotatingFile(path, most_bytes=most_bytes, kept=kept)
        self._thread = Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def note(
        self, query: Query, usage: Usage, chunks: int, outcome: Outcome, received_at: float
    ) -> None:
        """Put down a request that ended, or was refused; never waits.

        `chunks` stands for the answer's length where `usage` does not tell it.
        """
        if not query.prefills:
            return
        if self._queue.qsize() >= self._most_waiting:
            self.dropped += 1
            return
        at_ms = round((received_at - self._started_at) * 1000)
        self._queue.put(Note(at_ms, query.cls, query.chain, usage, chunks, outcome))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most `timeout_s`, and close the file."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with suppress(OSError):  # the disk is full: what it could not take is lost
                self._file.close()

    def _run(self) -> None:
        try:
            while (note := self._queue.get()) is not None:
                notes = [note]
                last = self._drain(notes)
                self._file.write(b"".join([line(one) for one in notes]))
                if last:
                    return
                if len(notes) < _BATCH:
                    self._closing.wait(_PAUSE_S)
        except OSError as error:
            _log.error("the trace is no longer recorded: %s", error)
            self._most_waiting = 0

    def _drain(self, notes: list[Note]) -> bool:
        """Append what waits; return whether the end was among it."""
        with suppress(Empty):
            while len(notes) < _BATCH:
                note = self._queue.get_nowait()
                if note is None:
                    return True
                notes.append(note)
        return False


def line(note: Note) -> bytes:
    """Return a request as one line of a trace (contract, section 8)."""
    chain, usage = note.chain, note.usage
    tokens = usage.prompt_tokens or chain.tokens
    size = chain.tokens_per_block
    if usage.prompt_tokens and not chain.exact and chain.tokens:
        size *= usage.prompt_tokens / chain.tokens  # the engine's count corrects our estimate
    output = note.chunks if usage.completion_tokens is None else usage.completion_tokens
    return orjson.dumps(
        {
            "timestamp": note.at_ms,
            "class": note.cls,
            "input_length": tokens,
            "output_length": output,
            "hash_ids": even(chain),
            "block_tokens": round(size, 3),
            "cached_tokens": usage.cached_tokens,
            "outcome": note.outcome,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def even(chain: Chain) -> Sequence[int]:
    """Return hashes of blocks that are all of one size: a wide one is told as two."""
    hashes = chain.hashes.tolist()
    narrow = chain.narrow_blocks
    if len(hashes) <= narrow:
        return hashes
    halves = [half for whole in hashes[narrow:] for half in (whole ^ 1, whole)]
    return hashes[:narrow] + halves
