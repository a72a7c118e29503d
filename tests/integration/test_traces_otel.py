"""Traces over real sockets: context in and out, and what a collector gets.

The collector is scripted: an OTLP/HTTP server in this loop that keeps the spans it is sent.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.edge.exchange import Exchange
from gateway.telemetry import otlp
from tests.integration.rig import (
    Conn,
    Received,
    Rig,
    chat,
    eventually,
    ok_chat,
    post,
    read_request,
    running,
)

CHAT = "/v1/chat/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = f"traceparent: 00-{TRACE}-{SPAN}-01"
STATE = "tracestate: vendor=opaque"
_WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


class Collector:
    """Keeps every span; `raw` is all that was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.targets: set[str] = set()
        self.raw = b""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (request := await read_request(reader)) is not None:
            self.targets.add(request.target)
            self.raw += request.body
            sent = ExportTraceServiceRequest.FromString(request.body)
            for resource in sent.resource_spans:
                values = {each.key: each.value for each in resource.resource.attributes}
                self.services.add(values["service.name"].string_value)
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async def have(self, count: int) -> list[Any]:
        """Return the spans when there are so many; no more may come."""
        await eventually(lambda: len(self.spans) >= count, within_s=_WAIT_S)
        assert len(self.spans) == count
        return self.spans


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    await collector.start()
    try:
        yield collector
    finally:
        collector.stop()


def to(collector: Collector, *more: str) -> tuple[str, ...]:
    return (f"traces.endpoint={collector.url}", *more)


def context_of(rig: Rig, backend: int = 0, request: int = -1) -> str | None:
    return rig.backends[backend].received[request].header("traceparent")


async def test_a_streamed_request_is_a_span_per_phase_in_the_clients_trace() -> None:
    async with (
        collecting() as collector,
        running(settings=to(collector, "traces.service_name=edge-1")) as rig,
    ):
        answer = await rig.ask(post(CHAT, chat(stream=True), CONTEXT, STATE))
        spans = {span.name: span for span in await collector.have(4)}
        received = rig.backends[0].received[0]

    assert answer.status == 200
    assert set(spans) == {f"POST {CHAT}", "chat m", "first token", "stream"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    root, call = spans[f"POST {CHAT}"], spans["chat m"]
    assert root.parent_span_id.hex() == SPAN
    assert call.parent_span_id == root.span_id
    assert {spans[name].parent_span_id for name in ("first token", "stream")} == {call.span_id}
    assert [k for k, _ in received.headers].count("traceparent") == 1
    assert received.header("traceparent") == f"00-{TRACE}-{call.span_id.hex()}-01"
    assert received.header("tracestate") == "vendor=opaque"
    assert collector.services == {"edge-1"}
    assert collector.targets == {"/v1/traces"}
    for span in spans.values():
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 60  # noqa: TID251 - a date
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    usage = {each.key: each.value.int_value for each in call.attributes}
    assert usage["gen_ai.usage.input_tokens"] == 10
    assert usage["gen_ai.usage.output_tokens"] == 2


async def test_an_answer_in_one_piece_is_a_request_and_an_attempt() -> None:
    async with collecting() as collector, running(settings=to(collector)) as rig:
        for _ in range(2):  # the second time the answer's head is known
            await rig.ask(post(CHAT, chat()))
        spans = await collector.have(4)

    assert [span.name for span in spans] == [f"POST {CHAT}", "chat m"] * 2
    assert [span.status.code for span in spans] == [0] * 4
    assert len({span.trace_id for span in spans}) == 2
    assert spans[0].parent_span_id == b""


async def test_a_kept_connection_with_one_head_has_a_trace_per_request() -> None:
    async with collecting() as collector, running(settings=to(collector)) as rig:
        client = await rig.connect()
        for _ in range(3):
            await client.send(post(CHAT, chat()))
            assert (await client.answer()).status == 200
        seen = {context_of(rig, request=i) for i in range(3)}
        await collector.have(6)

    assert len(seen) == 3
    assert None not in seen


async def test_a_repeated_head_with_context_continues_that_trace_every_time() -> None:
    async with collecting() as collector, running(settings=to(collector)) as rig:
        client = await rig.connect()
        for _ in range(3):
            await client.send(post(CHAT, chat(), CONTEXT))
            assert (await client.answer()).status == 200
        received = rig.backends[0].received
        spans = await collector.have(6)

    calls = [span.span_id.hex() for span in spans if span.name == "chat m"]
    assert [r.header("traceparent") for r in received] == [f"00-{TRACE}-{s}-01" for s in calls]
    assert {span.trace_id.hex() for span in spans} == {TRACE}


async def test_a_second_attempt_is_a_second_span_and_its_engine_is_told_so() -> None:
    async with (
        collecting() as collector,
        running(ok_chat, ok_chat, settings=to(collector, "routing.policy=round_robin")) as rig,
    ):
        pool = rig.app._upstreams.all()[0].pool
        pool.origin = replace(pool.origin, port=1)  # nobody listens there
        answer = await rig.ask(post(CHAT, chat()))
        spans = await collector.have(3)
        told = context_of(rig, 1)

    assert answer.status == 200
    first, second = (span for span in spans if span.name == "chat m")
    assert told is not None
    assert told.split("-")[2] == second.span_id.hex()
    assert first.status.code == 2
    assert second.status.code == 0
    assert first.end_time_unix_nano <= second.start_time_unix_nano


async def test_a_refusal_is_a_span_with_its_reason() -> None:
    async with collecting() as collector, running(settings=to(collector)) as rig:
        answer = await rig.ask(post(CHAT, chat() | {"model": "none"}))
        (span,) = await collector.have(1)

    assert answer.status == 404
    found = {each.key: each.value.string_value for each in span.attributes}
    assert found["error.type"] == found["radixgate.outcome"] == "not_found"


async def test_an_invalid_context_begins_a_new_trace_and_takes_its_state_along() -> None:
    async with collecting() as collector, running(settings=to(collector)) as rig:
        await rig.ask(post(CHAT, chat(), f"traceparent: 00-{'0' * 32}-{SPAN}-01", STATE))
        spans = await collector.have(2)
        received = rig.backends[0].received[0]

    assert received.header("tracestate") is None
    context = received.header("traceparent")
    assert context is not None
    assert context.split("-")[1] == spans[0].trace_id.hex() != "0" * 32


async def test_what_is_not_sampled_is_not_sent_and_the_engine_knows() -> None:
    async with collecting() as collector, running(settings=to(collector, "traces.sample=0")) as rig:
        await rig.ask(post(CHAT, chat()))
        await rig.ask(post(CHAT, chat(), CONTEXT))  # the client's decision counts
        spans = await collector.have(2)
        first, second = context_of(rig, request=0), context_of(rig, request=1)

    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert first is not None
    assert second is not None
    assert (first[-2:], second[-2:]) == ("00", "01")


async def test_while_tracing_is_off_a_clients_context_passes_untouched() -> None:
    odd = "TraceParent: 00-what ever-01"
    async with running() as rig:
        await rig.ask(post(CHAT, chat(), odd, STATE))
        await rig.ask(post(CHAT, chat()))
        with_one, without = rig.backends[0].received
        assert rig.handler.exchange is Exchange

    assert f"{odd}\r\n".encode() in with_one.raw_head
    assert with_one.header("tracestate") == "vendor=opaque"
    assert without.header("traceparent") is None


async def test_a_collector_that_is_gone_costs_no_request_and_holds_up_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "_CLOSE_S", 0.2)
    async with running(settings=("traces.endpoint=http://127.0.0.1:1",)) as rig:
        answers = [await rig.ask(post(CHAT, chat())) for _ in range(5)]
        assert {answer.status for answer in answers} == {200}
        loop = asyncio.get_running_loop()
        before = loop.time()
    assert loop.time() - before < _WAIT_S


