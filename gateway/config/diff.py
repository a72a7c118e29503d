"""What a reload changes, path by path, for people and their logs.

Must never show a secret: the hashes of keys are masked, and everything else that is secret is not
in a configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.config.emit import scalar
from gateway.config.forms import entry_path
from gateway.config.meta import KeyInfo, is_section, item_of, keys_of
from gateway.config.schema import Config

MASK = "***"
MOST_CHANGES = 200
_WIDEST = 120


@dataclass(slots=True, frozen=True)
class Change:
    """One path's values before and after, as YAML; None: it was not there, or is no more."""

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        """Return it on one line."""
        if self.old is None:
            return f"{self.path} added: {self.new}"
        if self.new is None:
            return f"{self.path} removed"
        return f"{self.path}: {self.old} -> {self.new}"


def changes(old: Config, new: Config) -> list[Change]:
    """Return what differs, in the order of the schema; of very much the first 200."""
    found: list[Change] = []
    for change in _sections(Config, old, new, ""):
        if len(found) == MOST_CHANGES:
            break
        found.append(change)
    return found


def _sections(section: type[msgspec.Struct], old: Any, new: Any, path: str) -> Iterator[Change]:
    for info in keys_of(section).values():
        one, other = _of(old, info), _of(new, info)
        if one != other:
            yield from _values(info, one, other, f"{path}.{info.name}" if path else info.name)


def _of(section: Any, info: KeyInfo) -> Any:
    field = next(
        field
        for field, name in zip(
            section.__struct_fields__, section.__struct_encode_fields__, strict=True
        )
        if name == info.name
    )
    return getattr(section, field)


def _values(info: KeyInfo, old: Any, new: Any, path: str) -> Iterator[Change]:
    inner = info.section
    if inner is None:
        yield Change(path, *(_shown(_masked(info, value)) for value in (old, new)))
    elif item_of(info.kind) is not None:
        yield from _items(inner, _by_name(old, path, info), _by_name(new, path, info))
    elif is_section(info.kind) and old is not None and new is not None:
        yield from _sections(inner, old, new, path)
    else:
        yield Change(path, _summary(inner, old), _summary(inner, new))


def _by_name(value: Any, path: str, info: KeyInfo) -> dict[str, Any]:
    """Return a list's or mapping's items by the path that a reader knows them by."""
    if isinstance(value, Mapping):
        return {entry_path(path, name, info.key.form): item for name, item in value.items()}
    found: dict[str, Any] = {}
    for index, item in enumerate(value):
        place = f"{path}[{getattr(item, 'name', None) or index}]"
        found[place if place not in found else f"{path}[{index}]"] = item
    return found


def _items(
    section: type[msgspec.Struct], old: dict[str, Any], new: dict[str, Any]
) -> Iterator[Change]:
    for path, item in old.items():
        if path not in new:
            yield Change(path, _summary(section, item), None)
        elif item != new[path]:
            yield from _sections(section, item, new[path], path)
    for path, item in new.items():
        if path not in old:
            yield Change(path, None, _summary(section, item))


def _summary(section: type[msgspec.Struct], item: Any) -> str | None:
    """Return a section on one line, what is at its default left out."""
    return None if item is None else _shown(_plain(section, item))


def _plain(section: type[msgspec.Struct], item: Any) -> dict[str, Any]:
    said = {}
    for info in keys_of(section).values():
        value = _of(item, info)
        if info.required or value != info.default:
            said[info.name] = _masked(info, value)
    return said


def _masked(info: KeyInfo, value: Any) -> Any:
    if info.key.form == "sha256":
        return MASK
    inner = info.section
    if inner is None or value is None:
        return value
    if isinstance(value, list):
        return [_plain(inner, item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(inner, item) for name, item in value.items()}
    return _plain(inner, value)


def _shown(value: Any) -> str:
    text = scalar(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
