import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event, Semaphore
from typing import BinaryIO

import orjson
import pytest
from msgspec.structs import replace

from gateway.config.schema import LogConfig
from gateway.core.types import Outcome
from gateway.telemetry import logs
from gateway.telemetry.logs import LineWriter, Logs, console_line, json_line, setup
from gateway.telemetry.record import RequestRecord

RECORD = RequestRecord(
    "r-1",
    "/v1/messages",
    5.0,
    cls="coding",
    model="m",
    backend="a",
    key="team",
    status=200,
    outcome=Outcome.OK,
    ttft_s=0.1234567,
    total_s=1.5,
    prompt_tokens=9,
    stream=True,
)
DATE = "2026-11-30T12:00:00.125+00:00"


@dataclass
class Sink:
    logs: Logs
    stream: io.BytesIO

    def lines(self) -> list[bytes]:
        self.logs.close()
        return self.stream.getvalue().splitlines()


@pytest.fixture
def sink() -> Iterator[Sink]:
    stream = io.BytesIO()
    logs = setup(LogConfig(), stream)
    yield Sink(logs, stream)
    logs.close()


def test_request_line_has_every_field_of_the_record() -> None:
    line = orjson.loads(json_line(RECORD, DATE))

    assert line["class"] == "coding"
    assert line["outcome"] == "ok"
    assert line["ttft_s"] == 0.123457
    assert line["queue_s"] is None
    assert line["ts"] == DATE
    fields = {
        name for name in RequestRecord.__struct_fields__ if name not in ("received_at", "cls")
    }
    assert fields <= line.keys()


def test_lone_surrogate_does_not_lose_the_line() -> None:
    line = orjson.loads(json_line(replace(RECORD, reason="\ud83d"), DATE))

    assert line["reason"] == "?"
    assert line["request_id"] == "r-1"


def test_console_line_is_one_printable_line() -> None:
    line = console_line(replace(RECORD, model="a\nb\x1b[2J"), DATE).decode()

    assert line.isprintable()
    assert line.startswith("12:00:00.125 200 ok /v1/messages a?b?[2J coding -> a 1.500s")


def test_request_lines_follow_the_settings(sink: Sink) -> None:
    def lines_on(settings: LogConfig) -> bool:
        sink.logs.apply(settings)
        return sink.logs.access is not None

    assert lines_on(LogConfig())
    assert not lines_on(LogConfig(requests=False))
    assert not lines_on(LogConfig(level="warning"))


def test_a_sample_is_chosen_by_request_id_and_never_of_what_failed(sink: Sink) -> None:
    ids = [f"rg-{number:x}" for number in range(4_000)]
    sink.logs.apply(LogConfig(sample=0.1))
    assert sink.logs.access is not None
    for request_id in ids:
        sink.logs.access(replace(RECORD, request_id=request_id))
        sink.logs.access(replace(RECORD, request_id=request_id))
    for outcome in Outcome:
        sink.logs.access(replace(RECORD, request_id="", outcome=outcome))

    lines = [orjson.loads(line) for line in sink.lines()]
    seen = [line["request_id"] for line in lines if line["request_id"]]
    assert seen[::2] == seen[1::2]
    assert 300 < len(seen) / 2 < 500
    always = {line["outcome"] for line in lines if not line["request_id"]}
    assert always >= set(Outcome) - {Outcome.OK, Outcome.CLIENT_CLOSED}


@pytest.mark.parametrize(("sample", "lines"), [(0.0, 0), (1.0, 100)])
def test_a_sample_of_nothing_and_of_all_is_that(sink: Sink, sample: float, lines: int) -> None:
    sink.logs.apply(LogConfig(format="console", sample=sample))
    assert sink.logs.access is not None
    for number in range(100):
        sink.logs.access(replace(RECORD, request_id=str(number)))

    assert len(sink.lines()) == lines


@pytest.mark.parametrize(
    ("predicted", "cached", "uncached"),
    [(6, 4, 5), (6, None, 3), (None, None, None), (12, None, 0)],
)
def test_uncached_is_what_the_engine_says_or_else_what_was_predicted(
    predicted: int | None, cached: int | None, uncached: int | None
) -> None:
    record = replace(RECORD, predicted_tokens=predicted, cached_tokens=cached)

    assert orjson.loads(json_line(record, DATE))["uncached_tokens"] == uncached
    shown = "?" if uncached is None else str(uncached)
    assert f"uncached {shown} " in console_line(record, DATE).decode()


