"""TLS on the data listener: handshakes, certificates, their renewal, and the ends of connections."""

import asyncio
import datetime as dt
import logging
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway import tasks
from tests.integration.rig import (
    HEAD_SSE,
    Conn,
    Received,
    Script,
    chat,
    chat_event,
    closed,
    eventually,
    get,
    ok_chat,
    post,
)
from tests.integration.scripts import CHAT, PLAIN, STREAM, Endless, Gate, finished, streaming
from tests.integration.tls_rig import (
    HOST,
    Authority,
    TlsRig,
    backends_of,
    client_context,
    listening,
    tls_gateway,
    towards,
)

MIB = 1024 * 1024


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def secure(
    tmp_path: Path,
    authority: Authority,
    *scripts: Script,
    clients: Authority | None = None,
    more: str = "",
    days: int = 1,
) -> AsyncIterator[TlsRig]:
    """Run a gateway under TLS whose certificate `authority` has made, before plain backends."""
    cert = authority.issue("server", days=days)
    context = client_context(authority)
    async with (
        backends_of(*scripts or (ok_chat,)) as backends,
        tls_gateway(
            tmp_path / "g.yaml",
            listening(cert, clients),
            towards(backends),
            more,
            context=context,
            backends=backends,
        ) as rig,
    ):
        yield rig


def handshakes(rig: TlsRig, result: str) -> float:
    return rig.metric("gateway_tls_handshakes_total", result=result)


async def test_the_sdks_speak_to_it_over_https(tmp_path: Path, authority: Authority) -> None:
    async with secure(tmp_path, authority) as rig:
        assert rig.app.url.startswith("https://")
        http: Any = openai.DefaultAsyncHttpxClient(verify=client_context(authority))
        async with openai.AsyncOpenAI(
            base_url=f"{rig.app.url}/v1", api_key="k", http_client=http, max_retries=0
        ) as client:
            body: Any = chat()
            whole = await client.chat.completions.create(**body)
            assert whole.choices[0].message.content == "ab"
            stream = await client.chat.completions.create(**body, stream=True)
            text = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert text == ["a", "b"]
        assert rig.outcomes() == {"ok": 2}
        assert handshakes(rig, "ok") >= 1
        assert handshakes(rig, "failed") == 0


