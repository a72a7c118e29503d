"""Log lines: the program's own and one per request, as JSON or for a console, on standard error.

The event loop only formats and enqueues; a thread writes. A stalled terminal or pipe must never
stall a stream: when the queue is full, lines are dropped and their number is written later. Must
never hold a prompt or a key.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import BinaryIO, Protocol

import orjson

from gateway.telemetry.record import RequestRecord

_MAX_LINES = 10_000  # about 5 MB of request lines
_BATCH = 4_096
_PAUSE_S = 0.05  # between batches: waking the thread for every line would double a line's cost


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
        if settings.requests and level <= logging.INFO:
            self.access = self._json_line if as_json else self._console_line
        else:
            self.access = None

    def close(self) -> None:
        """Take the logging out again and write what is queued."""
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level_before)
        self.access = None
        self._writer.close()

    def _json_line(self, record: RequestRecord) -> None:
        self._writer.write(json_line(record, _now()))

    def _console_line(self, record: RequestRecord) -> None:
        self._writer.write(console_line(record, _now()))


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
            "chunks": record.chunks,
            "ran": record.ran,
            "attempts": record.attempts,
            "stream": record.stream,
            "client": record.client,
            "reason": record.reason,
        }
    )


def console_line(record: RequestRecord, date: str) -> bytes:
    """Return a request's line for people."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}s"
    tokens = f"{_known(record.prompt_tokens)}+{_known(record.completion_tokens)}"
    text = (
        f"{date[11:23]} {record.status} {record.outcome} {record.api} {record.model or '-'}"
        f" {record.cls or '-'} -> {record.backend or '-'} {record.total_s:.3f}s ttft {ttft}"
        f" tokens {tokens} cached {_known(record.cached_tokens)} {record.request_id}"
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
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _dump(line).decode()


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        date = _date(record.created)[11:23]
        text = f"{date} {record.levelname.lower()} {record.name}: {_printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _date(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
