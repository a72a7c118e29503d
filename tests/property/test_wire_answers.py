"""Any split of any answer reaches the client byte for byte; no truncation is silent."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.types import Api
from gateway.relay.connection import UpstreamConnection
from gateway.relay.heads import HOP_BY_HOP
from gateway.relay.relay import Relay
from tests.property.wire import RESPONSES, FakeTransport, payload_of, pieces, split_head, splits

OURS = {b"x-accel-buffering", b"cache-control", b"content-length", b"connection", b"x-ours"}
CHANGED = HOP_BY_HOP | OURS | {b"x-request-id"}
WHOLE = {path: path.read_bytes() for path in RESPONSES}
STREAMS = [path for path, raw in WHOLE.items() if b"text/event-stream" in raw[:2000]]


class Owner:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.relay: Relay | None = None

    def relay_started(self, status: int, *, stream: bool) -> bytes:
        self.heard.append("started")
        assert status
        assert stream in (True, False)
        return b"x-ours: 1\r\n"

    def relay_first_content(self, now: float) -> None:
        self.heard.append("content")
        assert now

    def relay_done(self) -> None:
        self.heard.append("done")
        assert self.relay is not None
        self.relay.end()

    def relay_whole(self, data: bytes, now: float) -> None:
        assert data
        assert now
        self.relay_done()

    def relay_gaps(self, gaps: list[float]) -> None:
        assert min(gaps) > 0

    def relay_lost(self, *, unread: bool, reason: str) -> None:
        self.heard.append("lost")
        assert reason
        assert unread in (True, False)


class FakeClient:
    def __init__(self) -> None:
        self.transport: Any = FakeTransport()
        self.version_11 = self.keep_alive = True


class Line:
    """One backend connection and one relay over fake transports."""

    def __init__(self, api: Api = Api.CHAT, *, remove_usage: bool = False) -> None:
        self.owner, self.client = Owner(), FakeClient()
        self.released: list[bool] = []
        self.now = 0.0
        self.upstream = UpstreamConnection(lambda _, reusable: self.released.append(reusable))
        self.upstream_transport = FakeTransport()
        self.upstream.connection_made(self.upstream_transport)
        self.relay = Relay(self.owner, self.client, api, self.clock, remove_usage=remove_usage)
        self.owner.relay = self.relay
        self.relay.start(self.upstream, [b"POST / HTTP/1.1\r\n\r\n"])

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def feed(self, parts: list[bytes], *, end: bool) -> bytes:
        for part in parts:
            if self.upstream_transport.is_closing():
                break
            self.upstream.data_received(part)
        if end and not self.upstream_transport.is_closing():
            self.upstream.eof_received()
        self.upstream.connection_lost(None)
        return bytes(self.client.transport.written)


def crossing(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that must cross unchanged; whose origin to allow is ours to say."""
    allow = b"access-control-"
    return [(n, v) for n, v in headers if n not in CHANGED and not n.startswith(allow)]


def framed(raw: bytes) -> bool:
    names = {name for name, _ in split_head(raw)[1]}
    return bool(names & {b"content-length", b"transfer-encoding"})


def without_usage(payload: bytes) -> bytes:
    events = payload.split(b"\n\n")
    kept = [e for e in events if not (re.search(rb'"choices":\s*\[\s*\]', e) and b'"usage"' in e)]
    return b"\n\n".join(kept)


def rechunked(raw: bytes, sizes: list[int]) -> bytes:
    """Return a chunked answer with other chunk borders, as an engine might have written it."""
    head = raw.partition(b"\r\n\r\n")[0]
    payload = payload_of(raw)[2]
    out, at = b"", 0
    for size in sizes:
        part = payload[at : at + size]
        at += size
        if part:
            out += b"%x\r\n%b\r\n" % (len(part), part)
    if payload[at:]:
        out += b"%x\r\n%b\r\n" % (len(payload) - at, payload[at:])
    return head + b"\r\n\r\n" + out + b"0\r\n\r\n"


