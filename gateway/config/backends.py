"""Which backends a configuration has: identity and default names. Resolves nothing itself.

A backend is one address. Listed under two models it is still one backend, named once; an entry
with only a name refers to one defined elsewhere. What stands for many is `groups.py`'s.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from gateway.config.schema import BackendConfig, Config, ModelConfig

MERGED = ("engine", "api_key_env", "api_key_file", "kv_events", "kv_replay", "tls")
"""Attributes that one listing may state and another leave at its default."""

ANY_HOST = "*"
"""In the endpoints of a group: the address of each member."""

KINDS = ("url", "dns", "srv", "file", "kubernetes")
"""What a listing may give as its address, one of them."""

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
    return group_key(backend)


def group_key(backend: BackendConfig) -> str | None:
    """Return what makes two listings the same group of backends; None for one that is no group."""
    service = backend.kubernetes
    if backend.dns is not None:
        return f"dns:{backend.dns.lower()}:{backend.port}"
    if backend.srv is not None:
        return f"srv:{backend.srv.lower()}"
    if backend.file is not None:
        return f"file:{backend.file}"
    if service is not None:
        return f"kubernetes:{service.namespace or ''}/{service.service}:{service.port or ''}"
    return None


def host_in(url: str) -> str:
    """Return the host as a URL has it, an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


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
