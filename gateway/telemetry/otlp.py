"""Spans of finished traces, sent to an OpenTelemetry collector by a thread of their own.

The only module that imports OpenTelemetry, and imported only while tracing is on. A collector that
is slow or gone must cost a request nothing: when the queue is full, traces are dropped and counted.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

import gateway
from gateway.core.types import Outcome
from gateway.telemetry.record import AttemptResult, RequestRecord
from gateway.telemetry.traces import Attempt, Parent, Trace, TraceSettings

_log = logging.getLogger("radixgate.traces")
_MAX_TRACES = 2_048  # waiting, about 2 MB
_BATCH = 256  # traces of some four spans each
_PAUSE_S = 0.5  # between batches
_CLOSE_S = 3.0
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
# GenAI conventions name these three; others are called by their route's last part.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_FINE = frozenset({AttemptResult.OK, AttemptResult.ABORTED})
_NO_URL = "an address that is no URL"
_Attributes = dict[str, str | bool | int | float]


class Exporter:
    """A bounded queue of traces and the thread that empties it. `dropped` counts what found no room."""

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        sampler: Sampler,
        *,
        to: str = "",
        max_traces: int = _MAX_TRACES,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """`to` is the collector's URL; its credentials are never shown."""
        self.dropped = 0
        self._collector = f"the collector of traces at {shown(to)}"
        self._exporter = exporter
        self._sampler = sampler
        self._spans = Spans(resource)
        self._max_traces = max_traces
        self._pause_s = pause_s
        self._queue: SimpleQueue[Trace | None] = SimpleQueue()
        self._closing = Event()
        self._failing = False
        self._thread = Thread(target=self._run, name="trace-sender", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, settings: TraceSettings) -> "Exporter":
        """Return an exporter as configured; what is not given is OTEL_*'s to say."""
        # It tells every retry; what matters is told once, below.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        named = settings.service_name or os.environ.get("OTEL_SERVICE_NAME") or "radixgate"
        resource = Resource.create({SERVICE_NAME: named, SERVICE_VERSION: gateway.__version__})
        sampler = None
        if settings.sample is not None:
            sampler = ParentBased(TraceIdRatioBased(settings.sample))
        provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        url = settings.endpoint
        endpoint = None if url is None else url.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(endpoint=endpoint)
        to = endpoint or str(getattr(exporter, "_endpoint", ""))  # as the variables have it
        return cls(exporter, provider.resource, provider.sampler, to=to)

    def sampled(self, parent: Parent | None, trace_id: int) -> bool:
        """Return whether a request is traced."""
        context = None if parent is None else _context(parent)
        decision = self._sampler.should_sample(context, trace_id, "request").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def put(self, trace: Trace) -> None:
        """Take a finished trace; never waits."""
        if self._queue.qsize() >= self._max_traces:
            self.dropped += 1
        else:
            self._queue.put(trace)

    def close(self) -> None:
        """Send what is queued, for at most some seconds."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # ends its waits between attempts, too
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        told = 0
        while (trace := self._queue.get()) is not None:
            traces = [trace]
            last = self._drain(traces)
            self._send(traces)
            if self.dropped > told:
                told = self.dropped
                _log.warning("%d traces dropped so far: %s is too slow", told, self._collector)
            if last:
                return
            self._closing.wait(self._pause_s)

    def _drain(self, traces: list[Trace]) -> bool:
        """Append what is queued; return whether the end was among it."""
        with suppress(Empty):
            while len(traces) < _BATCH:
                trace = self._queue.get_nowait()
                if trace is None:
                    return True
                traces.append(trace)
        return False

    def _send(self, traces: list[Trace]) -> None:
        try:
            spans = [span for trace in traces for span in self._spans.of(trace)]
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - traces are lost, never the thread
            _log.warning("traces were not sent to %s: %s", self._collector, type(error).__name__)
            taken = False
        if taken == self._failing:
            self._failing = not taken
            tell = _log.info if taken else _log.warning
            tell("%s %s", self._collector, "is back" if taken else "does not take them")


def shown(url: str) -> str:
    """Return a URL as the log may show it: without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return _NO_URL
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if host else _NO_URL


