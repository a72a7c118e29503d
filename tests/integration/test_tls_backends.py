"""TLS towards backends: authorities, names, client certificates, and the ends of connections."""

import array
import asyncio
import fcntl
import logging
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.rig import (
    DONE,
    HEAD_SSE,
    Backend,
    Conn,
    Received,
    Script,
    chat,
    chat_event,
    eventually,
    ok_chat,
    post,
)
from tests.integration.tls_rig import (
    Authority,
    TlsBackend,
    TlsRig,
    server_context,
    tls_backends,
    tls_gateway,
    towards,
)

CHAT = "/v1/chat/completions"
MIB = 1024 * 1024
OPEN = "listen: {port: 0}\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def before_tls(
    tmp_path: Path, authority: Authority, *scripts: Script, more: str = "", **tls: Any
) -> AsyncIterator[TlsRig]:
    """Run a plain gateway before backends under TLS, whose certificate `authority` has made."""
    context = server_context(authority.issue("backend"))
    tls = tls or {"ca": str(authority.path)}
    async with (
        tls_backends(context, *scripts or (ok_chat,)) as backends,
        tls_gateway(
            tmp_path / "g.yaml", OPEN, towards(backends, **tls), more, backends=backends
        ) as rig,
    ):
        yield rig


async def ask(rig: TlsRig, **body: Any) -> Any:
    return await rig.ask(post(CHAT, chat(**body)))


def tls(backend: Backend) -> TlsBackend:
    assert isinstance(backend, TlsBackend)
    return backend


async def test_a_backend_is_watched_and_asked_over_https(
    tmp_path: Path, authority: Authority
) -> None:
    async with before_tls(tmp_path, authority) as rig:
        assert rig.metric("gateway_backend_up", backend="a") == 1
        assert (await ask(rig)).json["choices"][0]["message"]["content"] == "ab"
        assert (await ask(rig, stream=True)).body.endswith(DONE)
        assert rig.outcomes() == {"ok": 2}
        assert rig.metric("gateway_upstream_attempts_total", result="ok") == 2


async def test_pooled_connections_are_used_again(tmp_path: Path, authority: Authority) -> None:
    async with before_tls(tmp_path, authority) as rig:
        for _ in range(5):
            assert (await ask(rig)).status == 200
        (upstream,) = rig.app._upstreams.all()
        assert upstream.pool.open_connections == 1


async def test_a_backend_with_another_authoritys_certificate_is_down_and_the_log_says_why(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path, "other")
    caplog.set_level(logging.INFO, "radixgate")
    async with before_tls(tmp_path, authority, ca=str(other.path)) as rig:
        assert rig.metric("gateway_backend_up", backend="a") == 0
        answer = await ask(rig)
        assert (answer.status, answer.code) == (503, "no_backend")
        assert not rig.backends[0].received
        why = "TLS failed: certificate not accepted: unable to get local issuer certificate"
        assert f"backend a is down: {why}" in caplog.text


@pytest.mark.parametrize("days", [-1, 1])  # expired; another authority's
async def test_a_certificate_that_is_no_longer_good_sends_requests_elsewhere(
    tmp_path: Path,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    days: int,
) -> None:
    issuer = authority if days < 0 else Authority(tmp_path, "other")
    caplog.set_level(logging.INFO, "radixgate")
    context = server_context(authority.issue("good"))
    bad = server_context(authority.issue("turned"))
    settings = "routing: {policy: round_robin}\n"
    trust = {"ca": str(authority.path)}
    async with (
        tls_backends(context) as first,
        tls_backends(bad) as second,
        tls_gateway(
            tmp_path / "g.yaml", OPEN, towards(first + second, **trust), settings, backends=first
        ) as rig,
    ):
        assert rig.metric("gateway_backend_up") == 2
        bad.load_cert_chain(issuer.issue("turned", days=days))
        for upstream in rig.app._upstreams.all():
            upstream.pool.close()
        for _ in range(2):  # in turn
            answer = await ask(rig)
            assert answer.status == 200
            assert answer.header("x-gateway-backend") == "a"
        attempts = "gateway_upstream_attempts_total"
        assert rig.metric(attempts, backend="b", result="tls_failed") == 1
        assert rig.outcomes() == {"ok": 2}


