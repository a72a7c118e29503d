"""What EndpointSlices say, as backends. Pure: nothing is asked of anybody.

An endpoint may be in several slices: twice in one family while the control plane moves it, once per
family where pods have IPv4 and IPv6 addresses. It is one engine and counted once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.config.forms import FORMS
from gateway.config.groups import Members
from gateway.config.schema import BackendConfig
from gateway.discovery.names import url_of

_RANKS = {"IPv4": 0, "IPv6": 1, "FQDN": 2}
"""Of one pod's addresses the first kind is taken."""

_MOST_ENDPOINTS = 1_000  # the control plane's own limit per slice
_MOST_PORTS = 100


class SliceProblem(ValueError):
    """Slices that do not say where the backends are; the message says why."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One address. `who` is the same in every slice that has this endpoint."""

    who: str
    name: str | None
    host: str
    rank: int
    ready: bool
    lingering: bool


@dataclass(slots=True, frozen=True)
class Slice:
    """What matters of an EndpointSlice. `ports` maps names ("" for none) to numbers."""

    endpoints: tuple[Endpoint, ...]
    ports: Mapping[str, int]


def read_slice(item: Mapping[str, Any]) -> Slice:
    """Return a slice as the API server tells it; parts of another form are passed over."""
    rank = _RANKS.get(str(item.get("addressType")), len(_RANKS))
    endpoints = [
        _endpoint(entry, rank) for entry in _mappings(item.get("endpoints"), _MOST_ENDPOINTS)
    ]
    ports = {
        str(port.get("name") or ""): port["port"]
        for port in _mappings(item.get("ports"), _MOST_PORTS)
        if isinstance(port.get("port"), int)
    }
    return Slice(tuple(one for one in endpoints if one is not None), ports)


def _mappings(value: Any, most: int) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items[:most] if isinstance(item, dict)]


def _endpoint(entry: Mapping[str, Any], rank: int) -> Endpoint | None:
    """Return an endpoint; what is not said of a condition means as the API defines it."""
    addresses = entry.get("addresses")
    if not isinstance(addresses, list) or not addresses or not isinstance(addresses[0], str):
        return None
    told = entry.get("conditions")
    conditions: Mapping[str, Any] = told if isinstance(told, dict) else {}
    ready = conditions.get("ready") is not False
    serving = conditions.get("serving", ready) is not False
    terminating = conditions.get("terminating") is True
    target = entry.get("targetRef")
    pod: Mapping[str, Any] = target if isinstance(target, dict) else {}
    name = str(pod.get("name") or "")
    return Endpoint(
        who=str(pod.get("uid") or name or addresses[0]),
        name=name if FORMS["name"].ok(name) else None,
        host=addresses[0],
        rank=rank,
        ready=ready and not terminating,
        lingering=serving and terminating,
    )


def members_of(slices: Iterable[Slice], port: str | None) -> Members:
    """Return the backends: every ready endpoint, or while there is none those that still serve.

    The second is what kube-proxy does: an engine that shuts down and serves on is better than none.

    Raises:
        SliceProblem: the port is not told, or there are several and none is chosen.
    """
    told = [
        (endpoint, ports) for one in slices for endpoint in one.endpoints for ports in [one.ports]
    ]
    usable = [entry for entry in told if entry[0].ready]
    usable = usable or [entry for entry in told if entry[0].lingering]
    best: dict[str, tuple[Endpoint, Mapping[str, int]]] = {}
    for entry in sorted(usable, key=lambda entry: (entry[0].rank, entry[0].host)):
        best.setdefault(entry[0].who, entry)
    members = [
        BackendConfig(name=one.name, url=url_of(one.host, _port(port, ports)))
        for one, ports in best.values()
    ]
    return tuple(sorted(members, key=lambda member: member.url or ""))


def _port(wanted: str | None, ports: Mapping[str, int]) -> int:
    if wanted is not None and wanted.isdecimal():
        return int(wanted)
    names = ", ".join(sorted(name for name in ports if name)) or "no names"
    if wanted is not None:
        if wanted not in ports:
            raise SliceProblem(f"no port is named {wanted}: there is {names}")
        return ports[wanted]
    if len(ports) != 1:
        raise SliceProblem(f"kubernetes.port is needed, the Service has {len(ports)}: {names}")
    return next(iter(ports.values()))
