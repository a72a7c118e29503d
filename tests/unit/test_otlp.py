import logging
import random
from collections.abc import Sequence
from threading import Event, Semaphore

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from gateway.config.schema import TracesConfig
from gateway.core.types import Outcome
from gateway.telemetry import otlp
from gateway.telemetry.otlp import Exporter, Spans, shown
from gateway.telemetry.record import AttemptResult, RequestRecord
from gateway.telemetry.traces import Trace

PARENT = (7, 9, True)


def finished(outcome: Outcome = Outcome.OK, status: int = 200) -> Trace:
    """Return a streamed request that waited, tried two backends and came from a client's span."""
    record = RequestRecord(
        "r-1",
        "/v1/chat/completions",
        10.0,
        cls="chat",
        model="m",
        backend="b",
        key="team",
        status=status,
        outcome=outcome,
        queue_s=0.5,
        ttft_s=2.0,
        total_s=4.0,
        prompt_tokens=100,
        completion_tokens=20,
        predicted_tokens=64,
        cached_tokens=80,
        attempts=2,
        stream=True,
    )
    trace = Trace(random.Random(1), record, method="POST", parent=PARENT, trace_id=7, sampled=True)
    trace.queued_at = 10.25
    trace.begin_attempt("a", 10.75)
    trace.end_attempt(AttemptResult.CONNECT_FAILED, 11.0)
    trace.begin_attempt("b", 11.0)
    trace.first_content(12.0)
    trace.end_attempt(AttemptResult.OK, 14.0)
    return trace


def spans_of(trace: Trace) -> dict[str, ReadableSpan]:
    found: dict[str, ReadableSpan] = {}
    for span in Spans(Resource({"service.name": "x"})).of(trace):
        name = span.name if span.name not in found else f"{span.name} again"
        found[name] = span
    return found


def test_a_request_is_one_span_per_phase_below_the_clients() -> None:
    trace = finished()
    spans = spans_of(trace)

    def seconds(span: ReadableSpan) -> tuple[float, float]:
        assert span.start_time is not None
        assert span.end_time is not None
        began = trace.began_ns
        return (span.start_time - began) / 1e9, (span.end_time - began) / 1e9

    assert {name: seconds(span) for name, span in spans.items()} == {
        "POST /v1/chat/completions": (0.0, 4.0),
        "queue": (0.25, 0.75),
        "chat m": (0.75, 1.0),
        "chat m again": (1.0, 4.0),
        "first token": (1.0, 2.0),
        "stream": (2.0, 4.0),
    }
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent}
    root, last = trace.span_id, trace.attempts[1].span_id
    assert parents == {
        "POST /v1/chat/completions": 9,
        "queue": root,
        "chat m": root,
        "chat m again": root,
        "first token": last,
        "stream": last,
    }
    contexts = [span.context for span in spans.values()]
    assert {context.trace_id for context in contexts if context} == {7}
    assert len({context.span_id for context in contexts if context}) == len(spans)


def test_attributes_are_those_of_the_conventions() -> None:
    spans = spans_of(finished())

    root = spans["POST /v1/chat/completions"]
    assert root.kind is SpanKind.SERVER
    assert root.attributes is not None
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["radixgate.class"] == "chat"
    assert root.attributes["radixgate.key"] == "team"
    assert "error.type" not in root.attributes
    call = spans["chat m again"]
    assert call.kind is SpanKind.CLIENT
    assert dict(call.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 80,
        "radixgate.backend": "b",
        "radixgate.attempt": "ok",
    }
    failed = spans["chat m"]
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "connect_failed"
    assert failed.status.status_code is StatusCode.ERROR
    assert "gen_ai.usage.input_tokens" not in failed.attributes


@pytest.mark.parametrize(
    ("outcome", "status", "failed"),
    [
        (Outcome.OK, 200, False),
        (Outcome.REJECTED_RATE, 429, False),
        (Outcome.UPSTREAM_TRUNCATED, 200, True),
        (Outcome.INTERNAL_ERROR, 500, True),
    ],
)
def test_a_request_is_an_error_where_it_is_not_the_clients(
    outcome: Outcome, status: int, failed: bool
) -> None:
    root = spans_of(finished(outcome, status))["POST /v1/chat/completions"]

    assert (root.status.status_code is StatusCode.ERROR) is failed


