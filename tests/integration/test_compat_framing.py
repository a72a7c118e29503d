"""Compatibility cases D22-D37: HTTP framing, headers, limits, routes, forwarding."""

import asyncio
import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from gateway.edge import decode
from gateway.telemetry.record import RequestRecord
from tests.integration.rig import (
    DONE,
    HEAD_JSON,
    Answer,
    Client,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    eventually,
    get,
    ok_chat,
    post,
    running,
)

CHAT = post("/v1/chat/completions", chat())
STREAM = post("/v1/chat/completions", chat(stream=True))
BODY = orjson.dumps(chat())
KEY = "rg-canary-5f1c"


def keyed(tmp_path: Path, extra: str = "") -> str:
    """Return the path of a configuration with one key."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path = tmp_path / "gateway.yaml"
    path.write_text(f"keys:\n  - {{name: team, sha256: {digest}}}\n{extra}")
    return str(path)


def configured(tmp_path: Path, text: str) -> str:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return str(path)


def head(*lines: str, path: str = "/v1/chat/completions") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def chunked(*parts: bytes, tail: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + tail


async def flood(client: Client, piece: bytes, limit: int) -> int:
    """Send `piece` again and again until an answer comes; return how much was sent."""
    sent = 0
    while sent < limit and not client.reader._buffer:  # type: ignore[attr-defined]
        client.writer.write(piece)
        try:
            await client.writer.drain()
        except ConnectionError:
            break
        sent += len(piece)
    return sent


async def until_closed(client: Client, seconds: float = 20.0) -> bytes:
    async with asyncio.timeout(seconds):
        return await client.reader.read()


# --- D22


CODED = {
    "gzip": gzip.compress(b'{"a":1}' * 50),
    "deflate": zlib.compress(b'{"a":1}' * 50),
    "br": bytes.fromhex("8b02807b2261223a317d03"),
}


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("coding", CODED)
async def test_d22_a_coded_answer_crosses_raw_with_its_header(coding: str, framing: str) -> None:
    data = CODED[coding]

    async def script(conn: Conn, _: Received) -> None:
        lines = HEAD_JSON + f"Content-Encoding: {coding}\r\n".encode()
        if framing == "length":
            await conn.write(lines + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        elif framing == "chunked":
            await conn.write(
                lines + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(data[:9], data[9:])
            )
        else:
            await conn.write(lines + b"\r\n" + data)
            conn.writer.close()

    async with running(script) as rig:
        for wanted in ((f"Accept-Encoding: {coding}",), ()):
            answer = await rig.ask(post("/v1/chat/completions", chat(), *wanted))

            assert answer.body == data
            assert answer.all("content-encoding") == [coding]
            if framing == "length":
                assert answer.all("content-length") == [str(len(data))]
                assert answer.header("transfer-encoding") is None
            else:
                assert answer.header("content-length") is None
        assert rig.backends[0].received[0].header("accept-encoding") == coding
        assert rig.backends[0].received[1].header("accept-encoding") is None


async def test_d22_a_coded_stream_crosses_raw_and_is_not_judged() -> None:
    data = gzip.compress(chat_event("a") + DONE)

    async def script(conn: Conn, _: Received) -> None:
        lines = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        await conn.write(lines + b"transfer-encoding: chunked\r\n\r\n" + chunked(data))

    async with running(script) as rig:
        answer = await rig.ask(STREAM)

        assert answer.body == data
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}


# --- D23


HOP = {
    "Keep-Alive": "timeout=5",
    "Proxy-Authorization": "Basic x",
    "Proxy-Authenticate": "Basic",
    "Proxy-Connection": "keep-alive",
    "TE": "trailers",
    "Trailer": "X-Sum",
    "Upgrade": "h2c",
    "X-Named": "by Connection",
    "X-Named-Too": "by a second Connection",
}


async def test_d23_no_hop_by_hop_header_crosses_towards_the_backend() -> None:
    lines = [f"{name}: {value}" for name, value in HOP.items()]
    named = ("Connection: keep-alive, X-Named", "Connection: x-named-too")
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(), *lines, *named, "X-Kept: 1"))
        received = rig.backends[0].received[0]

        assert answer.status == 200
        for name in (*HOP, "Connection", "Transfer-Encoding"):
            assert received.header(name) is None, name
        assert received.header("X-Kept") == "1"


async def test_d23_no_hop_by_hop_header_crosses_towards_the_client() -> None:
    async def script(conn: Conn, _: Received) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in HOP.items() if name != "Upgrade")
        more = "Connection: X-Named\r\nconnection: close, X-Named-Too\r\nX-Kept: 1\r\n"
        await conn.json({}, 200, (lines + more).encode())
        conn.writer.close()

    async with running(script) as rig:
        answer = await rig.ask(CHAT)

        for name in (*HOP, "Connection"):
            assert answer.header(name) is None, name
        assert answer.header("X-Kept") == "1"


async def test_d23_gateway_and_engine_control_headers_do_not_cross() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({}, 200, b"X-Gateway-Backend: other\r\n")

    steering = ("X-data-parallel-rank: 3", "endpoint-load-metrics-format: JSON")
    async with running(script) as rig:
        answer = await rig.ask(
            post(
                "/v1/chat/completions",
                chat(),
                "X-Gateway-Session: s",
                "X-Gateway-Odd: 1",
                *steering,
            )
        )
        sent = {name.lower() for name, _ in rig.backends[0].received[0].headers}

        assert not [name for name in sent if name.startswith("x-gateway-")]
        assert not sent & {"x-data-parallel-rank", "endpoint-load-metrics-format"}
        assert answer.all("x-gateway-backend") == ["backend-1"]


async def test_d23_an_offered_upgrade_is_declined_and_the_connection_goes_on() -> None:
    """Java's HttpClient offers h2c with the first request of every connection."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    async with running() as rig:
        client = await rig.connect()
        for lines in (offer, (), offer):
            await client.send(post("/v1/chat/completions", chat(), *lines))
            assert (await client.answer()).status == 200
        for received in rig.backends[0].received:
            assert received.body == BODY
            assert received.header("upgrade") is None
            assert received.header("http2-settings") is None