async def test_a_reload_turns_traces_on_and_off_and_to_another_collector(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"

    async def reload(rig: Rig, traces: str) -> None:
        file.write_text(f"traces: {traces}", encoding="utf-8")
        assert (await rig.app.reload()).ok

    async with collecting() as one, collecting() as other:
        file.write_text("traces: {}", encoding="utf-8")
        async with running(file=str(file)) as rig:
            await rig.ask(post(CHAT, chat()))
            await reload(rig, f'{{endpoint: "{one.url}"}}')
            await rig.ask(post(CHAT, chat()))
            await one.have(2)
            await reload(rig, f'{{endpoint: "{other.url}"}}')
            await rig.ask(post(CHAT, chat()))
            await other.have(2)
            await reload(rig, "{}")
            await rig.ask(post(CHAT, chat()))
            assert rig.handler.exchange is Exchange
    assert len(one.spans) == len(other.spans) == 2


async def test_a_reload_that_fails_keeps_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "g.yaml"
    async with collecting() as collector:
        file.write_text(f'traces: {{endpoint: "{collector.url}"}}', encoding="utf-8")
        async with running(file=str(file)) as rig:
            module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
            monkeypatch.setitem(sys.modules, module, None)
            file.write_text('traces: {endpoint: "http://127.0.0.1:1"}', encoding="utf-8")
            result = await rig.app.reload()
            await rig.ask(post(CHAT, chat()))
            await collector.have(2)

    assert not result.ok
    assert "needs the extra `otel`" in result.problems[0]


async def test_nothing_that_was_said_is_in_a_span() -> None:
    async def says(conn: Conn, _: Received) -> None:
        await conn.json({"id": "c", "choices": [{"message": {"content": "A-SECRET-ANSWER"}}]})

    async with collecting() as collector, running(says, settings=to(collector)) as rig:
        lines = ("authorization: Bearer A-SECRET-KEY", "user-agent: A-SECRET-AGENT")
        body = chat("A-SECRET-PROMPT", user="A-SECRET-USER", metadata={"A-SECRET-NAME": 1})
        await rig.ask(post(CHAT, body, *lines, "x-session-id: A-SECRET-SESSION", STATE))
        await collector.have(2)

    assert b"radixgate.outcome" in collector.raw
    assert b"SECRET" not in collector.raw
    assert b"opaque" not in collector.raw
