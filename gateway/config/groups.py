"""Listings that stand for many backends, and the configuration with each of them spelled out.

A group is what a `dns`, `srv`, `file` or `kubernetes` listing means. Looks nothing up itself:
`gateway.discovery` does.
"""

from collections.abc import Iterator, Mapping

import msgspec
import xxhash

from gateway.config.backends import (
    ANY_HOST,
    Names,
    backends_of,
    group_key,
    host_in,
)
from gateway.config.schema import BackendConfig, BackendTlsConfig, Config

Members = tuple[BackendConfig, ...]
"""What a source tells of: `url`, perhaps `name`, and what else is not the group's."""

Found = Mapping[str, Members]
"""Group key -> its members."""

_NEVER_COPIED = frozenset({"name", "url", "dns", "port", "srv", "file", "kubernetes"})
_PLAIN = BackendConfig()


def groups_of(config: Config) -> dict[str, BackendConfig]:
    """Return every group once by its key, named, its listings merged."""
    found = {}
    for backend in backends_of(config):
        key = group_key(backend)
        if key is not None:
            found[key] = backend
    return found


def expand(config: Config, found: Found) -> Config:
    """Return the configuration with each group replaced by its members; one not found has none.

    A member without a name of its own, or whose name another backend has, is named by its group
    and a hash of its address: the same address keeps its name when the set changes, and no answer
    header tells an address.
    """
    groups = groups_of(config)
    if not groups:
        return config
    names = Names(config)
    members = _members(config, groups, found)

    def spelled_out(backends: list[BackendConfig]) -> list[BackendConfig]:
        return [one for backend in backends for one in members.get(names.of(backend), [backend])]

    models = [
        msgspec.structs.replace(model, backends=spelled_out(model.backends))
        for model in config.models
    ]
    return msgspec.structs.replace(config, models=models, backends=spelled_out(config.backends))


def _members(
    config: Config, groups: Mapping[str, BackendConfig], found: Found
) -> dict[str, list[BackendConfig]]:
    """Return group name -> members, all names given."""
    holders = {
        backend.name or "": backend.url or ""
        for backend in backends_of(config)
        if backend.url is not None
    }
    members: dict[str, list[BackendConfig]] = {}
    for key, group in groups.items():
        one_each = {member.url: member for member in found.get(key, ())}
        members[group.name or ""] = [
            _member(group, member, holders) for member in one_each.values()
        ]
    return members


def _member(group: BackendConfig, member: BackendConfig, holders: dict[str, str]) -> BackendConfig:
    url = (member.url or "").rstrip("/")
    tls = _tls_of(group)
    if tls is not None and group.file is None:
        url = url.replace("http:", "https:", 1)
    name = member.name
    if name is None or holders.setdefault(name, url) != url:
        name = f"{name or group.name}-{xxhash.xxh64_hexdigest(url.encode())[:8]}"
    stated = {
        key: value
        for key in BackendConfig.__struct_fields__
        if key not in _NEVER_COPIED and (value := getattr(member, key)) != getattr(_PLAIN, key)
    }
    host = host_in(url)
    events = {key: _at(getattr(group, key), host) for key in ("kv_events", "kv_replay")}
    plain = {key: getattr(_PLAIN, key) for key in _NEVER_COPIED}
    secure = {} if tls is None else {"tls": tls}
    changes = {**plain, **events, **secure, **stated, "name": name, "url": url}
    return msgspec.structs.replace(group, **changes)


def _tls_of(group: BackendConfig) -> BackendTlsConfig | None:
    """Return the TLS settings of a group's members: their certificates tell the group's name."""
    tls, name = group.tls, server_name(group)
    if tls is None or tls.server_name is not None or name is None:
        return tls
    return msgspec.structs.replace(tls, server_name=name)


def server_name(group: BackendConfig) -> str | None:
    """Return what the certificate of whatever a group tells of is for; None = its own address.

    Of an SRV name that is the domain, not the target (RFC 6125, section 6.2.1).
    """
    if group.srv is not None:
        labels = group.srv.rstrip(".").split(".")
        return ".".join(label for label in labels if not label.startswith("_"))
    service = group.kubernetes
    if service is not None and service.namespace is not None:
        return f"{service.service}.{service.namespace}.svc"
    return group.dns


def _at(endpoint: str | None, host: str) -> str | None:
    return endpoint and endpoint.replace(f"tcp://{ANY_HOST}:", f"tcp://{host}:", 1)


def changed_names(old: Config, new: Config) -> Iterator[tuple[str, str]]:
    """Yield (what happened, name) for the backends that came and went; both are spelled out."""
    before = {backend.name or "": backend.url for backend in backends_of(old)}
    after = {backend.name or "": backend.url for backend in backends_of(new)}
    yield from (("removed", name) for name in before if name not in after)
    yield from (("added", name) for name in after if name not in before)
    yield from (("moved", name) for name, url in after.items() if before.get(name, url) != url)