async def test_d23_connect_is_refused_and_closes() -> None:
    async with running() as rig:
        client = await rig.connect()
        await client.send(b"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\n" + CHAT)
        assert (await client.answer()).status in (404, 405)
        assert await until_closed(client) == b""
        assert rig.backends[0].received == []


# --- D24


SIZE = len(BODY)
SMUGGLED = {
    "length and coding": head("Host: gw", f"Content-Length: {SIZE}", "Transfer-Encoding: chunked")
    + chunked(BODY),
    "coding and length": head("Host: gw", "Transfer-Encoding: chunked", f"Content-Length: {SIZE}")
    + chunked(BODY),
    "two lengths": head("Host: gw", f"Content-Length: {SIZE}", "Content-Length: 1") + BODY,
    "two equal lengths": head("Host: gw", *[f"Content-Length: {SIZE}"] * 2) + BODY,
    "listed lengths": head("Host: gw", f"Content-Length: {SIZE}, {SIZE}") + BODY,
    "signed length": head("Host: gw", f"Content-Length: +{SIZE}") + BODY,
    "negative length": head("Host: gw", "Content-Length: -1") + BODY,
    "hex length": head("Host: gw", "Content-Length: 0x10") + BODY,
    "empty length": head("Host: gw", "Content-Length: ") + BODY,
    "huge length": head("Host: gw", "Content-Length: " + "9" * 40) + BODY,
    "unknown coding": head("Host: gw", "Transfer-Encoding: xchunked") + chunked(BODY),
    "coding not last": head("Host: gw", "Transfer-Encoding: chunked, gzip") + chunked(BODY),
    "coded and chunked": head("Host: gw", "Transfer-Encoding: gzip, chunked") + chunked(BODY),
    "identity coding": head("Host: gw", "Transfer-Encoding: identity") + chunked(BODY),
    "two codings": head("Host: gw", *["Transfer-Encoding: chunked"] * 2) + chunked(BODY),
    "coding twice": head("Host: gw", "Transfer-Encoding: chunked, chunked") + chunked(BODY),
    "quoted coding": head("Host: gw", 'Transfer-Encoding: "chunked"') + chunked(BODY),
    "vertical tab in coding": head("Host: gw", "Transfer-Encoding: \x0bchunked") + chunked(BODY),
    "space before the colon": head("Host: gw", "Transfer-Encoding : chunked") + chunked(BODY),
    "folded line": head("Host: gw", "X-A: b\r\n c", f"Content-Length: {SIZE}") + BODY,
    "folded coding": head("Host: gw", "Transfer-Encoding:\r\n chunked") + chunked(BODY),
    "leading space": head(" Host: gw", f"Content-Length: {SIZE}") + BODY,
    "bare line feeds": head("Host: gw", f"Content-Length: {SIZE}").replace(b"\r\n", b"\n") + BODY,
    "one bare line feed": head("Host: gw\nX-A: b", f"Content-Length: {SIZE}") + BODY,
    "bare carriage return": head("Host: gw\rX-A: b", f"Content-Length: {SIZE}") + BODY,
    "null in a value": head("Host: gw", "X-A: a\x00b", f"Content-Length: {SIZE}") + BODY,
    "null in a name": head("Host: gw", "X\x00A: b", f"Content-Length: {SIZE}") + BODY,
    "space in a name": head("Host: gw", "X A: b", f"Content-Length: {SIZE}") + BODY,
    "no colon": head("Host: gw", "X-A", f"Content-Length: {SIZE}") + BODY,
    "no host": head(f"Content-Length: {SIZE}") + BODY,
    "two hosts": head("Host: gw", "Host: gw", f"Content-Length: {SIZE}") + BODY,
    "chunk size not hex": head("Host: gw", "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
    "chunk size with 0x": head("Host: gw", "Transfer-Encoding: chunked")
    + b"0x2\r\n{}\r\n0\r\n\r\n",
    "chunk size overflows": head("Host: gw", "Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n",
    "chunk longer than said": head("Host: gw", "Transfer-Encoding: chunked")
    + b"1\r\n{}\r\n0\r\n\r\n",
    "chunk ends in line feed": head("Host: gw", "Transfer-Encoding: chunked") + b"2\n{}\n0\n\n",
    "chunked on HTTP/1.0": head("Host: gw", "Transfer-Encoding: chunked").replace(b"1.1", b"1.0")
    + chunked(BODY),
    "HTTP/0.9": b"POST /v1/chat/completions\r\n\r\n",
    "HTTP/1.2": head("Host: gw", f"Content-Length: {SIZE}").replace(b"HTTP/1.1", b"HTTP/1.2")
    + BODY,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "space in the target": head("Host: gw", path="/v1/chat/comp letions"),
}


@pytest.mark.parametrize("case", SMUGGLED)
async def test_d24_ambiguous_framing_is_400_and_closes(case: str) -> None:
    async with running() as rig:
        client = await rig.connect()
        await client.send(SMUGGLED[case] + CHAT)
        answer = await client.answer()

        assert answer.status == 400
        assert answer.code == "invalid_request"
        assert answer.header("connection") == "close"
        assert await until_closed(client) == b""
        assert rig.backends[0].received == []


async def test_d24_the_tail_of_a_smuggled_request_is_not_answered() -> None:
    inner = b"GET /healthz HTTP/1.1\r\nHost: gw\r\n\r\n"
    async with running() as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", "Content-Length: 4", "Transfer-Encoding: chunked"))
        await client.send(b"0\r\n\r\n" + inner)
        assert (await client.answer()).status == 400
        assert await until_closed(client) == b""


@pytest.mark.parametrize(
    "tail",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx a: b\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_d24_a_backend_whose_framing_is_ambiguous_gives_502(tail: bytes) -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.write(tail)
        conn.writer.close()

    async with running(script) as rig:
        answer = await rig.ask(CHAT)

        assert (answer.status, answer.code) == (502, "upstream_error")
        await rig.at_rest()


async def test_d24_a_chunk_that_breaks_off_badly_ends_the_stream_in_band() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await conn.write(b"zz\r\n")
        await conn.gone()

    async with running(script) as rig:
        answer = await rig.ask(STREAM)

        assert answer.body.startswith(chat_event("a"))
        assert b'"error"' in answer.body
        assert answer.body.endswith(DONE)


# --- D25, D26


async def test_d25_expect_is_answered_at_once_and_not_forwarded() -> None:
    body = orjson.dumps(chat("x" * (2 << 20)))
    async with running() as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", f"Content-Length: {len(body)}", "Expect: 100-continue"))
        interim = await client.head()
        assert (interim.status, interim.headers) == (100, [])
        await client.send(body)
        assert (await client.answer()).status == 200
        assert rig.backends[0].received[0].header("expect") is None
        assert rig.backends[0].received[0].body == body


async def test_d25_a_pipelined_request_is_continued_when_its_turn_comes() -> None:
    go = asyncio.Event()

    async def script(conn: Conn, request: Received) -> None:
        await go.wait()
        await ok_chat(conn, request)

    async with running(script) as rig:
        client = await rig.connect()
        await client.send(
            CHAT + head("Host: gw", f"Content-Length: {len(BODY)}", "Expect: 100-continue")
        )
        await eventually(lambda: len(rig.backends[0].received) == 1)
        go.set()
        assert (await client.answer()).status == 200
        assert (await client.head()).status == 100
        await client.send(BODY)
        assert (await client.answer()).status == 200
        assert rig.backends[0].received[1].body == BODY


async def test_d25_what_will_be_refused_is_refused_instead_of_continued(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path)) as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", "Content-Length: 99", "Expect: 100-continue"))
        answer = await client.answer()

        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert await until_closed(client) == b""


async def test_d25_a_backends_100_continue_is_swallowed() -> None:
    async def script(conn: Conn, request: Received) -> None:
        await conn.write(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        )
        await ok_chat(conn, request)

    async with running(script) as rig:
        answer = await rig.ask(CHAT)
        assert answer.status == 200
        assert answer.header("link") is None


async def test_d26_a_chunked_body_is_forwarded_with_a_length() -> None:
    async with running() as rig:
        request = head("Host: gw", "Transfer-Encoding: chunked", "Trailer: X-Sum")
        tail = b"0\r\nX-Sum: 1\r\n\r\n"
        answer = await rig.ask(request + chunked(BODY[:7], BODY[7:8], BODY[8:], tail=tail))
        received = rig.backends[0].received[0]

        assert answer.status == 200
        assert received.body == BODY
        assert received.header("content-length") == str(SIZE)
        assert received.header("transfer-encoding") is None
        assert received.header("x-sum") is None


async def test_d26_the_limit_holds_while_a_chunked_body_is_read() -> None:
    async with running(settings=("limits.body_mib=1",)) as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", "Transfer-Encoding: chunked"))
        for _ in range(17):
            await client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        answer = await client.answer()

        assert (answer.status, answer.code) == (413, "body_too_large")
        assert rig.backends[0].received == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/nowhere"])
@pytest.mark.parametrize("what", ["trailer", "extension", "empty data"])
async def test_d26_bytes_that_are_not_body_are_bounded_too(what: str, path: str) -> None:
    """A trailer or a chunk extension without end is neither header nor body."""
    async with running(settings=("limits.body_mib=1", "limits.header_kib=1")) as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", "Transfer-Encoding: chunked", path=path))
        opening = {"trailer": b"0\r\nX-Sum: ", "extension": b"5;a=", "empty data": b""}[what]
        await client.send(opening)
        piece = b"1;" + b"x" * 998 + b"\r\ny\r\n" if what == "empty data" else b"x" * 65536
        sent = await flood(client, piece, 256 << 20)
        answer = await client.answer()

        assert answer.status in (400, 404, 413)
        assert sent < 64 << 20


# --- D27, D28


async def test_d27_twenty_mib_of_images_pass_by_default() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 << 20)}}
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]})
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", body))

        assert answer.status == 200
        assert rig.backends[0].received[0].body == body