def test_a_fault_near_a_request_is_told_without_its_words(sink: Sink) -> None:
    for name in ("radixgate.exchange", "radixgate.app"):
        try:
            int("why")
        except ValueError:
            logging.getLogger(name).exception("failed")

    near, far = (orjson.loads(line)["error"] for line in sink.lines())
    assert near.endswith("\nValueError")
    assert "test_logs.py" in near
    assert far.endswith("invalid literal for int() with base 10: 'why'")


def test_a_line_is_dated_when_it_is_written(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1_796_040_000_125_999_999, 1_796_040_000_999_000_000, 1_796_040_001_000_000_000])
    monkeypatch.setattr(logs, "time_ns", lambda: next(times))
    assert sink.logs.access is not None
    for _ in range(3):
        sink.logs.access(RECORD)

    assert [orjson.loads(line)["ts"] for line in sink.lines()] == [
        "2026-11-30T12:00:00.125+00:00",
        "2026-11-30T12:00:00.999+00:00",
        "2026-11-30T12:00:01.000+00:00",
    ]


def test_lines_are_written_in_order(sink: Sink) -> None:
    assert sink.logs.access is not None
    for number in range(1_000):
        sink.logs.access(replace(RECORD, request_id=str(number)))

    ids = [orjson.loads(line)["request_id"] for line in sink.lines()]
    assert ids == [str(number) for number in range(1_000)]


def test_program_messages_share_the_stream(sink: Sink) -> None:
    logging.getLogger("radixgate.test").warning("backend %s is down", "a")
    logging.getLogger("radixgate.test").debug("not at this level")

    (line,) = sink.lines()
    found = orjson.loads(line)
    assert found["message"] == "backend a is down"
    assert found["level"] == "warning"
    assert found["event"] == "radixgate.test"


def test_exception_comes_with_its_trace(sink: Sink) -> None:
    try:
        int("why")
    except ValueError:
        logging.getLogger("radixgate.test").exception("failed")

    assert "ValueError: invalid literal" in orjson.loads(sink.lines()[0])["error"]


def test_console_message_cannot_forge_a_line(sink: Sink) -> None:
    sink.logs.apply(LogConfig(format="console"))
    logging.getLogger("radixgate.test").info("one\ntwo")
    assert sink.logs.access is not None
    sink.logs.access(RECORD)

    first, second = sink.lines()
    assert first.endswith(b"info radixgate.test: one?two")
    assert b"/v1/messages" in second


def test_close_takes_the_handler_out() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    setup(LogConfig(level="debug"), io.BytesIO()).close()

    assert (root.handlers, root.level) == before


class Stalled(io.BytesIO):
    """A reader that takes nothing until told."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = Event()
        self.go = Event()
        self.written = Semaphore(0)

    def write(self, data: object, /) -> int:
        self.entered.set()
        self.go.wait(30)
        count = super().write(data)  # type: ignore[arg-type]
        self.written.release()
        return count


def test_stalled_reader_costs_lines_and_never_time() -> None:
    stream = Stalled()
    writer = LineWriter(stream, max_lines=10)
    writer.write(b"first")
    assert stream.entered.wait(30)
    for _ in range(25):
        writer.write(b"line")

    assert writer.dropped == 15
    stream.go.set()
    writer.close(30)
    assert stream.getvalue().splitlines() == [b"first", *[b"line"] * 10]


def test_number_of_lost_lines_is_written_when_there_is_room_again() -> None:
    stream = Stalled()
    writer = LineWriter(stream, max_lines=1)
    writer.write(b"first")
    assert stream.entered.wait(30)
    writer.write(b"second")
    writer.write(b"lost")
    stream.go.set()
    assert stream.written.acquire(timeout=30)
    assert stream.written.acquire(timeout=30)
    writer.write(b"later")
    writer.close(30)

    told = b"1 log lines dropped: the reader is too slow"
    assert stream.getvalue().splitlines() == [b"first", b"second", told, b"later"]


def test_closed_pipe_does_not_end_the_writer() -> None:
    reader, end = os.pipe()
    os.close(reader)
    stream: BinaryIO = os.fdopen(end, "wb", buffering=0)
    writer = LineWriter(stream)
    writer.write(b"into nothing")
    writer.write(b"again")
    writer.close(30)

    assert writer.dropped == 0
    stream.close()