async def test_alone_such_a_backend_is_a_502_and_the_log_has_the_reason(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with before_tls(tmp_path, authority) as rig:
        tls(rig.backends[0]).context.load_cert_chain(authority.issue("late", days=-1))
        answer = await ask(rig)
        assert (answer.status, answer.code) == (502, "upstream_error")
        assert "127.0.0.1" not in answer.body.decode()
        assert "TLS failed: certificate not accepted: certificate has expired" in caplog.text
        assert rig.metric("gateway_upstream_attempts_total", result="tls_failed") == 1


async def test_the_certificate_must_be_the_hosts_unless_another_name_is_given(
    tmp_path: Path, authority: Authority
) -> None:
    context = server_context(authority.issue("named", "engine.internal"))
    for name, up in ((None, 0), ("engine.internal", 1), ("other.internal", 0)):
        trust = {"ca": str(authority.path)} | ({"server_name": name} if name else {})
        async with (
            tls_backends(context) as backends,
            tls_gateway(
                tmp_path / "g.yaml", OPEN, towards(backends, **trust), backends=backends
            ) as rig,
        ):
            assert rig.metric("gateway_backend_up", backend="a") == up, name
            if up:
                assert (await ask(rig)).status == 200
                assert set(tls(backends[0]).names) == {"engine.internal"}


async def test_unverified_backends_are_asked_whoever_made_their_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    async with before_tls(tmp_path, authority, verify=False) as rig:
        assert (await ask(rig)).status == 200


async def test_a_backend_that_wants_a_client_certificate_gets_it(
    tmp_path: Path, authority: Authority
) -> None:
    context = server_context(authority.issue("backend"), authority)
    trust = {"ca": str(authority.path)}
    for shown, up in (({}, 0), ({"cert": str(authority.issue("gateway", "gateway"))}, 1)):
        async with (
            tls_backends(context) as backends,
            tls_gateway(
                tmp_path / "g.yaml", OPEN, towards(backends, **trust, **shown), backends=backends
            ) as rig,
        ):
            assert rig.metric("gateway_backend_up", backend="a") == up, shown
            assert (await ask(rig)).status == (200 if up else 503)


async def test_a_new_client_certificate_is_shown_with_new_connections(
    tmp_path: Path, authority: Authority
) -> None:
    context = server_context(authority.issue("backend"), authority)
    shown: list[str] = []

    async def note(conn: Conn, request: Received) -> None:
        shown.append(conn.writer.get_extra_info("peercert")["serialNumber"])
        await ok_chat(conn, request)

    mine = authority.issue("gateway", "gateway")
    trust = {"ca": str(authority.path), "cert": str(mine)}
    async with (
        tls_backends(context, note) as backends,
        tls_gateway(
            tmp_path / "g.yaml", OPEN, towards(backends, **trust), backends=backends
        ) as rig,
    ):
        assert (await ask(rig)).status == 200
        authority.issue("gateway", "gateway")
        await rig.app.renew_certificates()
        assert (await ask(rig)).status == 200
        assert len(set(shown)) == 2
        mine.write_text("rubbish")
        await rig.app.renew_certificates()
        assert (await ask(rig)).status == 200
        assert rig.metric("gateway_tls_certificate_loads_total", result="failed") == 1


async def test_backends_that_say_the_same_share_what_was_read(
    tmp_path: Path, authority: Authority
) -> None:
    async with before_tls(tmp_path, authority, ok_chat, ok_chat) as rig:
        first, second = (upstream.spec.tls for upstream in rig.app._upstreams.all())
        assert first is second
        assert (await rig.app.reload()).ok
        assert rig.app._upstreams.all()[0].spec.tls is first


async def test_a_chunked_stream_cut_without_goodbye_is_told_in_band(
    tmp_path: Path, authority: Authority
) -> None:
    async def cut(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        conn.shut()

    async with before_tls(tmp_path, authority, cut) as rig:
        answer = await ask(rig, stream=True)
        assert b"upstream_error" in answer.body
        await rig.settled()
        assert rig.outcomes() == {"upstream_error": 1}


@pytest.mark.parametrize("goodbye", [True, False])
async def test_a_body_that_ends_with_the_connection_ends_properly_only_with_tlss_goodbye(
    tmp_path: Path, authority: Authority, *, goodbye: bool
) -> None:
    async def until_close(conn: Conn, _: Received) -> None:
        await conn.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
        if goodbye:
            conn.writer.close()
        else:
            conn.shut()

    async with before_tls(tmp_path, authority, until_close) as rig:
        client = await rig.connect()
        await client.send(post(CHAT, chat()))
        head = await client.head()
        if goodbye:
            assert (await client.body(head)).body == b"{}"
        else:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.body(head)
        await rig.settled()
        assert rig.outcomes() == ({"ok": 1} if goodbye else {"upstream_error": 1})


async def test_a_slow_client_gets_all_of_an_answer_whose_backend_has_closed(
    tmp_path: Path, authority: Authority
) -> None:
    events = [chat_event("x" * 30_000) for _ in range(400)]

    async def close_after(conn: Conn, _: Received) -> None:
        await conn.write(HEAD_SSE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        for event in (*events, DONE):
            await conn.chunk(event)
        await conn.end()
        conn.writer.close()

    async with before_tls(tmp_path, authority, close_after) as rig:
        client = await rig.connect(receive_bytes=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(CHAT, chat(stream=True)))
        await eventually(lambda: any(e._relay and e._relay.paused_at for e in rig.handler.live), 20)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert answer.body == b"".join((*events, DONE))
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}


async def acknowledged(conn: Conn) -> None:
    """Wait until the other end's system has everything that was written."""
    queued = array.array("i", [1])
    sock = conn.writer.get_extra_info("socket")
    while conn.writer.transport.get_write_buffer_size() or queued[0]:
        await asyncio.sleep(0.005)
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, queued)


async def test_a_paused_answer_survives_a_connection_that_ends_meanwhile(
    tmp_path: Path, authority: Authority
) -> None:
    """What uvloop reads ahead of a reader that has stopped must not go with the connection."""
    size = 20_000
    halted, ended = asyncio.Event(), asyncio.Event()

    async def early(conn: Conn, _: Received) -> None:
        await conn.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * size))
        await conn.write(b"a" * size)
        await halted.wait()
        await conn.write(b"b" * size)
        await acknowledged(conn)
        conn.shut()
        ended.set()

    async with before_tls(tmp_path, authority, early) as rig:
        client = await rig.connect()
        await client.send(post(CHAT, chat()))
        await client.head()
        assert await client.reader.readexactly(size) == b"a" * size
        (exchange,) = rig.handler.live
        exchange.pause()
        halted.set()
        await ended.wait()
        for _ in range(50):  # turns in which the end could be seen
            await asyncio.sleep(0)
        exchange.resume()
        assert await client.reader.readexactly(size) == b"b" * size
        await rig.settled()
        assert rig.outcomes() == {"ok": 1}