@pytest.mark.parametrize("announced", [True, False])
async def test_d27_a_body_over_the_limit_is_413_with_log_and_metric(announced: bool) -> None:
    body = b"x" * ((1 << 20) + 1)
    request = post("/v1/chat/completions", body)
    if not announced:
        request = head("Host: gw", "Transfer-Encoding: chunked") + chunked(body)
    async with running(settings=("limits.body_mib=1",)) as rig:
        records: list[RequestRecord] = []
        rig.app.telemetry.log = records.append
        answer = await rig.ask(request)

        assert (answer.status, answer.code) == (413, "body_too_large")
        assert "1048576" in answer.json["error"]["message"]
        assert "limits.body_mib" in answer.json["error"]["message"]
        assert rig.outcomes() == {"bad_request": 1}
        assert [record.status for record in records] == [413]


async def test_d28_a_token_of_12_kib_is_accepted() -> None:
    async with running() as rig:
        answer = await rig.ask(
            post("/v1/chat/completions", chat(), "Authorization: Bearer " + "t" * (12 << 10))
        )
        assert answer.status == 200


@pytest.mark.parametrize(
    "lines", [["X-A: " + "a" * (64 << 10)], [f"X-{n}: 1" for n in range(300)], ["X-A: b"] * 7000]
)
async def test_d28_a_head_over_the_limit_is_431_with_the_limits_name(lines: list[str]) -> None:
    async with running() as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat(), *lines))
        answer = await client.answer()

        assert (answer.status, answer.code) == (431, "headers_too_large")
        assert "limits.header_" in answer.json["error"]["message"]
        assert answer.header("connection") == "close"


