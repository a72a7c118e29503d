"""What `GET /v1/models` shows: the backends' own entries, merged and kept as bytes.

Lists exactly what can be routed: configured models with their aliases, and the models and LoRA
adapters that live backends report. Must never wait for a backend.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import orjson

from gateway.core.settings import ModelSpec

_MAX_ENTRIES = 1_000  # per backend: thousands of LoRA ids would be a mistake or an attack
_MAX_VIEWS = 256  # cached bodies, one per distinct list of allowed patterns
_VOLATILE = ("created", "permission")  # vLLM makes these anew for every answer

Entry = dict[str, Any]


class Catalog:
    """Entries per backend, and the bodies made of them. `clock` gives Unix seconds.

    `clock` dates the models no backend has described; it is read once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._entries: dict[str, dict[str, Entry]] = {}
        self._live: set[str] = set()
        self._models: tuple[ModelSpec, ...] = ()
        self._fixed: frozenset[str] = frozenset()
        self._named: tuple[ModelSpec, ...] = ()
        self._created = int(clock())
        self._merged: dict[str, Entry] | None = None
        self._views: dict[tuple[str, ...] | None, bytes] = {}

    def configure(self, models: Iterable[ModelSpec], fixed: Iterable[str]) -> None:
        """Take the models that can be routed; those named in `fixed` are listed even when down."""
        self._models = tuple(models)
        self._fixed = frozenset(fixed)
        self._named = tuple(model for model in self._models if model.name in self._fixed)
        self._forget()

    def put(self, backend: str, entries: Iterable[Entry]) -> bool:
        """Take a backend's model entries; return whether its ids changed. Marks it live."""
        before = self._entries.get(backend, {})
        fresh: dict[str, Entry] = {}
        for entry in entries:
            if len(fresh) >= _MAX_ENTRIES:
                break
            name = entry["id"]
            old = before.get(name)
            fresh[name] = old if old is not None and _same(old, entry) else entry
        self._entries[backend] = fresh
        self._live.add(backend)
        if fresh != before:
            self._forget()
        return fresh.keys() != before.keys()

    def set_live(self, backend: str, live: bool) -> None:
        """Show or hide what only this backend has; its entries are kept for its return."""
        if live == (backend in self._live):
            return
        if live:
            self._live.add(backend)
        else:
            self._live.discard(backend)
        self._forget()

    def drop(self, backend: str) -> None:
        """Forget a backend."""
        self._entries.pop(backend, None)
        self._live.discard(backend)
        self._forget()

    def served(self) -> dict[str, tuple[str, ...]]:
        """Return model id -> backends that reported it, dead ones included.

        A request for a model whose only backend is restarting deserves a 503, not a 404.
        """
        served: dict[str, list[str]] = {}
        for backend, entries in sorted(self._entries.items()):
            for name in entries:
                served.setdefault(name, []).append(backend)
        return {name: tuple(backends) for name, backends in served.items()}

    def knows(self, backend: str) -> bool:
        """Return whether the backend has ever told its models."""
        return backend in self._entries

    def unlisted(self, backend: str) -> tuple[str, ...]:
        """Return the configured models that the backend is to serve and does not tell of."""
        told = self._entries.get(backend, {})
        return tuple(
            model.name
            for model in self._named
            if backend in model.backends and model.name not in told
        )

    def body(self, allowed: tuple[str, ...] | None = None) -> bytes:
        """Return the JSON list, limited to ids that match one of the globs `allowed`."""
        body = self._views.get(allowed)
        if body is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            data = [entry for name, entry in self._all().items() if permits(allowed, name)]
            body = self._views[allowed] = orjson.dumps({"object": "list", "data": data})
        return body

    def one(self, name: str, allowed: tuple[str, ...] | None = None) -> bytes | None:
        """Return one model's JSON, or None if it is unknown or not allowed."""
        entry = self._all().get(name)
        if entry is None or not permits(allowed, name):
            return None
        return orjson.dumps(entry)

    def _all(self) -> Mapping[str, Entry]:
        if self._merged is None:
            self._merged = {}
            for model in self._models:
                self._add(self._merged, model)
        return self._merged

    def _add(self, merged: dict[str, Entry], model: ModelSpec) -> None:
        entry = self._describe(model)
        if entry is None:
            return
        for name in (model.name, *model.aliases):
            merged.setdefault(name, {**entry, "id": name})

    def _describe(self, model: ModelSpec) -> Entry | None:
        for backend in model.backends:
            if backend in self._live and (entry := self._entries.get(backend, {}).get(model.name)):
                return entry
        if model.name not in self._fixed:
            return None
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "radixgate",
        }

    def _forget(self) -> None:
        self._merged = None
        self._views.clear()


def parse_models(body: bytes) -> list[Entry] | None:
    """Return the usable entries of an engine's `/v1/models`, or None if it is no such list."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list):
        return None
    return [entry for entry in data if _usable(entry)]


def permits(allowed: tuple[str, ...] | None, name: str) -> bool:
    """Return whether `name` matches one of the globs; None allows everything."""
    return allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed)


def _usable(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    name = entry.get("id")
    if not isinstance(name, str) or name == "":
        return False
    try:
        orjson.dumps(entry)
    except orjson.JSONEncodeError:  # it reads deeper nesting than it writes
        return False
    return True


def _same(one: Entry, other: Entry) -> bool:
    return _stable(one) == _stable(other)


def _stable(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key not in _VOLATILE}
