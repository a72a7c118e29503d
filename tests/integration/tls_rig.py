"""Certificates made on the fly, scripted backends under TLS, and a gateway between."""

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import trustme

from tests.integration.rig import Backend, Client, Rig, Script, gateway, ok_chat

HOST = "127.0.0.1"
_TEST_S = 20.0


class Authority:
    """A certificate authority with its files in a directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str, *hosts: str, days: int = 1) -> Path:
        """Write a chain with its key to one PEM file, valid until `days` from now."""
        until = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
        since = until - dt.timedelta(days=3)
        issued = self._ca.issue_cert(*(hosts or (HOST,)), not_before=since, not_after=until)
        path = self._directory / f"{name}.pem"
        path.unlink(missing_ok=True)
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        return path


def client_context(authority: Authority, cert: Path | None = None) -> ssl.SSLContext:
    """Return a client's context that believes `authority` alone."""
    context = ssl.create_default_context(cafile=str(authority.path))
    if cert is not None:
        context.load_cert_chain(cert)
    return context


def server_context(cert: Path, clients: Authority | None = None) -> ssl.SSLContext:
    """Return a backend's context."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert)
    if clients is not None:
        context.load_verify_locations(clients.path)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass
class TlsBackend(Backend):
    """A scripted backend under TLS; `names` are those its clients asked for."""

    context: ssl.SSLContext = field(kw_only=True)
    names: list[str | None] = field(default_factory=list)

    async def start(self) -> "TlsBackend":
        self._tasks: set[asyncio.Task[None]] = set()
        self.conns = set()
        self.context.sni_callback = lambda _sock, name, _context: self.names.append(name)
        self._server = await asyncio.start_server(
            self._connected, HOST, self.port, ssl=self.context
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"


@dataclass
class TlsRig(Rig):
    """A rig whose gateway's port speaks TLS."""

    context: ssl.SSLContext | None = None

    async def connect(self, receive_bytes: int | None = None) -> Client:
        """Connect; `receive_bytes` bounds what the client's system takes unread."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, self.port))
        how: dict[str, Any] = {"sock": sock, "limit": 1 << 26}
        if self.context is not None:
            how |= {"ssl": self.context, "server_hostname": HOST, "ssl_shutdown_timeout": 0.5}
        streams = await asyncio.open_connection(**how)
        client = Client(*streams)
        self.clients.append(client)
        return client


def listening(cert: Path, clients: Authority | None = None, key: Path | None = None) -> str:
    """Return the configuration of a listener under TLS."""
    tls = {"cert": str(cert)}
    tls |= {} if clients is None else {"client_ca": str(clients.path)}
    tls |= {} if key is None else {"key": str(key)}
    return f"listen: {orjson.dumps({'port': 0, 'tls': tls}).decode()}\n"


def towards(backends: list[Backend], **tls: Any) -> str:
    """Return the configuration of backends a, b, ..., all with the same `tls`."""
    rows: list[dict[str, Any]] = [
        {"name": chr(ord("a") + number), "url": backend.url}
        for number, backend in enumerate(backends)
    ]
    for row in rows if tls else ():
        row["tls"] = tls
    return f"backends: {orjson.dumps(rows).decode()}\n"


@contextlib.asynccontextmanager
async def tls_gateway(
    file: Path, *parts: str, context: ssl.SSLContext | None = None, backends: list[Backend]
) -> AsyncIterator[TlsRig]:
    """Run a gateway with the configuration `parts`; `context` is that of the rig's clients."""
    file.write_text("".join(parts))  # noqa: ASYNC240 - a test's
    async with gateway([], (), str(file), None) as plain, asyncio.timeout(_TEST_S):
        yield TlsRig(plain.app, backends, plain.clients, context)


@contextlib.asynccontextmanager
async def backends_of(*scripts: Script) -> AsyncIterator[list[Backend]]:
    """Run plain backends, one per script."""
    async with stopping([await Backend(script).start() for script in scripts or (ok_chat,)]) as run:
        yield run


@contextlib.asynccontextmanager
async def tls_backends(context: ssl.SSLContext, *scripts: Script) -> AsyncIterator[list[Backend]]:
    """Run backends under TLS, one per script."""
    made: list[Backend] = [
        await TlsBackend(script, context=context).start() for script in scripts or (ok_chat,)
    ]
    async with stopping(made) as run:
        yield run


@contextlib.asynccontextmanager
async def stopping(backends: list[Backend]) -> AsyncIterator[list[Backend]]:
    """Stop backends in the end; a script's failure is the test's."""
    try:
        yield backends
    finally:
        for backend in backends:
            await backend.stop()
    failures = [failure for backend in backends for failure in backend.failures]
    assert not failures, failures
