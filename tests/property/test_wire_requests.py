"""Any split of a request is understood the same; no bytes end in a 500 or an exception."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.config.schema import LimitsConfig, TimeoutsConfig
from gateway.edge.client import ClientConnection
from gateway.edge.http import HttpRequest
from gateway.edge.server import Listener
from gateway.errors import GatewayError
from tests.integration.rig import Rig, running
from tests.property.wire import REQUESTS, FakeTransport, pieces, split_head, splits

SEEN = dict[str, Any]
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Notes:
    """A handler that notes each request and answers it at once."""

    def __init__(self) -> None:
        self.seen: list[SEEN] = []

    def precheck(self, request: HttpRequest) -> None:
        pass

    def start(self, connection: ClientConnection, request: HttpRequest) -> None:
        self.seen.append(
            {
                "method": request.method,
                "path": request.path,
                "query": request.query,
                "picked": {k: v for k, v in request.picked.items() if k != b"content-length"},
                "forward": request.forward,
                "body": request.body,
                "keep_alive": request.keep_alive,
                "version_11": request.version_11,
            }
        )
        connection.respond(request, 200, b"", b"{}")

    def error_answer(
        self,
        request: HttpRequest | None,
        error: GatewayError,
        target: bytes = b"",
        *,
        peer: str = "",
    ) -> tuple[bytes, bytes]:
        assert not (request and target)
        self.seen.append({"error": error.status, "known": request is not None, "peer": peer})
        return b"", error.body()


def understood(parts: list[bytes]) -> tuple[list[SEEN], bytes]:
    """Return what a listener made of these reads, and what it answered."""
    notes = Notes()
    listener = Listener(
        notes, LimitsConfig(body_mib=1, header_kib=8), TimeoutsConfig(), lambda: 1.0
    )
    connection, transport = ClientConnection(listener), FakeTransport()
    connection.connection_made(transport)
    for part in parts:
        if not transport.is_closing():
            connection.data_received(part)
    connection.connection_lost(None)
    return notes.seen, bytes(transport.written)


def reusable(raw: bytes) -> bytes:
    return raw.replace(b"Connection: close\r\n", b"")


def chunked(raw: bytes, sizes: list[int]) -> bytes:
    """Return a recorded request with its body in chunks."""
    head, _, body = raw.partition(b"\r\n\r\n")
    head = re.sub(rb"\r\nContent-Length: \d+", b"", head) + b"\r\nTransfer-Encoding: chunked"
    out, at = b"", 0
    for size in [*sizes, len(body)]:
        part = body[at : at + size]
        at += size
        if part:
            out += b"%X;ext=1\r\n%b\r\n" % (len(part), part)
    return head + b"\r\n\r\n" + out + b"0\r\nX-Trailer: 1\r\n\r\n"


SAMPLES = [path.read_bytes() for path in REQUESTS]
OFFER = (
    b"POST /v1/x HTTP/1.1\r\nHost: gw\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n%b\r\n\r\n"
)
VARIANTS = [
    b"GET /healthz HTTP/1.1\r\nHost: gw\r\n\r\n",
    b"GET /v1/models?a=b%20c HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"HEAD http://gw:1/v1/models HTTP/1.1\r\nHost: gw\r\nX-A:\r\nX-B: \t b \t\r\n\r\n",
    b"\r\nPOST /v1/x HTTP/1.1\r\nhost: gw\r\ncontent-length: 0\r\nCONNECTION: x-a\r\nX-A: 1\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: gw\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    OFFER % b"Content-Length: 5" + b"hello",
    OFFER % b"Transfer-Encoding: chunked" + b"5\r\nhello\r\n0\r\n\r\n",
    OFFER % b"X-A: no body",
    b"GET /v1/x HTTP/1.1\r\nHost: gw\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: gw\r\nContent-Length: 00005\r\n\r\nhello",
]
sample = st.sampled_from(SAMPLES).map(reusable)
request = st.one_of(
    sample,
    st.sampled_from(VARIANTS),
    st.tuples(sample, st.lists(st.integers(1, 60), max_size=8)).map(lambda t: chunked(*t)),
)
# The same request again and again is what an SDK sends: its head may be recognised.
conversation = st.one_of(
    st.lists(request, min_size=1, max_size=4),
    st.tuples(sample, st.integers(2, 4)).map(lambda t: [t[0]] * t[1]),
)


@settings(max_examples=400, deadline=None)
@given(conversation, st.data())
def test_any_split_of_requests_is_understood_the_same(
    requests: list[bytes], data: st.DataObject
) -> None:
    raw = b"".join(requests)
    one_by_one = understood(pieces(raw, list(range(1, len(raw)))))

    assert understood([raw]) == one_by_one
    assert understood(requests) == one_by_one
    assert understood(pieces(raw, data.draw(splits(len(raw))))) == one_by_one


@settings(max_examples=200, deadline=None)
@given(sample, st.lists(st.integers(1, 60), max_size=8), st.data())
def test_a_chunked_body_means_the_same_as_one_with_a_length(
    raw: bytes, sizes: list[int], data: st.DataObject
) -> None:
    in_chunks = chunked(raw, sizes)
    (plain,), _ = understood([raw])
    (found,), _ = understood(pieces(in_chunks, data.draw(splits(len(in_chunks)))))

    assert found["picked"].pop(b"transfer-encoding") == b"chunked"
    assert found == plain
    assert plain["body"] == split_head(raw)[2]


@settings(max_examples=300, deadline=None)
@given(conversation, st.data())
def test_two_requests_with_one_head_but_other_lengths_are_told_apart(
    requests: list[bytes], data: st.DataObject
) -> None:
    """A remembered head must stand for itself alone: lengths, and any other byte, may differ."""
    first = requests[0]
    at = data.draw(st.integers(0, len(first) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = first[:at] + bytes([byte]) + first[at + 1 :]
    alone = understood([changed])
    after = understood([first, changed])
    opening = understood([first])
    if opening[0] and "error" not in opening[0][-1] and opening[0][-1]["keep_alive"]:
        assert after[0] == opening[0] + alone[0]


def test_a_closed_connection_waits_for_its_reader_only_so_long() -> None:
    """The last answer is written but not read: `idle_s` later the socket goes."""
    now = 1.0
    listener = Listener(
        Notes(), LimitsConfig(), TimeoutsConfig(keepalive_s=5, idle_s=7), lambda: now
    )
    connection, transport = ClientConnection(listener), FakeTransport()
    connection.connection_made(transport)
    connection.data_received(VARIANTS[0])
    transport.get_write_buffer_size = lambda: 1000  # type: ignore[method-assign]
    now = 6.5
    connection.expired(now)
    assert (transport.closed, transport.aborted) == (True, False)
    assert connection.deadline == now + 7
    now = 14.0
    connection.expired(now)
    assert transport.aborted


# --- the real handler


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[asyncio.Runner, Rig]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = running(settings=("limits.body_mib=1",), within_s=600)
        rig = runner.run(context.__aenter__())
        yield runner, rig
        runner.run(context.__aexit__(None, None, None))


async def answered(rig: Rig, parts: list[bytes]) -> bytes:
    """Return what a client gets that sends these reads and then leaves."""
    connection, transport = rig.app._listener.protocol(), FakeTransport()
    connection.connection_made(transport)
    for part in parts:
        if not transport.is_closing():
            connection.data_received(part)
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return bytes(transport.written)


def claim_harmless(runner: asyncio.Runner, rig: Rig, parts: list[bytes]) -> None:
    faults: list[Any] = []
    runner.get_loop().set_exception_handler(lambda _, context: faults.append(context))
    written = runner.run(answered(rig, parts))
    statuses = STATUS.findall(written)

    assert b"500" not in statuses
    assert not faults
    assert not rig.handler.live
    assert not rig.app._listener.connections


json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = ("messages", "prompt", "input", "tools", "stream", "stream_options", "max_tokens", "n",
        "metadata", "session_id", "system", "documents", "query", "text_1", "priority",
        "cache_salt", "chat_template_kwargs", "user", "instructions")  # fmt: skip
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
         "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/score", "/pooling",
         "/classify", "/tokenize", "/detokenize", "/v1/audio/transcriptions")  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(KEYS), json_value, max_size=5)
)
def test_any_json_on_any_route_is_answered_without_a_500(
    served: tuple[asyncio.Runner, Rig], path: str, body: dict[str, Any]
) -> None:
    data = orjson.dumps({"model": "m", "messages": [], **body}, option=orjson.OPT_NON_STR_KEYS)
    head = f"POST {path} HTTP/1.1\r\nHost: gw\r\nContent-Length: {len(data)}\r\n\r\n"
    claim_harmless(*served, [head.encode() + data])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.data())
@example(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n\x00\xff", None)
@example(b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", None)
@example(b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n", None)
@example(b"GET /v1/models/%ff%00%2f HTTP/1.1\r\nHost: a\r\n\r\n", None)
@example(b"GET /v1/models/\xff HTTP/1.1\r\nHost: a\r\n\r\n", None)
@example(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nxx", None)
@example(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", None)
@example(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", None)
def test_any_bytes_are_answered_without_a_500(
    served: tuple[asyncio.Runner, Rig], raw: bytes, data: st.DataObject | None
) -> None:
    cuts = data.draw(splits(len(raw))) if data is not None else []
    claim_harmless(*served, pieces(raw, cuts))


@settings(max_examples=400, deadline=None)
@given(sample, st.data())
def test_a_damaged_request_is_answered_without_a_500(
    served: tuple[asyncio.Runner, Rig], raw: bytes, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        cut = data.draw(st.integers(0, 3))
        raw = raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + cut :]
    claim_harmless(*served, pieces(raw, data.draw(splits(max(2, len(raw))))))