@pytest.mark.parametrize(
    "spoilt",
    ["X-Long: " + "a" * 200_000, "Host: twice", "Bad Name: 1", "Content-Length: x"],
)
async def test_d28_on_messages_a_spoilt_head_is_told_in_anthropics_form(spoilt: str) -> None:
    async with running() as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", spoilt, path="//v1/messages?beta=true"))
        answer = await client.answer()

        assert answer.status in (400, 431)
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"


async def test_d28_a_target_over_the_limit_is_431() -> None:
    async with running() as rig:
        answer = await rig.ask(post("/v1/messages?" + "q" * (65 << 10), chat()))
        assert answer.status == 431


# --- D29


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "deflate": zlib.compress,
    "zstd": zstd,
    "identity": bytes,
}


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "zstd", "identity", "GZIP"])
async def test_d29_a_compressed_body_is_decoded_towards_the_backend(coding: str) -> None:
    encode = ENCODERS.get(coding, gzip.compress)
    async with running() as rig:
        answer = await rig.ask(
            post("/v1/chat/completions", encode(BODY), f"Content-Encoding: {coding}")
        )
        received = rig.backends[0].received[0]

        assert answer.status == 200
        assert received.body == BODY
        assert received.header("content-encoding") is None
        assert received.header("content-length") == str(SIZE)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress", "\xff"])
