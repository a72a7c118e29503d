"""The schema as data: what each key of a section is. Reads types only, never values."""

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from gateway.config.forms import FORMS
from gateway.config.keys import Key


@dataclass(slots=True, frozen=True)
class KeyInfo:
    """One key of a section. `kind` is its type without Annotated and None."""

    name: str
    kind: Any
    optional: bool
    required: bool
    default: Any
    key: Key

    @property
    def section(self) -> type[msgspec.Struct] | None:
        """The section this key holds: itself, or its items (list, mapping)."""
        inner = item_of(self.kind) or self.kind
        return inner if is_section(inner) else None


def is_section(kind: Any) -> bool:
    """Whether `kind` is a section type."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def item_of(kind: Any) -> Any:
    """Return the item type of a list or mapping type, else None."""
    if typing.get_origin(kind) in {list, dict}:
        return typing.get_args(kind)[-1]
    return None


@cache
def keys_of(section: type[msgspec.Struct]) -> dict[str, KeyInfo]:
    """Return the keys of `section` by their YAML name, in order."""
    return {field.encode_name: _info(field) for field in msgspec.structs.fields(section)}


def _info(field: msgspec.structs.FieldInfo) -> KeyInfo:
    if typing.get_origin(field.type) is not Annotated:
        raise TypeError(f"{field.name} has no Key")
    kind, key = typing.get_args(field.type)[:2]
    optional = typing.get_origin(kind) in {
        types.UnionType,
        typing.Union,
    }  # the second: of a Literal
    if optional:
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    required = default is msgspec.NODEFAULT
    return KeyInfo(field.encode_name, kind, optional, required, default, key)


_SCALARS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def describe(kind: Any, key: Key) -> str:
    """Return in words which values a key takes, its range included."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "a list" if is_section(item_of(kind)) else "a list of texts"
    if kind in {int, float}:
        return f"a {_SCALARS[kind]}{_range(key)}"
    if kind is str and key.form not in {None, "text"}:
        return FORMS[key.form or "text"].allowed
    return _SCALARS.get(kind, "a mapping")


def _range(key: Key) -> str:
    low = "" if key.ge is None else f"{key.ge:,.15g}"
    high = "" if key.le is None else f"{key.le:,.15g}"
    if key.gt is not None:
        return f" above {key.gt:,.15g}" + (f", at most {high}" if high else "")
    if low and high:
        return f" from {low} to {high}"
    return f" of at least {low}" if low else ""
