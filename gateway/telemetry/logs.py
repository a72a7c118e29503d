"""Log lines: the program's own and one per request, as JSON or for a console, on standard error.

The event loop only formats and enqueues; a thread writes. A stalled terminal or pipe must never
stall a stream: when the queue is full, lines are dropped and their number is written later. Must
never hold a prompt or a key: of a fault met with a request in hand, what the exception says is not
written, as it may quote the request, nor what a callback was called with.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import time_ns
from typing import BinaryIO, Protocol
from zlib import crc32

import orjson

from gateway.core.types import Outcome
from gateway.telemetry.record import RequestRecord

_MAX_LINES = 10_000  # about 5 MB of request lines
_BATCH = 4_096
_PAUSE_S = 0.05  # between batches: waking the thread for every line would double a line's cost
_USUAL = frozenset({Outcome.OK, Outcome.CLIENT_CLOSED})  # what sampling may leave out
_HASHES = 1 << 32
# Loggers whose faults were met with a request in hand. All others have nothing to quote.
_NEAR_REQUESTS = ("exchange", "edge", "relay", "prompt", "admin", "tasks", "record", "usage")
_WITHHELD = frozenset(f"radixgate.{name}" for name in _NEAR_REQUESTS) | {"asyncio"}


class LogSettings(Protocol):
    """The `log` section of the configuration."""

    @property
    def format(self) -> str:
        """Return `json` or `console`."""

    @property
    def level(self) -> str:
        """Return the least severity written."""

    @property
    def requests(self) -> bool:
        """Return whether requests get a line; they count as `info`."""

    @property
    def sample(self) -> float:
        """Return the share of the usual requests that get one."""


class LineWriter:
    """Writes lines to `stream` in a thread, in order. `dropped` counts what found no room."""

    def __init__(self, stream: BinaryIO, *, max_lines: int = _MAX_LINES) -> None:
        self.dropped = 0
        self._unreported = 0
        self._stream = stream
        self._max_lines = max_lines
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._closing = Event()
        # Started with the first line: while a process has one thread its system calls are cheaper.
        self._thread: Thread | None = None

    def write(self, line: bytes) -> None:
        """Enqueue a line without its end; never waits."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()
        if self._queue.qsize() >= self._max_lines:
            self.dropped += 1
            self._unreported += 1
            return
        if self._unreported:
            self._queue.put(b"%d log lines dropped: the reader is too slow" % self._unreported)
            self._unreported = 0
        self._queue.put(line)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, for at most `timeout_s`."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            lines = [line]
            last = self._drain(lines)
            with suppress(OSError, ValueError):  # nobody reads, or the stream was closed
                self._stream.write(b"\n".join(lines) + b"\n")
                self._stream.flush()
            if last:
                return
            self._closing.wait(_PAUSE_S)

    def _drain(self, lines: list[bytes]) -> bool:
        """Append what is queued; return whether the end was among it."""
        with suppress(Empty):
            while len(lines) < _BATCH:
                line = self._queue.get_nowait()
                if line is None:
                    return True
                lines.append(line)
        return False


class Logs:
    """The installed logging. `access` is what `Telemetry.log` should be: None while off."""

    def __init__(self, writer: LineWriter) -> None:
        self.access: Callable[[RequestRecord], None] | None = None
        self._writer = writer
        self._dates = _Dates()
        self._line = json_line
        self._most = _HASHES
        self._handler = _Handler(writer)
        self._root = logging.getLogger()
        self._level_before = self._root.level
        self._root.addHandler(self._handler)

    def apply(self, settings: LogSettings) -> None:
        """Take the settings, at start and at each reload; set `Telemetry.log` again after it."""
        level = logging.getLevelNamesMapping()[settings.level.upper()]
        as_json = settings.format == "json"
        self._root.setLevel(level)
        self._handler.setFormatter(_JsonFormatter() if as_json else _ConsoleFormatter())
        self._line = json_line if as_json else console_line
        self._most = int(settings.sample * _HASHES)
        self.access = None
        if settings.requests and level <= logging.INFO:
            self.access = self._write if self._most >= _HASHES else self._write_some

    def close(self) -> None:
        """Take the logging out again and write what is queued."""
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level_before)
        self.access = None
        self._writer.close()

    def _write(self, record: RequestRecord) -> None:
        self._writer.write(self._line(record, self._dates.now()))

    def _write_some(self, record: RequestRecord) -> None:
        """Write a line for the share of the usual requests, and for every other."""
        if record.outcome not in _USUAL or crc32(record.request_id.encode()) < self._most:
            self._write(record)