async def test_d29_an_unknown_coding_is_415(coding: str) -> None:
    async with running() as rig:
        answer = await rig.ask(post("/v1/chat/completions", BODY, f"Content-Encoding: {coding}"))

        assert (answer.status, answer.code) == (415, "unsupported_encoding")
        assert rig.backends[0].received == []


async def test_d29_two_content_encodings_are_415() -> None:
    lines = ("Content-Encoding: gzip", "Content-Encoding: gzip")
    async with running() as rig:
        body = gzip.compress(gzip.compress(BODY))
        assert (await rig.ask(post("/v1/chat/completions", body, *lines))).status == 415


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_d29_a_bomb_is_413_and_nonsense_is_400(coding: str) -> None:
    encode = ENCODERS.get(coding, gzip.compress)
    line = f"Content-Encoding: {coding}"
    async with running(settings=("limits.body_mib=1",)) as rig:
        bomb = await rig.ask(post("/v1/chat/completions", encode(b" " * (64 << 20)), line))
        nonsense = await rig.ask(post("/v1/chat/completions", BODY, line))
        cut = await rig.ask(post("/v1/chat/completions", encode(BODY)[:-3], line))

        assert (bomb.status, bomb.code) == (413, "body_too_large")
        assert (nonsense.status, nonsense.code) == (400, "invalid_request")
        assert cut.status == 400
        assert rig.backends[0].received == []


def test_d29_zstd_is_offered_only_when_it_can_be_decoded() -> None:
    assert {"gzip", "deflate"} <= decode._DECODERS.keys()


# --- D30


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_d30_http_1_0_gets_no_chunked_framing(framing: str) -> None:
    async def script(conn: Conn, _: Received) -> None:
        if framing == "length":
            await conn.json({"a": 1})
        else:
            await conn.sse(chat_event("a"), DONE)
            await conn.end()

    async with running(script) as rig:
        client = await rig.connect()
        await client.send(STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await client.answer()

        assert answer.header("transfer-encoding") is None
        assert answer.header("connection") == "close"
        expected = b'{"a":1}' if framing == "length" else chat_event("a") + DONE
        assert answer.body == expected
        assert await until_closed(client) == b""


async def test_d30_http_1_0_hears_of_a_failure_in_mid_stream() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        conn.reset()

    async with running(script) as rig:
        answer = await rig.ask(STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert answer.body.startswith(chat_event("a") + b'data: {"error"')
        assert answer.body.endswith(DONE)


async def test_d30_http_1_0_without_host_and_with_keep_alive_is_served() -> None:
    request = b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with running() as rig:
        client = await rig.connect()
        for _ in range(2):
            await client.send(request)
            answer = await client.answer()
            assert answer.status == 200
            assert answer.header("connection") == "keep-alive"


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_d30_an_http_1_0_backend_is_understood(version: bytes) -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await conn.write(chat_event("a") + DONE)
        conn.writer.close()

    async with running(script) as rig:
        answer = await rig.ask(STREAM.replace(b"HTTP/1.1", version))

        assert answer.body == chat_event("a") + DONE
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}


# --- D31, D32, D33


@pytest.mark.parametrize(
    "path",
    ["/v1//chat/completions", "//v1/chat/completions", "///v1///chat//completions//"],
)
async def test_d31_doubled_slashes_find_the_route_and_go_upstream_canonical(path: str) -> None:
    async with running() as rig:
        assert (await rig.ask(post(path + "?a=//b", chat()))).status == 200
        assert rig.backends[0].received[0].target == "/v1/chat/completions?a=//b"
        assert (await rig.ask(get("//v1/models"))).status == 200


async def test_d31_an_absolute_target_is_the_same_route() -> None:
    async with running() as rig:
        for target in ("http://gw/v1/chat/completions?a=1", "HTTP://gw:80/v1/chat/completions?a=1"):
            assert (await rig.ask(post(target, chat()))).status == 200
            assert rig.backends[0].received[-1].target == "/v1/chat/completions?a=1"
        assert (await rig.ask(get("http://gw"))).status == 404


OPERATORS_ONLY = [
    "/invocations",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/collective_rpc",
    "/abort_requests",
    "/pause",
    "/resume",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/start_profile",
    "/stop_profile",
    "/server_info",
    "/metrics",
    "/load",
    "/version",
    "/ping",
    "/health",
    "/docs",
    "/openapi.json",
    "/tokenizer_info",
    "/inference/v1/generate",
    "/v1/chat/completions/render",
    "/v1/chat/completions/batch",
    "/status",
    "/reload",
    "/backends/x/drain",
    "/explain",
    "/trie",
    "/decisions/x",
    "/",
]
SERVED = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score",
    "/pooling", "/classify", "/tokenize", "/detokenize", "/v1/audio/transcriptions",
    "/v1/audio/translations",
]  # fmt: skip


