"""Which backends a configuration has: identity, default names, DNS groups. Resolves nothing itself.

A backend is one address. Listed under two models it is still one backend, named once; an entry
with only a name refers to one defined elsewhere.
"""

from collections.abc import Iterator, Mapping

import msgspec
import xxhash

from gateway.config.schema import BackendConfig, BackendTlsConfig, Config, ModelConfig

MERGED = ("engine", "api_key_env", "api_key_file", "kv_events", "kv_replay", "tls")
"""Attributes that one listing may state and another leave at its default."""

ANY_HOST = "*"
"""In the endpoints of a `dns` group: the address of each member."""

_LAST_PORT = 65535


def occurrences(config: Config) -> Iterator[tuple[str, BackendConfig]]:
    """Yield every listing of a backend with its key path, in the order of the file."""
    for i, model in enumerate(config.models):
        for j, backend in enumerate(model.backends):
            yield f"models[{i}].backends[{j}]", backend
    for j, backend in enumerate(config.backends):
        yield f"backends[{j}]", backend


def address(backend: BackendConfig) -> str | None:
    """Return what makes two listings the same backend; None for a mere reference by name."""
    if backend.url is not None:
        return backend.url.rstrip("/").lower()
    if backend.dns is not None:
        return f"dns:{backend.dns.lower()}:{backend.port}"
    return None


class Names:
    """The name of every listing of one configuration."""

    def __init__(self, config: Config) -> None:
        self._by_address: dict[str, str] = {}
        for _, backend in occurrences(config):
            where = address(backend)
            if where is not None and backend.name is not None:
                self._by_address.setdefault(where, backend.name)
        self._name_the_rest(config)

    def of(self, backend: BackendConfig) -> str:
        """Return the name of the backend that a listing means."""
        where = address(backend)
        if where is None:
            return backend.name or ""
        return self._by_address[where]

    def _name_the_rest(self, config: Config) -> None:
        """Number the backends that were given no name: clients must never see an address."""
        taken = set(self._by_address.values())
        for number, backend in enumerate(self._unnamed(config), 1):
            name = f"backend-{number}"
            while name in taken:
                name += "_"
            taken.add(name)
            self._by_address[address(backend) or ""] = name

    def _unnamed(self, config: Config) -> list[BackendConfig]:
        found: dict[str, BackendConfig] = {}
        for _, backend in occurrences(config):
            where = address(backend)
            if where is not None and where not in self._by_address:
                found.setdefault(where, backend)
        return list(found.values())


def backends_of(config: Config) -> list[BackendConfig]:
    """Return every backend once, named, its URL without trailing slash, its listings merged."""
    names = Names(config)
    found: dict[str, BackendConfig] = {}
    references = []
    for _, backend in occurrences(config):
        name = names.of(backend)
        if address(backend) is None:
            references.append((name, backend))
        elif name in found:
            found[name] = merge(found[name], backend)
        else:
            url = backend.url and backend.url.rstrip("/")
            found[name] = msgspec.structs.replace(backend, name=name, url=url)
    for name, backend in references:
        if name in found:
            found[name] = merge(found[name], backend)
    return list(found.values())


def merge(first: BackendConfig, second: BackendConfig) -> BackendConfig:
    """Return `first` with what only `second` states."""
    plain = BackendConfig()
    changes = {
        key: getattr(second, key)
        for key in MERGED
        if getattr(first, key) == getattr(plain, key) != getattr(second, key)
    }
    return msgspec.structs.replace(first, **changes)


def expand_dns(config: Config, addresses: Mapping[str, tuple[str, ...]]) -> Config:
    """Return the configuration with each `dns` backend replaced by one per resolved address.

    `addresses` maps a DNS name to IP addresses; a name it lacks gives no backend. The new names
    are the group's plus a hash of the address: the same address keeps its name when the set
    changes, and no answer header tells an address.
    """
    names = Names(config)
    groups = {
        names.of(backend): backend for _, backend in occurrences(config) if backend.dns is not None
    }

    def expand(backends: list[BackendConfig]) -> list[BackendConfig]:
        made: list[BackendConfig] = []
        for backend in backends:
            name = names.of(backend)
            group = groups.get(name)
            members = [backend] if group is None else _members(name, group, addresses)
            made.extend(members)
        return made

    models = [
        msgspec.structs.replace(model, backends=expand(model.backends)) for model in config.models
    ]
    return msgspec.structs.replace(config, models=models, backends=expand(config.backends))


def _members(
    name: str, group: BackendConfig, addresses: Mapping[str, tuple[str, ...]]
) -> Iterator[BackendConfig]:
    scheme = "http" if group.tls is None else "https"
    for ip in dict.fromkeys(addresses.get(group.dns or "", ())):
        host = f"[{ip}]" if ":" in ip else ip
        yield msgspec.structs.replace(
            group,
            name=f"{name}-{xxhash.xxh64_hexdigest(ip.encode())[:8]}",
            url=f"{scheme}://{host}:{group.port}",
            kv_events=_at(group.kv_events, host),
            kv_replay=_at(group.kv_replay, host),
            dns=None,
            port=None,
            tls=_named(group.tls, group.dns),
        )


def _named(tls: BackendTlsConfig | None, name: str | None) -> BackendTlsConfig | None:
    """Return the settings of an address behind `name`, whose certificate tells the name."""
    if tls is None or tls.server_name is not None:
        return tls
    return msgspec.structs.replace(tls, server_name=name)


def _at(endpoint: str | None, host: str) -> str | None:
    return endpoint and endpoint.replace(f"tcp://{ANY_HOST}:", f"tcp://{host}:", 1)


def events_of(backend: BackendConfig) -> tuple[str, str | None] | None:
    """Return where a backend publishes its KV events and where it replays them, if anywhere."""
    endpoint = backend.kv_events
    if endpoint is None:
        return None
    if backend.kv_replay is not None:
        return endpoint, backend.kv_replay
    head, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) >= _LAST_PORT:
        return endpoint, None
    return endpoint, f"{head}:{int(port) + 1}"


def backend_names(model: ModelConfig, names: Names) -> tuple[str, ...]:
    """Return the names of a model's backends, each once, in order."""
    return tuple(dict.fromkeys(names.of(backend) for backend in model.backends))
