"""The usage log: one JSON line per request that ran, for who has to bill or to plan.

The event loop only enqueues the record; a thread writes in batches and syncs at a set interval, so
that at most so much is lost with the machine, and with the process only what was not written yet.
A disk that is full loses what it cannot take, which is counted and told once; requests go on. Must
never hold a prompt or a key: keys are told by their configured names.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic

import orjson

from gateway.telemetry.record import RequestRecord
from gateway.telemetry.rotating import RotatingFile

_log = logging.getLogger("radixgate.usage")
_MOST_WAITING = 50_000  # about 25 MB of records
_BATCH = 1_000
_PAUSE_S = 0.05  # between batches


def _now() -> datetime:
    return datetime.now(UTC)


class UsageLog:
    """Appends to `path`. `dropped` counts the requests that found no room or no disk."""

    def __init__(
        self,
        path: Path,
        *,
        most_bytes: int,
        kept: int,
        fsync_s: float,
        most_waiting: int = _MOST_WAITING,
        today: Callable[[], datetime] = _now,
    ) -> None:
        """Open the file and start the thread.

        Raises:
            OSError: the file cannot be written.
        """
        self.dropped = 0
        self.path = path
        self._today = today
        self._fsync_s = fsync_s
        self._most_waiting = most_waiting
        self._failing = False
        self._queue: SimpleQueue[RequestRecord | None] = SimpleQueue()
        self._closing = Event()
        self._file = RotatingFile(path, most_bytes=most_bytes, kept=kept)
        self._thread = Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def note(self, record: RequestRecord) -> None:
        """Put down a request that has ended, unless it never ran; never waits."""
        if not record.ran:
            return
        if self._queue.qsize() >= self._most_waiting:
            self.dropped += 1
            return
        self._queue.put(record)

    def configure(self, *, most_bytes: int, kept: int, fsync_s: float) -> None:
        """Take new limits; the thread reads them with its next batch."""
        self._fsync_s = fsync_s
        self._file.configure(most_bytes=most_bytes, kept=kept)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write and sync what waits, for at most `timeout_s`, and close the file."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        last, dirty_since = False, 0.0
        while not last:
            batch, last = self._batch(self._fsync_s if dirty_since else None)
            if batch:
                self._write(batch)
                dirty_since = dirty_since or monotonic()
            if dirty_since and (last or monotonic() - dirty_since >= self._fsync_s):
                self._sync()
                dirty_since = 0.0

    def _batch(self, timeout_s: float | None) -> tuple[list[RequestRecord], bool]:
        """Return what is there a moment after the first came, and whether the end was among it."""
        batch: list[RequestRecord] = []
        try:
            item = self._queue.get(timeout=timeout_s)
            if item is not None:
                self._closing.wait(_PAUSE_S)  # to be woken by every request would cost the loop
            while item is not None:
                batch.append(item)
                if len(batch) >= _BATCH:
                    return batch, False
                item = self._queue.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _write(self, batch: list[RequestRecord]) -> None:
        stamp = self._today().isoformat(timespec="milliseconds")
        try:
            self._file.write(b"".join([line(record, stamp) for record in batch]))
        except OSError as error:
            self.dropped += len(batch)
            self._complain(error)
        else:
            self._failing = False

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            _log.error("usage is not recorded: %s", error)


def line(record: RequestRecord, stamp: str) -> bytes:
    """Return one request as a line; `stamp` is when it was written, UTC."""
    return orjson.dumps(
        {
            "ts": stamp,
            "request_id": record.request_id,
            "key": record.key,
            "class": record.cls,
            "model": record.model,
            "api": record.api,
            "backend": record.backend,
            "prompt_tokens": record.prompt_tokens or 0,
            "cached_tokens": record.cached_tokens or 0,
            "completion_tokens": record.used_completion_tokens,
            "estimated": record.completion_tokens is None,
            "outcome": record.outcome,
            "total_s": round(record.total_s, 3),
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
