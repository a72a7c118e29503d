"""When there are no more open files to be had: refusal, recovery, no spinning, no blame."""

import asyncio
import contextlib
import errno
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

import pytest

from tests.integration.rig import (
    DONE,
    Client,
    closed,
    eventually,
    get,
    ok_chat,
    running,
)
from tests.integration.scripts import PLAIN, STREAM, Gate, finished
from tests.integration.serve_rig import WAIT_S, Served, scripted, served

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="prlimit and /proc are Linux's")


def cpu_s(gateway: Served) -> float:
    """Processor seconds the process has used."""
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def spent(gateway: Served) -> float:
    """Return the part of a processor that is used while nothing is asked for some time."""
    before, began = cpu_s(gateway), monotonic()
    await asyncio.sleep(1.0)
    return (cpu_s(gateway) - before) / (monotonic() - began)


async def told(gateway: Served, text: str) -> None:
    """Wait until the process has logged something."""
    await eventually(lambda: any(text in line for line in gateway.log), WAIT_S)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await true():
            pass


@LINUX
async def test_without_any_descriptor_it_does_not_spin_and_comes_back() -> None:
    """The system's own limit, met at accept: what our own limit on clients is to prevent."""
    async with scripted() as backends, served(backends=backends) as gateway:
        assert (await gateway.ask(PLAIN)).status == 200
        idle = await spent(gateway)
        pid = gateway.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        clients = [await gateway.connect() for _ in range(50)]
        await told(gateway, "no descriptor is left")
        assert await spent(gateway) < idle + 0.2
        for client in clients:
            await closed(client.writer)
        gateway.clients.clear()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))

        async def serves() -> bool:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return (await gateway.ask(PLAIN)).status == 200
            return False

        await until(serves)
        await told(gateway, "there are descriptors again")


@LINUX
async def test_with_few_descriptors_clients_are_refused_and_nothing_else_suffers() -> None:
    gate = Gate()
    few = ("sh", "-c", 'ulimit -n 80 && exec "$@"', "sh")
    async with scripted(gate) as backends, served(backends=backends, prefix=few) as gateway:
        idle = await spent(gateway)
        streams: list[Client] = []
        refused = 0
        for _ in range(60):
            client = await gateway.connect()
            with contextlib.suppress(OSError):
                await client.send(STREAM)
            try:
                answer = await client.head()
            except (OSError, asyncio.IncompleteReadError):
                refused += 1  # a flood: not even told
                continue
            if answer.status == 200:
                streams.append(client)
            else:
                assert (await client.body(answer)).code == "overloaded"
                assert answer.header("retry-after")
                refused += 1
        assert len(streams) >= 5
        assert refused >= 20
        assert await spent(gateway) < idle + 0.5
        assert (await gateway.ask(get("/readyz"), gateway.admin)).status == 200
        gate.open.set()
        for stream in streams:
            assert DONE in await finished(stream)
            await closed(stream.writer)

        async def serves() -> bool:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return (await gateway.ask(STREAM)).status == 200
            return False

        await until(serves)


async def test_a_request_beyond_the_most_connections_is_told_and_the_next_after_one_left_served() -> (
    None
):
    async with running() as rig:
        rig.app._listener.limit(4)
        kept = [await rig.connect() for _ in range(4)]
        await eventually(lambda: len(rig.app._listener.connections) == 4)
        more = await rig.connect()
        answer = await more.answer()
        assert (answer.status, answer.code) == (503, "overloaded")
        assert (answer.header("connection"), await more.at_eof()) == ("close", True)
        await closed(more.writer)
        kept[0].close()
        await eventually(lambda: len(rig.app._listener.connections) < 4)
        assert (await rig.ask(PLAIN)).status == 200


async def test_a_crowd_keeps_no_connection_it_does_not_need() -> None:
    async with running() as rig:
        rig.app._listener.limit(4)
        three = [await rig.connect() for _ in range(3)]
        await three[0].send(PLAIN)
        assert (await three[0].answer()).header("connection") != "close"
        fourth = await rig.connect()
        await fourth.send(PLAIN)
        assert (await fourth.answer()).header("connection") == "close"
        assert await fourth.at_eof()
        await eventually(lambda: not rig.app._listener.crowded)
        await three[0].send(PLAIN)
        assert (await three[0].answer()).header("connection") != "close"


async def test_what_has_been_idle_longest_makes_room() -> None:
    async with running() as rig:
        clients = [await rig.connect() for _ in range(4)]
        for client in clients:
            await client.send(PLAIN)
            assert (await client.answer()).status == 200
        port = clients[0].writer.get_extra_info("sockname")[1]
        for connection in rig.app._listener.connections:
            if connection.transport.get_extra_info("peername")[1] == port:
                connection.deadline -= 10.0  # the loop's clock has milliseconds: they would tie
        rig.app._listener.limit(4)
        assert await clients[0].at_eof()
        await eventually(lambda: not rig.app._listener.crowded)
        for client in clients[1:]:
            await client.send(PLAIN)
            assert (await client.answer()).status == 200


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_no_socket_for_a_backend_is_our_shortage_not_its_fault(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with running(ok_chat, ok_chat) as rig:
        for upstream in rig.app._upstreams.all():

            async def none(_: float) -> None:
                raise OSError(code, "none left")

            monkeypatch.setattr(type(upstream.pool), "connect", lambda _pool, wait: none(wait))
        for _ in range(10):
            answer = await rig.ask(PLAIN)
            assert (answer.status, answer.code) == (503, "overloaded")
            assert answer.header("retry-after")
        monkeypatch.undo()
        assert all(row.breaker.calm for row in rig.app.dispatcher._fleet.by_name.values())
        assert rig.metric("gateway_upstream_attempts_total", result="connect_failed") == 0
        assert (await rig.ask(PLAIN)).status == 200
        await rig.at_rest()