answers = st.sampled_from(RESPONSES).flatmap(
    lambda path: st.tuples(st.just(path), splits(len(WHOLE[path])))
)


@settings(max_examples=300, deadline=None)
@given(answers)
def test_any_split_of_any_recorded_answer_crosses_payload_equal(case: tuple[Path, Any]) -> None:
    raw = WHOLE[case[0]]
    line = Line()
    written = line.feed(pieces(raw, case[1]), end=True)
    first, headers, payload = payload_of(raw)
    got_first, got_headers, got = payload_of(written)

    assert got == payload
    assert got_first.split(b" ")[1] == first.split(b" ")[1]
    assert crossing(got_headers) == crossing(headers)
    assert line.owner.heard.count("done") == 1
    assert "lost" not in line.owner.heard


streams = st.sampled_from(STREAMS).flatmap(
    lambda path: st.tuples(
        st.just(path),
        st.lists(st.integers(1, 400), max_size=40),
        st.integers(1, 300).map(lambda step: list(range(step, 2 * len(WHOLE[path]) + 999, step))),
    )
)


@settings(max_examples=300, deadline=None)
@given(streams, st.booleans())
def test_any_chunking_and_split_of_a_stream_loses_only_the_usage_we_asked_for(
    case: tuple[Path, Any, Any], remove: bool
) -> None:
    raw = WHOLE[case[0]]
    payload = payload_of(raw)[2]
    whole = rechunked(raw, case[1])
    line = Line(remove_usage=remove)
    written = line.feed(pieces(whole, [cut for cut in case[2] if cut < len(whole)]), end=True)

    assert payload_of(written)[2] == (without_usage(payload) if remove else payload)
    assert line.owner.heard.count("done") == 1
    api = Api.MESSAGES if "messages" in case[0].name else Api.CHAT
    api = Api.RESPONSES if "responses" in case[0].name else api
    at_once = Line(api)
    at_once.feed([raw], end=True)
    assert line.relay.scanner.usage() == at_once.relay.scanner.usage()
    assert line.relay.scanner.terminated(api) == at_once.relay.scanner.terminated(api)
    assert line.relay.scanner.reported_error() == at_once.relay.scanner.reported_error()


@settings(max_examples=200, deadline=None)
@given(answers, st.data())
def test_no_truncation_of_a_framed_answer_is_taken_for_its_end(
    case: tuple[Path, Any], data: st.DataObject
) -> None:
    raw = WHOLE[case[0]]
    cut = data.draw(st.integers(0, len(raw) - 1))
    line = Line()
    written = line.feed(
        pieces(raw[:cut], [c for c in case[1] if c < cut]), end=data.draw(st.booleans())
    )

    payload = payload_of(raw)[2]
    if framed(raw) and payload:
        assert line.owner.heard[-1:] == ["lost"]
        assert "done" not in line.owner.heard
    if b"\r\n\r\n" in written:
        _, headers, rest = split_head(written)
        if (b"transfer-encoding", b"chunked") in headers and "done" not in line.owner.heard:
            rest = payload_of(written + b"0\r\n\r\n")[2]
        elif (b"transfer-encoding", b"chunked") in headers:
            rest = payload_of(written)[2]
        assert payload.startswith(rest)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans(), st.data())
def test_any_bytes_from_a_backend_end_in_exactly_one_way(
    junk: bytes, after_head: bool, data: st.DataObject
) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    )
    raw = (head if after_head else b"") + junk
    line = Line(remove_usage=data.draw(st.booleans()))
    line.feed(pieces(raw, data.draw(splits(len(raw)))), end=data.draw(st.booleans()))

    assert len([word for word in line.owner.heard if word in ("done", "lost")]) == 1
    assert line.relay.connection is None
    assert line.released[-1] is False