async def test_d32_operators_routes_are_404_with_and_without_a_key(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path)) as rig:
        client = await rig.connect()
        for path in OPERATORS_ONLY:
            for lines in ((), (f"Authorization: Bearer {KEY}",)):
                for request in (get(path, *lines), post(path, chat(), *lines)):
                    await client.send(request)
                    answer = await client.answer()
                    assert (answer.status, answer.code) == (404, "not_found"), path
        assert rig.backends[0].received == []


async def test_d32_every_api_route_needs_the_key(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path)) as rig:
        client = await rig.connect()
        requests = [post(path, chat()) for path in SERVED]
        requests += [get("/v1/models"), get("/v1/models/m"), get("/v1/responses/resp_1")]
        for request in requests:
            await client.send(request)
            answer = await client.answer()
            assert answer.status == 401, request[:60]
            assert answer.header("www-authenticate") == "Bearer"
        assert rig.backends[0].received == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/V1/chat/completions",
        "/v1/../sleep",
        "/v1/chat/completions/../../sleep",
        "/v1/models/../../sleep",
    ],
)
async def test_d32_a_disguised_path_reaches_no_backend(path: str) -> None:
    async with running() as rig:
        assert (await rig.ask(post(path, chat()))).status in (404, 405)
        assert (await rig.ask(get(path))).status in (404, 405)
        assert rig.backends[0].received == []


async def test_d33_the_query_string_is_forwarded_byte_for_byte() -> None:
    async with running() as rig:
        path = "/v1/messages?beta=true&x=%20%2B&y=a+b&&z=%e2%82%ac'\"&"
        await rig.ask(post(path, chat(max_tokens=5)))
        assert rig.backends[0].received[0].target == path


# --- D34


CORS = "cors: {origins: ['https://ui.example.com']}\n"
ORIGIN = "Origin: https://ui.example.com"
PREFLIGHT = (
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization, x-stainless-os",
)


async def test_d34_a_preflight_needs_no_key(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path, CORS)) as rig:
        answer = await rig.ask(get("/v1/chat/completions", ORIGIN, *PREFLIGHT, method="OPTIONS"))

        assert answer.status in (200, 204)
        assert answer.all("access-control-allow-origin") == ["https://ui.example.com"]
        assert "POST" in (answer.header("access-control-allow-methods") or "")
        allowed = (answer.header("access-control-allow-headers") or "").replace(" ", "").split(",")
        assert {"authorization", "x-stainless-os"} <= set(allowed)


async def test_d34_errors_carry_cors_headers_too(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path, CORS)) as rig:
        bad_key = await rig.ask(post("/v1/chat/completions", chat(), ORIGIN))
        unknown = await rig.ask(post("/nowhere", chat(), ORIGIN))
        good = await rig.ask(
            post("/v1/chat/completions", chat(), ORIGIN, f"Authorization: Bearer {KEY}")
        )

        assert [bad_key.status, unknown.status, good.status] == [401, 404, 200]
        for answer in (bad_key, unknown, good):
            assert answer.all("access-control-allow-origin") == ["https://ui.example.com"]
            assert "x-request-id" in (answer.header("access-control-expose-headers") or "")