class Spans:
    """Makes a trace's spans. Times come as monotonic seconds and leave as dates."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("radixgate", gateway.__version__)

    def of(self, trace: Trace) -> Iterator[ReadableSpan]:
        """Yield the spans of a finished request: the request's own, then its phases'."""
        record = trace.record
        begin, root = record.received_at, trace.span_id
        failed = record.status >= 500 or record.outcome in _FAILED
        yield self._span(
            trace,
            f"{trace.method} {record.api}",
            (begin, begin + record.total_s),
            ids=(root, trace.parent_id),
            kind=SpanKind.SERVER,
            attributes=_of_request(trace),
            failed=failed,
        )
        if trace.queued_at and record.queue_s:
            times = (trace.queued_at, trace.queued_at + record.queue_s)
            yield self._span(trace, "queue", times, ids=(root ^ 1, root))
        for attempt in trace.attempts:
            yield from self._attempt(trace, attempt, last=attempt is trace.attempts[-1])

    def _attempt(self, trace: Trace, attempt: Attempt, *, last: bool) -> Iterator[ReadableSpan]:
        end = attempt.ended_at
        name = f"{_operation(trace.record)} {trace.record.model or ''}".rstrip()
        yield self._span(
            trace,
            name,
            (attempt.started_at, end),
            ids=(attempt.span_id, trace.span_id),
            kind=SpanKind.CLIENT,
            attributes=_of_attempt(trace.record, attempt, last=last),
            failed=attempt.result not in _FINE,
        )
        if attempt.first_at:
            here = attempt.span_id
            times = (attempt.started_at, attempt.first_at)
            yield self._span(trace, "first token", times, ids=(here ^ 1, here))
            yield self._span(trace, "stream", (attempt.first_at, end), ids=(here ^ 2, here))

    def _span(
        self,
        trace: Trace,
        name: str,
        times: tuple[float, float],
        *,
        ids: tuple[int, int],
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: _Attributes | None = None,
        failed: bool = False,
    ) -> ReadableSpan:
        """Return a span; `ids` are its own and its parent's, 0 for none.

        The ids of phases are made of their parent's, which is random: one draw less each.
        """
        own, above = ids
        since, date = trace.record.received_at, trace.began_ns
        start, end = (date + round((at - since) * 1e9) for at in times)
        here = SpanContext(trace.trace_id, own, is_remote=False, trace_flags=_FLAGS)
        parent = None
        if above:
            remote = above == trace.parent_id
            parent = SpanContext(trace.trace_id, above, is_remote=remote, trace_flags=_FLAGS)
        return ReadableSpan(
            name,
            here,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=start,
            end_time=max(start, end),
            instrumentation_scope=self._scope,
        )


_FAILED = frozenset(
    {Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TRUNCATED, Outcome.UPSTREAM_TIMEOUT}
)  # whatever status the client got before


def _of_request(trace: Trace) -> _Attributes:
    record = trace.record
    found: dict[str, str | bool | int | float | None] = {
        "http.request.method": trace.method,
        "http.route": record.api,
        "http.response.status_code": record.status or None,
        "client.address": record.client,
        "gen_ai.request.model": record.model,
        "radixgate.request_id": record.request_id,
        "radixgate.class": record.cls,
        "radixgate.key": record.key,
        "radixgate.outcome": str(record.outcome),
        "radixgate.backend": record.backend,
        "radixgate.attempts": record.attempts,
        "radixgate.queue_s": record.queue_s,
        "radixgate.predicted_tokens": record.predicted_tokens,
        "radixgate.reason": record.reason,
    }
    if record.outcome is not Outcome.OK:
        found["error.type"] = str(record.outcome)
    return _known(found)


def _of_attempt(record: RequestRecord, attempt: Attempt, *, last: bool) -> _Attributes:
    """Return the attributes of the call to an engine, by the GenAI conventions."""
    found: dict[str, str | bool | int | float | None] = {
        "gen_ai.operation.name": _operation(record),
        # The dialect spoken: what runs there may be vLLM or another engine.
        "gen_ai.provider.name": "anthropic" if "/messages" in record.api else "openai",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "radixgate.backend": attempt.backend,
        "radixgate.attempt": attempt.result,
    }
    if attempt.result not in _FINE:
        found["error.type"] = attempt.result
    if attempt.first_at:
        found["gen_ai.response.time_to_first_chunk"] = attempt.first_at - attempt.started_at
    if last:  # what was used was used by the attempt that was answered
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    return _known(found)


def _known(found: dict[str, str | bool | int | float | None]) -> _Attributes:
    return {name: value for name, value in found.items() if value is not None}


def _operation(record: RequestRecord) -> str:
    return _OPERATIONS.get(record.api) or record.api.rstrip("/").rpartition("/")[2]


def _context(parent: Parent) -> Context:
    trace_id, span_id, sampled = parent
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, True, flags)))