def setup(settings: LogSettings, stream: BinaryIO | None = None) -> Logs:
    """Install logging on `stream`, standard error by default; close it at the end."""
    logs = Logs(LineWriter(stream or sys.stderr.buffer))
    logs.apply(settings)
    return logs


def json_line(record: RequestRecord, date: str) -> bytes:
    """Return a request's line as one JSON object."""
    return _dump(
        {
            "ts": date,
            "level": "info",
            "event": "request",
            "request_id": record.request_id,
            "api": record.api,
            "class": record.cls,
            "model": record.model,
            "backend": record.backend,
            "key": record.key,
            "status": record.status,
            "outcome": record.outcome,
            "queue_s": _rounded(record.queue_s),
            "ttft_s": _rounded(record.ttft_s),
            "total_s": _rounded(record.total_s),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "predicted_tokens": record.predicted_tokens,
            "cached_tokens": record.cached_tokens,
            "uncached_tokens": _uncached(record),
            "chunks": record.chunks,
            "ran": record.ran,
            "attempts": record.attempts,
            "stream": record.stream,
            "client": record.client,
            "reason": record.reason,
            "trace_id": record.trace_id,
        }
    )


def console_line(record: RequestRecord, date: str) -> bytes:
    """Return a request's line for people."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}s"
    queue = "-" if record.queue_s is None else f"{record.queue_s:.3f}s"
    tokens = f"{_known(record.prompt_tokens)}+{_known(record.completion_tokens)}"
    hit = record.predicted_tokens if record.cached_tokens is None else record.cached_tokens
    text = (
        f"{date[11:23]} {record.status} {record.outcome} {record.api} {record.model or '-'}"
        f" {record.cls or '-'} -> {record.backend or '-'} {record.total_s:.3f}s ttft {ttft}"
        f" queue {queue} tokens {tokens} hit {_known(hit)} uncached {_known(_uncached(record))}"
        f" attempts {record.attempts} key {record.key or '-'} {record.request_id}"
    )
    return _printable(text).encode()


class _Handler(logging.Handler):
    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode(errors="replace"))
        except Exception:  # noqa: BLE001 - the rule of logging handlers: never raise
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _date(record.created),
            "level": record.levelname.lower(),
            "event": record.name,
            "message": _message(record),
        }
        if record.exc_info:
            line["error"] = _error(record, self)
        return _dump(line).decode()


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        date = _date(record.created)[11:23]
        text = f"{date} {record.levelname.lower()} {record.name}: {_printable(_message(record))}"
        if record.exc_info:
            text += "\n" + _error(record, self)
        return text


def _message(record: logging.LogRecord) -> str:
    """Return what is said; asyncio shows a callback's arguments, which may be a request's bytes."""
    text = record.getMessage()
    return text.partition("\n")[0].partition("(")[0] if record.name == "asyncio" else text


def _error(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    """Return the traceback; where a request was in hand, without what the exceptions say."""
    assert record.exc_info
    if record.name not in _WITHHELD:
        return formatter.formatException(record.exc_info)
    blocks = []
    error = record.exc_info[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        blocks.append(f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(reversed(blocks))


def _uncached(record: RequestRecord) -> int | None:
    """Return the prompt tokens that were computed: as the engine says, else as predicted."""
    hit = record.predicted_tokens if record.cached_tokens is None else record.cached_tokens
    if record.prompt_tokens is None or hit is None:
        return None
    return max(0, record.prompt_tokens - hit)


def _dump(line: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(line)
    except orjson.JSONEncodeError:  # a lone surrogate from somebody's JSON
        return orjson.dumps({key: _clean(value) for key, value in line.items()})


def _clean(value: object) -> object:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _printable(text: str) -> str:
    """Return `text` without what could forge a line or move a cursor."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)


class _Dates:
    """Says what time it is; the text of a second is made once (a third of a line's cost)."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def now(self) -> str:
        """Return the date in ISO 8601 with milliseconds."""
        second, ms = divmod(time_ns() // 1_000_000, 1000)
        if second != self._second:
            self._second = second
            self._text = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._text}.{ms:03d}+00:00"


def _date(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
