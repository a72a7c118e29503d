"""Names: A, AAAA and SRV records from a scripted name server over UDP on loopback."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.rcode
import pytest

from gateway.config.discovery import DiscoveryConfig
from gateway.config.groups import Members
from gateway.config.schema import BackendConfig
from gateway.discovery.names import DnsSource, Resolver, Services, SrvSource, Unknown
from gateway.discovery.source import Source
from tests.integration.discovery_rig import SRV, NameServer, naming


class Ear:
    """Who listens to a source; `next` is what it says next."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[list[str | None] | str] = asyncio.Queue()

    def found(self, members: Members) -> None:
        self.said.put_nowait([member.url for member in members])

    def failed(self, reason: str) -> None:
        self.said.put_nowait(reason)

    async def until(self, wanted: list[str] | str) -> None:
        """Wait until it says this; text is looked for in a failure's reason."""
        async with asyncio.timeout(60):
            while True:
                said = await self.said.get()
                if said == wanted or (isinstance(wanted, str) and wanted in said):
                    return


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with naming() as server:
        yield server


def _resolver(server: NameServer, **settings: Any) -> Resolver:
    config = DiscoveryConfig(nameservers=[f"127.0.0.1:{server.port}"], **settings)
    return Resolver(lambda: config)


def _settings() -> DiscoveryConfig:
    return DiscoveryConfig(interval_s=0.05)


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Ear]:
    ear = Ear()
    task = asyncio.ensure_future(source.follow(ear))
    try:
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_a_and_aaaa_record_is_an_address(server: NameServer) -> None:
    server.has("v.internal.", "10.0.0.2", "10.0.0.1", "fd00::1")

    assert await _resolver(server).addresses("v.internal") == ["10.0.0.1", "10.0.0.2", "fd00::1"]


@pytest.mark.parametrize(("family", "kept"), [("ipv4", ["10.0.0.1"]), ("ipv6", ["fd00::1"])])
async def test_one_family_can_be_asked_for(
    server: NameServer, family: str, kept: list[str]
) -> None:
    server.has("v.internal.", "10.0.0.1", "fd00::1")

    assert await _resolver(server, family=family).addresses("v.internal") == kept


async def test_the_system_s_resolver_needs_no_extra() -> None:
    resolver = Resolver(lambda: DiscoveryConfig(family="ipv4"))

    assert await resolver.addresses("localhost") == ["127.0.0.1"]
    with pytest.raises(Unknown, match="cannot resolve"):
        await resolver.addresses("x" * 300)


@pytest.mark.parametrize("rcode", [dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL])
async def test_a_name_nobody_knows_is_a_failure_that_says_so(
    server: NameServer, rcode: int
) -> None:
    for kind in ("A", "AAAA", "SRV"):
        server.records["v.internal.", kind] = rcode
    resolver = _resolver(server)

    with pytest.raises(Unknown, match=r"cannot resolve v\.internal: "):
        await resolver.addresses("v.internal")
    with pytest.raises(Unknown, match=r"cannot resolve v\.internal: "):
        await resolver.services("v.internal")


@pytest.mark.parametrize(("weights", "weighted"), [((60, 40), True), ((60, 60), False)])
async def test_targets_are_grouped_by_priority_the_best_first(
    weights: tuple[int, int], weighted: bool, server: NameServer
) -> None:
    server.records[SRV, "SRV"] = [
        "20 0 8000 spare.v.internal.",
        f"10 {weights[0]} 8001 b.v.internal.",
        f"10 {weights[1]} 8000 a.v.internal.",
    ]
    services = await _resolver(server).services(SRV)

    best = [("a.v.internal", 8000), ("b.v.internal", 8001)]
    assert services == Services([best, [("spare.v.internal", 8000)]], weighted)


