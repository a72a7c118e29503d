import random
import sys

import pytest

from gateway.config.schema import TracesConfig
from gateway.extras import MissingExtra
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.traces import (
    Parent,
    Trace,
    Tracing,
    is_on,
    open_tracing,
    parse_traceparent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"
PARENT = (int(TRACE, 16), int(SPAN, 16), True)
ON = TracesConfig(endpoint="http://127.0.0.1:1")


class Keeper:
    """Takes traces; samples what it is told to."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.traces: list[Trace] = []
        self.asked: list[Parent | None] = []
        self._sampled = sampled

    def sampled(self, parent: Parent | None, trace_id: int) -> bool:
        assert trace_id
        self.asked.append(parent)
        return self._sampled

    def put(self, trace: Trace) -> None:
        self.traces.append(trace)

    def close(self) -> None: ...


def begin(keeper: Keeper, traceparent: str | None = None) -> Trace:
    record = RequestRecord("r", "/v1/chat/completions", 1.0)
    context = None if traceparent is None else traceparent.encode()
    return Tracing(keeper, random.Random(1)).begin(record, "POST", context)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (VALID, PARENT),
        (f" {VALID} ", PARENT),
        (f"00-{TRACE}-{SPAN}-00", (*PARENT[:2], False)),
        (f"00-{TRACE}-{SPAN}-ff", PARENT),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", PARENT),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        (f"{VALID},{VALID}", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_as_w3c_defines_it(value: str, found: Parent | None) -> None:
    assert parse_traceparent(value.encode()) == found


def test_a_clients_trace_is_continued_and_the_engine_gets_the_attempt_as_parent() -> None:
    keeper = Keeper()
    trace = begin(keeper, VALID)
    trace.begin_attempt("a", 2.0)

    assert keeper.asked == [PARENT]
    assert (trace.trace_id, trace.parent_id) == PARENT[:2]
    span = trace.attempts[0].span_id
    assert trace.header == f"traceparent: 00-{TRACE}-{span:016x}-01\r\n".encode()
    assert span not in (PARENT[1], trace.span_id)
    assert trace.record.trace_id == TRACE


def test_every_attempt_is_another_parent() -> None:
    trace = begin(Keeper())
    trace.begin_attempt("a", 2.0)
    first = trace.header
    trace.end_attempt("reset", 3.0)
    trace.begin_attempt("b", 3.0)

    assert trace.header != first
    assert parse_traceparent(trace.header.split(b" ")[1]) == (
        trace.trace_id,
        trace.attempts[1].span_id,
        True,
    )


def test_what_is_not_sampled_stays_the_clients_own_and_is_kept_by_nobody() -> None:
    keeper = Keeper(sampled=False)
    trace = begin(keeper, f"00-{TRACE}-{SPAN}-00")
    trace.begin_attempt("a", 2.0)
    trace.first_content(3.0)
    trace.end_attempt("ok", 4.0)
    Tracing(keeper, random.Random(1)).finish(trace)

    assert trace.header == f"traceparent: 00-{TRACE}-{SPAN}-00\r\n".encode()
    assert trace.record.trace_id is None
    assert keeper.traces == []


def test_a_trace_of_our_own_that_is_not_sampled_says_so_to_the_engine() -> None:
    header = begin(Keeper(sampled=False)).header

    assert header.endswith(b"-00\r\n")
    assert parse_traceparent(header.split(b" ")[1]) is not None


def test_an_attempt_ends_once() -> None:
    trace = begin(Keeper())
    trace.end_attempt("ok", 1.0)  # none runs
    trace.begin_attempt("a", 2.0)
    trace.end_attempt("reset", 3.0)
    trace.end_attempt("ok", 4.0)

    assert [(a.result, a.ended_at) for a in trace.attempts] == [("reset", 3.0)]


@pytest.mark.parametrize(
    ("settings", "env", "on"),
    [
        (TracesConfig(), {}, False),
        (ON, {}, True),
        (ON, {"OTEL_SDK_DISABLED": "true"}, False),
        (ON, {"OTEL_TRACES_EXPORTER": "none"}, True),
        (TracesConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (TracesConfig(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, True),
        (TracesConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (
            TracesConfig(),
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
            False,
        ),
        (TracesConfig(sample=1.0, service_name="x"), {}, False),
    ],
)
def test_tracing_is_on_when_a_collector_is_named(
    settings: TracesConfig, env: dict[str, str], on: bool
) -> None:
    assert is_on(settings, env) is on


def test_without_the_extra_only_a_configured_collector_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    said: list[str] = []
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}

    assert open_tracing(TracesConfig(), env, random.Random(1), said.append) is None
    assert "needs the extra `otel`: pip install" in said[0]
    with pytest.raises(MissingExtra, match="traces needs the extra `otel`"):
        open_tracing(ON, {}, random.Random(1), said.append)
    assert open_tracing(TracesConfig(), {}, random.Random(1), said.append) is None
    assert len(said) == 1
