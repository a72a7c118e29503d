"""What the discovery tests share: a scripted name server and a scripted Kubernetes API server."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import orjson
from aiohttp import web

SRV = "_http._tcp.v.internal."
PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


class NameServer(asyncio.DatagramProtocol):
    """Answers with what `records` has by (name, type): texts of records, or an rcode."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str] | int] = {}
        self.port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        found = self.records.get((name, kind), dns.rcode.NXDOMAIN)
        if isinstance(found, int):
            answer.set_rcode(dns.rcode.Rcode(found))
        elif found:
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", kind, *found))
        self._transport.sendto(answer.to_wire(), addr)

    def has(self, name: str, *addresses: str) -> None:
        """Set all the addresses of a name."""
        self.records[name, "A"] = [one for one in addresses if ":" not in one]
        self.records[name, "AAAA"] = [one for one in addresses if ":" in one]

    def lacks(self, name: str) -> None:
        for key in [key for key in self.records if key[0] == name]:
            del self.records[key]


@asynccontextmanager
async def naming() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    try:
        yield protocol
    finally:
        transport.close()


def slice_of(name: str, *pods: str, version: int = 1, ports: Any = None) -> dict[str, Any]:
    """Return a slice whose pods are `NAME=ADDRESS` or, not ready, `NAME!ADDRESS`."""
    endpoints = []
    for pod in pods:
        ready = "=" in pod
        who, _, address = pod.partition("=" if ready else "!")
        target = {"kind": "Pod", "name": who, "uid": who}
        conditions = {"ready": ready, "serving": ready, "terminating": False}
        endpoints.append({"addresses": [address], "conditions": conditions, "targetRef": target})
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports or [{"name": "http", "port": 8000}],
    }


def event(kind: str, item: dict[str, Any]) -> bytes:
    return orjson.dumps({"type": kind, "object": item}) + b"\n"


class Hangup(Exception):
    """Ends a watch's connection in the middle."""


@dataclass
class ApiServer:
    """Lists `slices`; a watch gets what is put into `events`: bytes, None = its end, Hangup."""

    slices: list[dict[str, Any]] = field(default_factory=list)
    version: int = 100
    page: int = 500
    status: int = 200
    refused: set[str] = field(default_factory=set)
    lists: list[dict[str, str]] = field(default_factory=list)
    watches: list[dict[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    events: "asyncio.Queue[bytes | Hangup | None]" = field(default_factory=asyncio.Queue)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    url: str = ""

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(condition)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        watching = "watch" in request.query
        self.tokens.append(request.headers.get("authorization"))
        self.namespaces.append(request.match_info["namespace"])
        (self.watches if watching else self.lists).append(dict(request.query))
        async with self.changed:
            self.changed.notify_all()
        if self.status != 200:
            return web.json_response({"kind": "Status"}, status=self.status)
        if watching and request.query["resourceVersion"] in self.refused:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        return await self._watch(request) if watching else self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        begin = int(request.query.get("continue", "0"))
        meta = {"resourceVersion": str(self.version)}
        if begin + self.page < len(self.slices):
            meta["continue"] = str(begin + self.page)
        items = self.slices[begin : begin + self.page]
        return web.json_response(
            body=None, text=orjson.dumps({"metadata": meta, "items": items}).decode()
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (told := await self.events.get()) is not None:
            if isinstance(told, Hangup):
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(told)
        return response


@asynccontextmanager
async def serving(api: ApiServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_get(PATH, api.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    scheme = "http" if tls is None else "https"
    api.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