async def test_d34_other_origins_get_nothing(tmp_path: Path) -> None:
    async with running(file=keyed(tmp_path, CORS)) as rig:
        answer = await rig.ask(
            get(
                "/v1/chat/completions", "Origin: https://evil.example", *PREFLIGHT, method="OPTIONS"
            )
        )
        assert answer.header("access-control-allow-origin") is None


async def test_d34_by_default_there_is_no_cors_whatever_the_engine_says() -> None:
    async def script(conn: Conn, _: Received) -> None:
        lines = b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\n"
        await conn.json({}, 200, lines)

    async with running(script) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(), ORIGIN))
        options = await rig.ask(get("/v1/chat/completions", ORIGIN, *PREFLIGHT, method="OPTIONS"))

        for found in (answer, options):
            assert not [name for name, _ in found.headers if name.lower().startswith("access-")]
        assert options.status == 405


async def test_d34_the_engines_cors_headers_do_not_double_ours(tmp_path: Path) -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({}, 200, b"access-control-allow-origin: *\r\n")

    async with running(script, file=configured(tmp_path, CORS)) as rig:
        answer = await rig.ask(post("/v1/chat/completions", chat(), ORIGIN))
        assert answer.all("access-control-allow-origin") == ["https://ui.example.com"]


# --- D35


def form(audio: bytes, model: str = "m") -> tuple[bytes, str]:
    mark = "----x7MA4YWxkTrZu0gW"
    body = (
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        f"Content-Type: audio/wav\r\n\r\n"
    ).encode() + audio
    body += (
        f'\r\n--{mark}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--{mark}--\r\n'
    ).encode()
    return body, f"multipart/form-data; boundary={mark}"


def post_form(path: str, body: bytes, kind: str) -> bytes:
    return (
        head("Host: gw", f"Content-Type: {kind}", f"Content-Length: {len(body)}", path=path) + body
    )


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_d35_an_audio_form_is_routed_by_its_model_field(path: str) -> None:
    body, kind = form(bytes(range(256)) * (3 << 12))

    async def script(conn: Conn, _: Received) -> None:
        await conn.json({"text": "hello"})

    async with running(ok_chat, script, models=[["other"], ["m"]]) as rig:
        answer = await rig.ask(post_form(path, body, kind))

        assert answer.json == {"text": "hello"}
        assert rig.backends[0].received == []
        assert rig.backends[1].received[0].body == body
        assert rig.backends[1].received[0].header("content-type") == kind


async def test_d35_a_form_without_a_known_model_is_refused_at_once() -> None:
    async with running() as rig:
        unknown = await rig.ask(post_form("/v1/audio/transcriptions", *form(b"x", model="zz")))
        bad = await rig.ask(post_form("/v1/audio/transcriptions", b"xx", "multipart/form-data"))
        none = await rig.ask(post_form("/v1/audio/transcriptions", BODY, "application/json"))

        assert (unknown.status, unknown.code) == (404, "model_not_found")
        assert (bad.status, none.status) == (400, 400)
        assert rig.backends[0].received == []


async def test_d35_the_openai_sdk_transcribes() -> None:
    async def script(conn: Conn, _: Received) -> None:
        await conn.json({"text": "hello"})

    async with running(script) as rig, rig.openai() as sdk:
        made = await sdk.audio.transcriptions.create(model="m", file=("a.wav", b"R" * 5000))
        assert made.text == "hello"


# --- D36, D37


async def asked_with(rig: Rig, *lines: str) -> tuple[Answer, Received]:
    answer = await rig.ask(post("/v1/chat/completions", chat(), *lines))
    return answer, rig.backends[0].received[-1]


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ((), None),
        (("X-Request-Id: abc.DEF_1-2",), "abc.DEF_1-2"),
        (("x-request-id: " + "a" * 128,), "a" * 128),
        (("x-request-id: " + "a" * 129,), None),
        (("x-request-id: " + "a" * 10240,), None),
        (("x-request-id: a%0d%0ab",), None),
        (("x-request-id: a\tb",), None),
        (("x-request-id: é",), None),
        (("x-request-id: ",), None),
        (("x-request-id: a", "X-Request-Id: b"), None),
        (("x-request-id: a", "X-Request-Id: a", "x-request-id: a"), None),
    ],
)
async def test_d36_one_safe_request_id_everywhere(lines: tuple[str, ...], kept: str | None) -> None:
    async def script(conn: Conn, request: Received) -> None:
        own = request.header("x-request-id") or ""
        await conn.json({}, 200, f"X-Request-Id: {own}\r\nx-request-id: engine\r\n".encode())

    async with running(script) as rig:
        records: list[RequestRecord] = []
        rig.app.telemetry.log = records.append
        answer, received = await asked_with(rig, *lines)
        await rig.settled()
        sent = [value for name, value in received.headers if name.lower() == "x-request-id"]

        (given,) = answer.all("x-request-id")
        assert sent == [given]
        assert [record.request_id for record in records] == [given]
        assert (given == kept) if kept is not None else given.startswith("rg-")


