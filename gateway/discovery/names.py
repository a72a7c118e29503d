"""Backends behind DNS names: every address of one, or every target of an SRV name.

A name that is not known at the moment is a failure and no empty list: name servers restart, and the
health probes know better which backends are there. Must never block the loop on a look-up.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.config.forms import split_address
from gateway.config.groups import Members
from gateway.config.schema import BackendConfig
from gateway.discovery.source import Settings, Told, pause
from gateway.extras import load_dns

_log = logging.getLogger("radixgate.discovery")
_FAMILIES = {"any": socket.AF_UNSPEC, "ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
_LOOKUP_S = 5.0  # as long as a resolver waits for one server by custom
_AT_ONCE = 16
_DNS_PORT = 53


class Unknown(Exception):
    """A look-up that gave nothing; the message says of what and why."""


Target = tuple[str, int]
"""Host and port."""


@dataclass(slots=True, frozen=True)
class Services:
    """The targets of an SRV name: groups of one priority each, the best (lowest) first.

    `weighted` = in some group, one is to take more than another.
    """

    groups: list[list[Target]]
    weighted: bool = False


class Resolver:
    """Looks names up as the settings say: by the system, or by the name servers they list."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def addresses(self, name: str) -> list[str]:
        """Return every address of a host name, sorted.

        Raises:
            Unknown: there is none, or nobody says.
        """
        family = _FAMILIES[self._settings().family]
        if not self._settings().nameservers:
            return await _by_system(name, family)
        _, resolver = await self._asker()
        found = await _asked(name, resolver.resolve_name(name, family=family, lifetime=_LOOKUP_S))
        return sorted(set(found.addresses()))

    async def services(self, name: str) -> Services:
        """Return the targets of an SRV name.

        Raises:
            Unknown: there is none, or nobody says.
        """
        resolve, resolver = await self._asker()
        looking = resolver.resolve(name, resolve.rdatatype.SRV, search=True, lifetime=_LOOKUP_S)
        groups: dict[int, dict[Target, int]] = {}
        for record in await _asked(name, looking):
            host = record.target.to_text(omit_final_dot=True)
            if host not in ("", "."):  # "decidedly not available at this domain" (RFC 2782)
                groups.setdefault(record.priority, {})[host, record.port] = record.weight
        weighted = any(len(set(group.values())) > 1 for group in groups.values())
        return Services([sorted(groups[priority]) for priority in sorted(groups)], weighted)

    async def _asker(self) -> tuple[Any, Any]:
        """Return dnspython and a resolver of it; the system's settings may have changed."""
        return await asyncio.to_thread(_resolver, self._settings().nameservers)


def _resolver(nameservers: Iterable[str]) -> tuple[Any, Any]:
    dns = load_dns("`srv` and `discovery.nameservers`")
    listed = [split_address(server) for server in nameservers]
    try:
        resolver = dns.asyncresolver.Resolver(configure=not listed)
    except dns.exception.DNSException as error:
        raise Unknown(f"the system names no name server: {error}") from error
    if listed:
        resolver.nameservers = [
            dns.nameserver.Do53Nameserver(server[0], server[1] or _DNS_PORT)
            for server in listed
            if server is not None
        ]
    return dns, resolver


async def _asked(name: str, answer: Any) -> Any:
    """Wait for an answer; whatever goes wrong with it is Unknown."""
    dns = load_dns("`srv` and `discovery.nameservers`")
    try:
        return await answer
    except dns.exception.Timeout as error:  # its text differs every time
        raise Unknown(f"cannot resolve {name}: no answer") from error
    except (dns.exception.DNSException, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise Unknown(f"cannot resolve {name}: {said or type(error).__name__}") from error


async def _by_system(name: str, family: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(2 * _LOOKUP_S):
            infos = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM, family=family)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise Unknown(f"cannot resolve {name}: {str(error) or 'no answer'}") from error
    return sorted({str(info[4][0]) for info in infos})


class DnsSource:
    """Every address of the listing's `dns` name, at its `port`."""

    def __init__(
        self, listing: BackendConfig, resolver: Resolver, settings: Settings, rng: random.Random
    ) -> None:
        self._listing = listing
        self._resolver = resolver
        self._settings = settings
        self._rng = rng

    async def follow(self, told: Told) -> None:
        """Report the addresses now and after every look-up."""
        while True:
            try:
                hosts = await self._resolver.addresses(self._listing.dns or "")
            except Unknown as error:
                told.failed(str(error))
            else:
                port = self._listing.port or 0
                told.found(_members((host, port) for host in hosts))
            await pause(self._settings().interval_s, self._rng)


class SrvSource:
    """Every address of every target of the listing's `srv` name, of the best priority that has any.

    Addresses and not names are the backends, so that one that moved is another backend at once. A
    target whose address is not known at the moment keeps the ones it had. Weights are told of and not
    used: how much a backend takes is learnt from how fast it answers.
    """

    def __init__(
        self, listing: BackendConfig, resolver: Resolver, settings: Settings, rng: random.Random
    ) -> None:
        self._listing = listing
        self._resolver = resolver
        self._settings = settings
        self._rng = rng
        self._held: dict[str, list[str]] = {}
        self._weighted = False
        self._spare = False

    async def follow(self, told: Told) -> None:
        """Report the targets' addresses now and after every look-up."""
        while True:
            try:
                places = await self._places()
            except Unknown as error:
                told.failed(str(error))
            else:
                told.found(_members(places))
            await pause(self._settings().interval_s, self._rng)

    async def _places(self) -> list[Target]:
        services = await self._resolver.services(self._listing.srv or "")
        self._note_weights(services.weighted)
        held: dict[str, list[str]] = {}
        places: list[Target] = []
        for number, group in enumerate(services.groups):
            held |= await self._looked_up(group)
            places = [(host, port) for name, port in group for host in held[name]]
            if places:
                self._note_spare(number > 0)
                break
        self._held = held
        if services.groups and not places:
            raise Unknown(f"no target of {self._listing.srv} has a known address")
        return places

    async def _looked_up(self, group: Iterable[Target]) -> dict[str, list[str]]:
        gate = asyncio.Semaphore(_AT_ONCE)
        names = dict.fromkeys(host for host, _ in group)
        found = await asyncio.gather(*(self._addresses(name, gate) for name in names))
        return dict(zip(names, found, strict=True))

    def _note_weights(self, weighted: bool) -> None:
        if weighted and not self._weighted:
            text = "the weights of %s are not used: what each backend can take is measured"
            _log.info(text, self._listing.srv)
        self._weighted = weighted

    def _note_spare(self, spare: bool) -> None:
        if spare and not self._spare:
            text = "no target of the best priority of %s has a known address: the next is used"
            _log.warning(text, self._listing.srv)
        self._spare = spare

    async def _addresses(self, name: str, gate: asyncio.Semaphore) -> list[str]:
        async with gate:
            try:
                return await self._resolver.addresses(name)
            except Unknown:
                return self._held.get(name, [])


def _members(places: Iterable[tuple[str, int]]) -> Members:
    return tuple(BackendConfig(url=url_of(host, port)) for host, port in sorted(set(places)))


def url_of(host: str, port: int) -> str:
    """Return the root URL of a server; with `tls` in the listing it becomes https later."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