def test_what_was_refused_has_its_own_span_alone() -> None:
    record = RequestRecord("r", "/v1/rerank", 1.0, status=404, outcome=Outcome.NOT_FOUND)
    trace = Trace(random.Random(1), record, method="POST", parent=None, trace_id=5, sampled=True)

    (span,) = spans_of(trace).values()

    assert span.name == "POST /v1/rerank"
    assert span.parent is None
    assert (span.attributes or {})["error.type"] == "not_found"


def test_traces_are_sent_and_the_last_ones_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "_CLOSE_S", 30.0)  # however busy the machine is
    memory = InMemorySpanExporter()
    exporter = Exporter(memory, Resource({}), ALWAYS_ON)
    for _ in range(600):
        exporter.put(finished())
    exporter.close()

    assert len(memory.get_finished_spans()) == 600 * 6
    assert exporter.dropped == 0


class Stuck(SpanExporter):
    """A collector that does not answer until told; then it answers as told."""

    def __init__(self) -> None:
        self.entered, self.left = Semaphore(0), Semaphore(0)
        self.go = Event()
        self.answers: list[SpanExportResult | Exception] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert spans
        self.entered.release()
        self.go.wait(30)
        answer = self.answers.pop(0) if self.answers else SpanExportResult.SUCCESS
        self.left.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self) -> None:
        self.go.set()


def test_a_stuck_collector_costs_traces_and_never_time() -> None:
    stuck = Stuck()
    exporter = Exporter(stuck, Resource({}), ALWAYS_ON, max_traces=10)
    exporter.put(finished())
    assert stuck.entered.acquire(timeout=30)
    for _ in range(25):
        exporter.put(finished())

    assert exporter.dropped == 15
    stuck.go.set()
    exporter.close()


def test_a_collector_that_is_gone_is_told_of_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = Stuck()
    failure = SpanExportResult.FAILURE
    stuck.answers = [failure, RuntimeError("no"), failure, SpanExportResult.SUCCESS]
    stuck.go.set()
    with caplog.at_level(logging.INFO, "radixgate.traces"):
        to = "https://user:secret@collector:4318/v1/traces?token=secret"
        exporter = Exporter(stuck, Resource({}), ALWAYS_ON, to=to, pause_s=0)
        for _ in range(4):
            exporter.put(finished())
            assert stuck.left.acquire(timeout=30)
        exporter.close()

    told = [record.getMessage() for record in caplog.records]
    collector = "the collector of traces at https://collector:4318/v1/traces"
    assert told == [
        f"{collector} does not take them",
        f"traces were not sent to {collector}: RuntimeError",
        f"{collector} is back",
    ]


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
        ("https://u:p@[::1]:1/a?key=k#f", "https://[::1]:1/a"),
        ("", "an address that is no URL"),
        ("secret", "an address that is no URL"),
        ("http://[::1", "an address that is no URL"),
    ],
)
def test_a_collectors_address_is_shown_without_what_lets_one_in(url: str, seen: str) -> None:
    assert shown(url) == seen


def test_a_clients_decision_is_kept_and_the_share_is_of_our_own() -> None:
    exporter = Exporter(InMemorySpanExporter(), Resource({}), ParentBased(TraceIdRatioBased(0.25)))
    bound = 1 << 62  # a quarter of what 64 bits can say: the sampler reads the lower half

    assert exporter.sampled((7, 9, True), 7)
    assert not exporter.sampled((7, 9, False), 7)
    assert exporter.sampled(None, bound - 1)
    assert not exporter.sampled(None, bound + 1)
    exporter.close()


def test_the_configuration_comes_before_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "by-variable")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1/base")

    by_variable = Exporter.of(TracesConfig())
    settings = TracesConfig(endpoint="http://127.0.0.1:2/", sample=1.0, service_name="named")
    by_file = Exporter.of(settings)

    found = [
        (each._exporter._endpoint, each._spans._resource.attributes["service.name"])  # type: ignore[attr-defined]
        for each in (by_variable, by_file)
    ]
    assert found == [
        ("http://127.0.0.1:1/base/v1/traces", "by-variable"),
        ("http://127.0.0.1:2/v1/traces", "named"),
    ]
    assert [each._collector.rpartition(" ")[2] for each in (by_variable, by_file)] == [
        "http://127.0.0.1:1/base/v1/traces",
        "http://127.0.0.1:2/v1/traces",
    ]
    assert not by_variable.sampled(None, 1)
    assert by_file.sampled(None, 1)
    by_variable.close()
    by_file.close()