async def test_a_backend_that_never_shakes_hands_is_given_up_and_its_socket_closed(
    tmp_path: Path, authority: Authority
) -> None:
    async with before_tls(tmp_path, authority, more="timeouts: {connect_s: 0.2}\n") as rig:
        gone = asyncio.Event()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(65536):
                pass
            gone.set()
            writer.close()

        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        (upstream,) = rig.app._upstreams.all()
        port = server.sockets[0].getsockname()[1]
        upstream.pool.origin = type(upstream.pool.origin)("127.0.0.1", port, tls=True)
        answer = await ask(rig)
        assert (answer.status, answer.code) == (502, "upstream_error")
        await gone.wait()
        server.close()
        assert rig.metric("gateway_upstream_attempts_total", result="connect_failed") == 1


async def test_a_request_to_a_connection_closed_meanwhile_is_sent_again(
    tmp_path: Path, authority: Authority
) -> None:
    async with before_tls(tmp_path, authority) as rig:
        assert (await ask(rig)).status == 200
        (upstream,) = rig.app._upstreams.all()
        (pooled,) = upstream.pool._idle
        pooled.transport.close()  # as by the backend's goodbye, not yet told to the pool
        assert (await ask(rig)).status == 200
        assert rig.outcomes() == {"ok": 2}