def test_a_head_without_end_is_given_up() -> None:
    for piece in (b"x" * 65536, b"HTTP/1.1 100 Continue\r\n\r\n" * 2600):
        line = Line()
        line.upstream.data_received(b"HTTP/1.1 200 OK\r\nx: " if piece[:1] == b"x" else piece)
        for _ in range(6):
            line.upstream.data_received(piece)
        assert line.owner.heard == ["lost"]
        assert line.upstream_transport.aborted


def test_a_connection_held_back_at_the_answers_end_is_read_again_by_the_next_request() -> None:
    """The client falls behind within the very read that ends the answer."""
    line = Line()
    write = line.client.transport.write

    def full(data: bytes | bytearray | memoryview) -> None:
        write(data)
        line.relay.pause(1.0)

    line.relay._write = full
    line.upstream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    assert line.owner.heard[-1] == "done"
    assert line.released == [True]
    assert not line.upstream_transport.reading_paused


@pytest.mark.parametrize("opening", [b"0\r\nx-sum: ", b"5;a="])
@pytest.mark.parametrize("step", [1000, 70_000])
def test_trailers_and_chunk_extensions_without_end_are_cut(opening: bytes, step: int) -> None:
    line = Line()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = 0
    for part in [head + b"1\r\nx\r\n", opening, *[b"a" * step] * (4_000_000 // step)]:
        if line.upstream_transport.is_closing():
            break
        line.upstream.data_received(part)
        sent += len(part)

    assert sent < 500_000
    assert line.owner.heard[-1] == "lost"
    assert line.upstream_transport.aborted


def test_chunks_of_one_byte_are_no_overhead() -> None:
    line = Line()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    written = line.feed([head, *[b"1\r\nx\r\n" * 100] * 2000, b"0\r\n\r\n"], end=True)

    assert payload_of(written)[2] == b"x" * 200_000
    assert line.owner.heard[-1] == "done"


# The recorder asked for a close; an SDK does not.
KEPT = {path: re.sub(rb"(?i)\r\nconnection: close", b"", raw) for path, raw in WHOLE.items()}
WHOLE_ANSWERS = [path for path, raw in KEPT.items() if b"\r\ncontent-length: " in raw.lower()]


@pytest.mark.parametrize("version_11", [True, False])
@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("path", WHOLE_ANSWERS, ids=lambda path: path.name)
def test_a_recognised_answer_crosses_like_a_parsed_one(
    path: Path, keep_alive: bool, version_11: bool
) -> None:
    line = Line()
    line.client.keep_alive, line.client.version_11 = keep_alive, version_11
    heads, bodies = [], []
    for round_number in range(3):
        line.client.transport.written.clear()
        relay = Relay(line.owner, line.client, Api.CHAT, line.clock, remove_usage=False)
        line.owner.relay = relay
        relay.start(line.upstream, [b"POST / HTTP/1.1\r\n\r\n"])
        line.upstream.data_received(KEPT[path])
        first, headers, payload = payload_of(bytes(line.client.transport.written))
        heads.append((first, sorted(headers)))
        bodies.append(payload)
        assert line.owner.heard.count("done") == round_number + 1

    assert heads[0] == heads[1] == heads[2]
    assert bodies[0] == bodies[1] == bodies[2] == payload_of(KEPT[path])[2]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WHOLE_ANSWERS), st.data())
def test_after_a_recognised_answer_the_parser_reads_on(path: Path, data: st.DataObject) -> None:
    raw = KEPT[path]
    line = Line()
    for cut in (None, None, data.draw(st.integers(1, len(raw) - 1)), None):
        line.client.transport.written.clear()
        relay = Relay(line.owner, line.client, Api.CHAT, line.clock, remove_usage=False)
        line.owner.relay = relay
        relay.start(line.upstream, [b"POST / HTTP/1.1\r\n\r\n"])
        for part in [raw] if cut is None else [raw[:cut], raw[cut:]]:
            line.upstream.data_received(part)
        assert payload_of(bytes(line.client.transport.written))[2] == payload_of(raw)[2]

    assert line.released == [True] * 4
    assert line.owner.heard.count("done") == 4