async def test_the_best_priority_is_taken_alone_and_the_next_only_while_it_has_nobody(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "radixgate.discovery")
    server.records[SRV, "SRV"] = ["10 60 1 a.v.internal.", "10 40 2 b.v.internal.", "20 0 3 spare."]
    server.has("spare.", "10.0.0.9")
    source = SrvSource(
        BackendConfig(name="pool", srv=SRV), _resolver(server), _settings, random.Random(1)
    )
    async with following(source) as ear:
        await ear.until(["http://10.0.0.9:3"])
        server.has("b.v.internal.", "10.0.0.2")
        await ear.until(["http://10.0.0.2:2"])
        server.lacks("b.v.internal.")  # it keeps what it had: name servers restart
        server.has("a.v.internal.", "10.0.0.1")
        await ear.until(["http://10.0.0.1:1", "http://10.0.0.2:2"])
        server.records[SRV, "SRV"] = ["20 0 3 spare."]
        await ear.until(["http://10.0.0.9:3"])

    assert caplog.messages == [
        f"the weights of {SRV} are not used: what each backend can take is measured",
        f"no target of the best priority of {SRV} has a known address: the next is used",
    ]


async def test_a_root_target_says_that_there_is_no_service(server: NameServer) -> None:
    server.records[SRV, "SRV"] = ["0 0 0 ."]

    assert await _resolver(server).services(SRV) == Services([])


async def test_a_dns_source_follows_the_addresses_and_tells_failures(server: NameServer) -> None:
    server.has("v.internal.", "10.0.0.1")
    listing = BackendConfig(name="pool", dns="v.internal", port=8000)
    source = DnsSource(listing, _resolver(server), _settings, random.Random(1))
    async with following(source) as ear:
        await ear.until(["http://10.0.0.1:8000"])
        server.has("v.internal.", "10.0.0.2", "fd00::2")
        await ear.until(["http://10.0.0.2:8000", "http://[fd00::2]:8000"])
        server.lacks("v.internal.")
        await ear.until("cannot resolve v.internal")
        server.has("v.internal.", "10.0.0.2")
        await ear.until(["http://10.0.0.2:8000"])


async def test_an_srv_source_has_every_address_of_every_target(server: NameServer) -> None:
    server.records[SRV, "SRV"] = ["0 0 8000 a.v.internal.", "0 0 8001 b.v.internal."]
    server.has("a.v.internal.", "10.0.0.1", "10.0.0.2")
    server.has("b.v.internal.", "fd00::1")
    source = SrvSource(
        BackendConfig(name="pool", srv=SRV), _resolver(server), _settings, random.Random(1)
    )
    everything = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8001"]
    async with following(source) as ear:
        await ear.until(everything)
        server.has("a.v.internal.", "10.0.0.3")  # it moved
        await ear.until(["http://10.0.0.3:8000", "http://[fd00::1]:8001"])
        server.records[SRV, "SRV"] = ["0 0 8001 b.v.internal."]
        await ear.until(["http://[fd00::1]:8001"])


async def test_a_target_whose_address_is_not_known_now_keeps_what_it_had(
    server: NameServer,
) -> None:
    server.records[SRV, "SRV"] = ["0 0 8000 a.v.internal.", "0 0 8000 b.v.internal."]
    server.has("a.v.internal.", "10.0.0.1")
    source = SrvSource(
        BackendConfig(name="pool", srv=SRV), _resolver(server), _settings, random.Random(1)
    )
    async with following(source) as ear:
        await ear.until(["http://10.0.0.1:8000"])  # b has none yet
        server.has("b.v.internal.", "10.0.0.2")
        await ear.until(["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
        server.lacks("a.v.internal.")
        server.has("b.v.internal.", "10.0.0.3")
        await ear.until(["http://10.0.0.1:8000", "http://10.0.0.3:8000"])


async def test_targets_without_any_address_are_a_failure(server: NameServer) -> None:
    server.records[SRV, "SRV"] = ["0 0 8000 a.v.internal."]
    source = SrvSource(
        BackendConfig(name="pool", srv=SRV), _resolver(server), _settings, random.Random(1)
    )
    async with following(source) as ear:
        await ear.until("no target of _http._tcp.v.internal. has a known address")