async def test_d36_errors_and_local_answers_carry_the_id_too() -> None:
    async with running() as rig:
        for request in (
            post("/nowhere", chat(), "X-Request-Id: mine"),
            post("/v1/chat/completions", b"{", "X-Request-Id: mine"),
            get("/v1/models", "X-Request-Id: mine"),
            get("/healthz", "X-Request-Id: mine"),
        ):
            assert (await rig.ask(request)).all("x-request-id") == ["mine"]
        malformed = await rig.ask(b"nonsense\r\n\r\n")
        assert len(malformed.all("x-request-id")) == 1


FORWARDING = (
    "X-Forwarded-For: 1.2.3.4",
    "x-forwarded-for: 5.6.7.8",
    "Forwarded: for=1.2.3.4",
    "X-Real-IP: 1.2.3.4",
    "X-Forwarded-Proto: https",
    "X-Forwarded-Host: evil",
)


async def test_d37_a_clients_own_forwarding_headers_are_ignored() -> None:
    async with running() as rig:
        _, received = await asked_with(rig, *FORWARDING)
        found = [(k.lower(), v) for k, v in received.headers if "forwarded" in k.lower()]

        assert found == [("x-forwarded-for", "127.0.0.1")]
        assert received.header("x-real-ip") is None


async def test_d37_a_trusted_proxys_list_is_continued(tmp_path: Path) -> None:
    file = configured(tmp_path, "trusted_proxies: ['127.0.0.0/8']\n")
    async with running(file=file) as rig:
        _, received = await asked_with(rig, *FORWARDING)
        found = [v for k, v in received.headers if k.lower() == "x-forwarded-for"]

        assert found == ["1.2.3.4, 5.6.7.8, 127.0.0.1"]


# --- slow and impatient clients, beyond the numbered cases


async def test_a_head_that_drips_is_408_and_closed() -> None:
    async with running(settings=("timeouts.header_s=0.15",)) as rig:
        client = await rig.connect()
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nX-A: ")
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert await until_closed(client) == b""


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with running(settings=("timeouts.header_s=0.15",)) as rig:
        client = await rig.connect()
        await client.send(b"\r\n\r\n")
        assert await until_closed(client) == b""


async def test_a_body_that_stops_is_408_and_closed() -> None:
    async with running(settings=("timeouts.body_s=0.15",)) as rig:
        client = await rig.connect()
        await client.send(head("Host: gw", "Content-Length: 100") + b"{")
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert rig.outcomes() == {"bad_request": 1}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(conn: Conn, request: Received) -> None:
        text = orjson.loads(request.body)["messages"][0]["content"]
        await asyncio.sleep(0.02 if text == "n0" else 0)
        await conn.json({"text": text})

    async with running(script) as rig:
        client = await rig.connect()
        requests = [post("/v1/chat/completions", chat(f"n{n}")) for n in range(40)]
        await client.send(requests[0] + get("/healthz") + b"".join(requests[1:]))
        assert (await client.answer()).json == {"text": "n0"}
        assert (await client.answer()).json == {"status": "ok"}
        for n in range(1, 40):
            assert (await client.answer()).json == {"text": f"n{n}"}


async def test_a_client_that_reads_nothing_of_a_finished_answer_does_not_stay_for_ever() -> None:
    settings = ("timeouts.keepalive_s=0.2", "timeouts.idle_s=0.3")
    body = b'"' + b"x" * (12 << 20) + b'"'

    async def script(conn: Conn, _: Received) -> None:
        await conn.json(body)

    async with running(script, settings=settings) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(CHAT)
        await eventually(lambda: bool(rig.backends[0].received))
        await eventually(lambda: not rig.app._listener.connections)
        await rig.at_rest()