async def test_the_anthropic_sdk_gets_its_errors_over_https(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        http: Any = anthropic.DefaultAsyncHttpxClient(verify=client_context(authority))
        async with anthropic.AsyncAnthropic(
            base_url=rig.app.url, api_key="k", http_client=http, max_retries=0
        ) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(
                    model="none", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
                )


def blocking_handshake(rig: TlsRig) -> None:
    """Shake hands as blocking clients do: asyncio's send no alert when they refuse."""
    assert rig.context is not None
    with (
        socket.create_connection((HOST, rig.port), timeout=20) as sock,
        rig.context.wrap_socket(sock, server_hostname=HOST),
    ):
        pass


async def test_a_client_that_believes_another_authority_is_counted(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path, "other")
    async with secure(tmp_path, authority) as rig:
        rig.context = client_context(other)
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            await asyncio.to_thread(blocking_handshake, rig)
        await eventually(lambda: handshakes(rig, "refused_by_client") == 1, 20)
        rig.context = client_context(authority)
        assert (await rig.ask(PLAIN)).status == 200


async def test_a_client_sees_that_the_certificate_has_expired(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority, days=-1) as rig:
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            await asyncio.to_thread(blocking_handshake, rig)
        await eventually(lambda: handshakes(rig, "refused_by_client") == 1, 20)


async def test_when_the_certificate_ends_is_a_metric_and_a_reload_does_not_take_one_that_has(
    tmp_path: Path, authority: Authority
) -> None:
    name = "gateway_tls_certificate_expiry_timestamp_seconds"
    async with secure(tmp_path, authority) as rig:
        old, ends = serial(await rig.connect()), rig.metric(name, side="listener")
        assert 0 < ends - dt.datetime.now(dt.UTC).timestamp() <= 86_400
        authority.issue("server", days=-1)
        result = await rig.app.reload()
        assert not result.ok
        assert "listen.tls: cert: " in result.problems[0]
        assert "the certificate expired on " in result.problems[0]
        assert serial(await rig.connect()) == old
        authority.issue("server", days=2)
        assert (await rig.app.reload()).ok
        assert rig.metric(name, side="listener") > ends + 43_200


async def test_without_its_certificate_a_client_is_told_that_one_is_wanted(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with secure(tmp_path, authority, clients=authority) as rig:
        assert await asyncio.to_thread(blocking_alert, rig, None) == (
            "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        )
        assert handshakes(rig, "client_certificate") == 1
        assert "peer did not return a certificate" in caplog.text
        rig.context = client_context(authority, authority.issue("client", "someone"))
        assert (await rig.ask(PLAIN)).status == 200
        assert len(rig.backends[0].received) == 1


async def test_another_authoritys_client_certificate_is_refused(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path, "other")
    stranger = other.issue("stranger", "someone")
    async with secure(tmp_path, authority, clients=authority) as rig:
        found = await asyncio.to_thread(blocking_alert, rig, stranger)
        assert found == "TLSV1_ALERT_UNKNOWN_CA"
        assert handshakes(rig, "client_certificate") == 1


def blocking_alert(rig: TlsRig, cert: Path | None) -> str:
    """Return the alert that a plain blocking client gets: asyncio's hides it behind a reset."""
    context = rig.context
    assert context is not None
    if cert is not None:
        context.load_cert_chain(cert)
    with socket.create_connection((HOST, rig.port), timeout=20) as sock:
        try:
            with context.wrap_socket(sock, server_hostname=HOST) as wrapped:
                wrapped.sendall(get("/healthz"))
                return f"an answer: {wrapped.recv(1)!r}"
        except ssl.SSLError as error:
            return str(error.reason)


async def test_plain_http_is_told_that_this_port_wants_tls(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        rig.context = None
        answer = await rig.ask(PLAIN)
        assert answer.status == 400
        assert "https" in answer.json["error"]["message"]
        assert handshakes(rig, "plaintext") == 1


async def test_tls_1_1_is_refused(tmp_path: Path, authority: Authority) -> None:
    async with secure(tmp_path, authority) as rig:
        context = client_context(authority)
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        rig.context = context
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            await asyncio.to_thread(blocking_handshake, rig)
        assert handshakes(rig, "failed") == 1


async def test_http_1_1_is_chosen_where_http_2_is_offered(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        assert rig.context is not None
        rig.context.set_alpn_protocols(["h2", "http/1.1"])
        client = await rig.connect()
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


def serial(client: Any) -> str:
    return str(client.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])


async def test_a_new_certificate_serves_new_connections_while_a_stream_goes_on(
    tmp_path: Path, authority: Authority
) -> None:
    gate = Gate()
    async with secure(tmp_path, authority, gate) as rig:
        stream = await streaming(rig)
        assert b'"a"' in await stream.chunk()
        old = serial(stream)
        authority.issue("server")
        await rig.app.renew_certificates()
        fresh = await rig.connect()
        assert serial(fresh) != old
        gate.open.set()
        assert b'"b"' in b"".join(await finished(stream))
        await fresh.send(STREAM)
        assert (await fresh.answer()).status == 200
        assert rig.metric("gateway_tls_certificate_loads_total", result="ok") == 1
        assert rig.outcomes() == {"ok": 2}


async def test_changed_files_are_seen_without_being_told(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app._CERTIFICATES_S", 0.02)
    async with secure(tmp_path, authority) as rig:
        old = serial(await rig.connect())
        authority.issue("server")
        await eventually(
            lambda: rig.metric("gateway_tls_certificate_loads_total", result="ok") >= 1, 20
        )
        await eventually(lambda: not rig.app._reloading.locked(), 20)
        assert serial(await rig.connect()) != old


async def test_unusable_files_keep_the_old_certificate_and_are_told_once(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixgate")
    async with secure(tmp_path, authority) as rig:
        old = serial(await rig.connect())
        path = tmp_path / "server.pem"
        path.write_text("rubbish")
        await rig.app.renew_certificates()
        await rig.app.renew_certificates()
        assert serial(await rig.connect()) == old
        assert rig.metric("gateway_tls_certificate_loads_total", result="failed") == 1
        said = [r.message for r in caplog.records if "stays in force" in r.message]
        assert len(said) == 1
        assert str(path) in said[0]
        path.unlink()
        await rig.app.renew_certificates()
        assert serial(await rig.connect()) == old
        authority.issue("server")
        await rig.app.renew_certificates()
        assert serial(await rig.connect()) != old


async def test_a_reload_with_unusable_files_changes_nothing_and_says_why(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        old = serial(await rig.connect())
        key = tmp_path / "key.pem"
        key.write_text(Authority(tmp_path, "third").issue("alien").read_text())
        config = tmp_path / "g.yaml"
        good = config.read_text()
        config.write_text(good.replace('server.pem"', f'server.pem","key":"{key}"'))
        result = await rig.app.reload()
        assert not result.ok
        assert "the key is not this certificate's" in result.problems[0]
        assert serial(await rig.connect()) == old
        assert rig.metric("gateway_reloads_total", result="failed") == 1


async def test_a_reload_takes_tls_off_and_puts_it_on_again(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        config, context, port = tmp_path / "g.yaml", rig.context, rig.port
        secured = config.read_text()
        config.write_text(secured.partition("\n")[2])
        assert (await rig.app.reload()).ok
        rig.context = None
        assert (await rig.ask(PLAIN)).status == 200
        config.write_text(secured)
        assert (await rig.app.reload()).ok
        rig.context = context
        assert (await rig.ask(PLAIN)).status == 200
        assert rig.port == port


async def test_a_reader_that_stops_holds_the_backend_back(
    tmp_path: Path, authority: Authority
) -> None:
    written = 0
    stuck = asyncio.Event()

    async def endless(conn: Conn, _: Received) -> None:
        nonlocal written
        await conn.write(HEAD_SSE)
        event = chat_event("x" * 60_000)
        for _count in range(200 * MIB // len(event)):
            try:
                async with asyncio.timeout(1.0):
                    await conn.chunk(event)
            except TimeoutError:
                stuck.set()
                await conn.gone()
                return
            written += len(event)

    async with secure(tmp_path, authority, endless) as rig:
        client = await rig.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(STREAM)
        await stuck.wait()
        assert written < 32 * MIB
        held = sum(connection.unsent() for connection in rig.app._listener.connections)
        assert held < 16 * MIB
        client.writer.transport.abort()
        await rig.settled()
        assert rig.outcomes() == {"client_closed": 1}


async def test_stopping_delivers_over_tls_what_a_slow_client_has_not_read(
    tmp_path: Path, authority: Authority
) -> None:
    size = 60_000  # more than the sockets take, less than makes the transport below say so

    async def big(conn: Conn, _: Received) -> None:
        await conn.json(b'"' + b"x" * size + b'"')

    async with secure(tmp_path, authority, big) as rig:
        rig.app._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        client = await rig.connect(receive_bytes=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.transport.set_read_buffer_limits(high=0)  # type: ignore[attr-defined]
        await client.send(PLAIN)
        await eventually(lambda: rig.outcomes() == {"ok": 1}, 20)
        (connection,) = rig.app._listener.connections
        assert connection.transport.get_write_buffer_size() == 0
        assert connection.unsent() > 0
        stopping = tasks.spawn(rig.app.stop(), name="stop")
        await eventually(connection.transport.is_closing, 20)
        client.writer.transport.set_read_buffer_limits()  # type: ignore[attr-defined]
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert len(answer.body) == size + 2
        await stopping


async def test_a_last_answer_is_whole_before_the_goodbye(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority) as rig:
        client = await rig.connect()
        await client.send(post(CHAT, chat(), "Connection: close"))
        assert (await client.answer()).status == 200
        assert await client.at_eof()
        await closed(client.writer)
        await eventually(lambda: not rig.app._listener.connections, 20)


async def test_a_body_over_the_limit_is_answered_before_the_goodbye(
    tmp_path: Path, authority: Authority
) -> None:
    async with secure(tmp_path, authority, more="limits: {body_mib: 1}\n") as rig:
        client = await rig.connect()
        await client.send(post(CHAT, b"x" * (2 * MIB)))
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")
        await closed(client.writer)
        await eventually(lambda: not rig.app._listener.connections, 20)


async def test_a_client_that_says_goodbye_stops_its_request(
    tmp_path: Path, authority: Authority
) -> None:
    script = Endless()
    async with secure(tmp_path, authority, script) as rig:
        client = await streaming(rig)
        client.close()
        await script.left.wait()
        await rig.settled()
        assert rig.outcomes() == {"client_closed": 1}


async def test_a_client_cut_without_goodbye_stops_its_request(
    tmp_path: Path, authority: Authority
) -> None:
    script = Endless()
    async with secure(tmp_path, authority, script) as rig:
        client = await streaming(rig)
        client.writer.transport.abort()
        await script.left.wait()
        await rig.settled()
        assert rig.outcomes() == {"client_closed": 1}


async def test_a_handshake_that_does_not_go_on_is_cut(tmp_path: Path, authority: Authority) -> None:
    async with secure(tmp_path, authority, more="timeouts: {header_s: 0.2}\n") as rig:
        reader, writer = await asyncio.open_connection(HOST, rig.port)
        assert await reader.read() == b""
        await closed(writer)
        assert (await rig.ask(PLAIN)).status == 200
