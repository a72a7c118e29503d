"""Traces: what is noted of a request while it runs, and W3C trace context in and out.

On the event loop only times are noted; spans are made and sent by `otlp`'s thread, which alone
knows OpenTelemetry (extra `otel`). Must never hold a prompt or a key, and is not imported by a
request's path while tracing is off.
"""

import random
import re
from collections.abc import Callable, Mapping
from time import time_ns
from typing import Protocol

from gateway.extras import MissingExtra, load_otel
from gateway.telemetry.record import RequestRecord

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
Parent = tuple[int, int, bool]  # trace id, span id, sampled


class TraceSettings(Protocol):
    """The `traces` section of the configuration."""

    @property
    def endpoint(self) -> str | None:
        """Return the collector's root URL, None to look at the OTEL_* variables."""

    @property
    def sample(self) -> float | None:
        """Return the share of the traces begun here that is kept, None to leave it to OTEL_*."""

    @property
    def service_name(self) -> str | None:
        """Return what the gateway is called in traces, None to leave it to OTEL_*."""


class Sender(Protocol):
    """Where finished traces go (`otlp.Exporter`)."""

    def sampled(self, parent: Parent | None, trace_id: int) -> bool:
        """Return whether a request is traced."""

    def put(self, trace: "Trace") -> None:
        """Take a finished trace; never waits."""

    def close(self) -> None:
        """Send what is queued, for a bounded time."""


class Attempt:
    """One attempt at a backend, as its span shows it; times are monotonic, 0 = never."""

    __slots__ = ("backend", "ended_at", "first_at", "result", "span_id", "started_at")

    def __init__(self, backend: str, span_id: int, now: float) -> None:
        self.backend = backend
        self.span_id = span_id
        self.started_at = now
        self.first_at = self.ended_at = 0.0
        self.result = ""


class Trace:
    """One request's trace while it runs. `header` is what the next attempt's engine gets.

    `began_ns` is the date of `record.received_at` in nanoseconds; `queued_at` is 0 for a request
    that did not wait.
    """

    __slots__ = (
        "_rng",
        "attempts",
        "began_ns",
        "header",
        "method",
        "parent_id",
        "queued_at",
        "record",
        "sampled",
        "span_id",
        "trace_id",
    )

    def __init__(
        self,
        rng: random.Random,
        record: RequestRecord,
        *,
        method: str,
        parent: Parent | None,
        trace_id: int,
        sampled: bool,
    ) -> None:
        self._rng = rng
        self.record = record
        self.method = method
        self.trace_id = trace_id
        self.parent_id = 0 if parent is None else parent[1]
        self.sampled = sampled
        self.span_id = new_id(rng, 64)
        self.attempts: list[Attempt] = []
        self.queued_at = 0.0
        self.began_ns = time_ns()
        # Not sampled: whoever asked stays the engine's parent, there is no span of ours between.
        self.header = self._header(self.parent_id or self.span_id)

    def begin_attempt(self, backend: str, now: float) -> None:
        """Note that a backend is tried; its engine's spans will be below this attempt's."""
        if self.sampled:
            attempt = Attempt(backend, new_id(self._rng, 64), now)
            self.attempts.append(attempt)
            self.header = self._header(attempt.span_id)

    def first_content(self, now: float) -> None:
        """Note when the first content of a stream came."""
        if self.attempts:
            self.attempts[-1].first_at = now

    def end_attempt(self, result: str, now: float) -> None:
        """Note how the attempt that runs ended; nothing if none does."""
        if self.attempts and not self.attempts[-1].ended_at:
            self.attempts[-1].ended_at = now
            self.attempts[-1].result = result

    def _header(self, span_id: int) -> bytes:
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, span_id, self.sampled)


class Tracing:
    """Begins traces and hands the finished ones on."""

    def __init__(self, sender: Sender, rng: random.Random) -> None:
        self._sender = sender
        self._rng = rng

    def begin(self, record: RequestRecord, method: str, traceparent: bytes | None) -> Trace:
        """Return a request's trace, continued from the client's or new; `record` learns its id."""
        parent = None if traceparent is None else parse_traceparent(traceparent)
        trace_id = new_id(self._rng, 128) if parent is None else parent[0]
        sampled = self._sender.sampled(parent, trace_id)
        if sampled:
            record.trace_id = f"{trace_id:032x}"
        return Trace(
            self._rng, record, method=method, parent=parent, trace_id=trace_id, sampled=sampled
        )

    def finish(self, trace: Trace) -> None:
        """Take a trace whose record is complete."""
        if trace.sampled:
            self._sender.put(trace)

    def close(self) -> None:
        """Send what is queued; blocks for a few seconds at most."""
        self._sender.close()


def open_tracing(
    settings: TraceSettings,
    env: Mapping[str, str],
    rng: random.Random,
    warn: Callable[[str], None],
) -> Tracing | None:
    """Return tracing as configured, None while it is off; imports, so not for the event loop.

    Variables alone may be meant for another program of the host: without the extra they only
    `warn`.

    Raises:
        MissingExtra: `traces.endpoint` is given and the extra is not installed.
    """
    if not is_on(settings, env):
        return None
    try:
        load_otel("traces")
    except MissingExtra as error:
        if settings.endpoint is not None:
            raise
        warn(f"no traces, although an OTEL_* variable names a collector: {error}")
        return None
    from gateway.telemetry.otlp import Exporter  # noqa: PLC0415 - an extra: only when it is used

    return Tracing(Exporter.of(settings), rng)


def is_on(settings: TraceSettings, env: Mapping[str, str]) -> bool:
    """Return whether requests are to be traced."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if settings.endpoint is not None:
        return True
    return env.get("OTEL_TRACES_EXPORTER") != "none" and any(env.get(name) for name in _ENDPOINTS)


def parse_traceparent(value: bytes) -> Parent | None:
    """Return what a `traceparent` says, None if it is not valid (W3C Trace Context, 3.2)."""
    match = _TRACEPARENT.fullmatch(value.strip())
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return (trace_id, span_id, bool(int(match[4], 16) & 1)) if trace_id and span_id else None


def new_id(rng: random.Random, bits: int) -> int:
    """Return a random id, never 0."""
    return rng.getrandbits(bits) or 1
