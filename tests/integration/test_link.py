import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.watch.link import Answer, Link, LinkError
from gateway.watch.poller import Target

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def get(port: int, path: str = "/x", *, base: str = "", timeout_s: float = 10.0) -> Answer:
    link = Link(f"http://127.0.0.1:{port}{base}", "key", lambda: 5.0)
    try:
        return await link.get(path, timeout_s=timeout_s, max_bytes=1_000)
    finally:
        await link.close()


def answering(answer: bytes, seen: list[bytes] | None = None) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            seen.append(head)
        writer.write(answer)
        await writer.drain()

    return script


async def test_answer_comes_whole_with_its_time() -> None:
    body = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nprocess-start-time-unix: 9\r\n\r\nok"
    async with raw_server(answering(body)) as port:
        assert await get(port) == Answer(200, b"ok", 5.0, "9")


async def test_path_below_a_base_is_sent_as_written() -> None:
    seen: list[bytes] = []
    async with raw_server(answering(b"HTTP/1.1 204 No\r\n\r\n", seen)) as port:
        await get(port, "/m/?a%5B%5D=x:y", base="/base/")

    (head,) = seen
    assert head.startswith(b"GET /base/m/?a%5B%5D=x:y HTTP/1.1\r\n")
    assert b"\r\nauthorization: Bearer key\r\n" in head.lower().replace(b"bearer", b"Bearer")
    assert b"cookie" not in head.lower()


async def test_large_answer_is_not_read_to_its_end() -> None:
    endless = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 2_000)
        await endless.wait()

    async with raw_server(script) as port:
        with pytest.raises(LinkError, match="over 1000 bytes"):
            await get(port)
        endless.set()


async def test_silence_ends_at_the_deadline() -> None:
    over = asyncio.Event()

    async def script(_: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with raw_server(script) as port:
        with pytest.raises(LinkError, match="no answer within"):
            await get(port, timeout_s=0.05)
        over.set()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_broken_answer_is_a_link_error(answer: bytes) -> None:
    async with raw_server(answering(answer)) as port:
        with pytest.raises(LinkError) as caught:
            await get(port)

    assert not caught.value.refused


async def test_nobody_listening_is_told_apart() -> None:
    with pytest.raises(LinkError) as caught:
        await get(1)

    assert caught.value.refused
    assert str(caught.value) == "connection refused"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (socket.gaierror(socket.EAI_NONAME, "unknown"), "host name not found"),
        (socket.gaierror(socket.EAI_AGAIN, "later"), "no name server answers"),
        (UnicodeError("label too long"), "host name that cannot be one"),
    ],
)
async def test_a_host_that_is_not_found_is_told_as_such(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown, raising=False)
    link = Link("http://nobody.invalid:80", None, lambda: 5.0)
    try:
        with pytest.raises(LinkError, match=why) as caught:
            await link.get("/x", timeout_s=20.0, max_bytes=1000)
    finally:
        await link.close()

    assert not caught.value.refused


async def test_a_connection_that_is_closed_or_reset_is_told_as_such() -> None:
    async def close(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    said = []
    for script in (close, reset):
        async with raw_server(script) as port:
            with pytest.raises(LinkError) as caught:
                await get(port)
            said.append(str(caught.value))

    assert said == ["answer broken: connection closed", "answer broken: connection reset"]


def test_target_does_not_show_its_key() -> None:
    assert "secret" not in repr(Target("a", "http://h", "secret"))
