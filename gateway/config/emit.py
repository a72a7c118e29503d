"""Plain data to YAML lines that know their key path, so that a comment can stand beside each.

PyYAML drops comments; this writes the small part of YAML a configuration needs. Reading the lines
back gives the same data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

_WIDE = 1_000_000


@dataclass(slots=True, frozen=True)
class Line:
    """One line. `path` is the key path it gives; `leaf` whether its value is on the line too."""

    text: str
    path: str
    leaf: bool


def emit(data: dict[str, Any], path: str = "", indent: str = "") -> Iterator[Line]:
    """Yield the lines of a mapping in block style."""
    for name, value in data.items():
        below = f"{path}.{name}" if path else name
        head = f"{indent}{scalar(name)}:"
        if not value or not isinstance(value, dict | list):
            yield Line(f"{head} {scalar(value)}", below, leaf=True)
        elif isinstance(value, dict):
            yield Line(head, below, leaf=False)
            yield from emit(value, below, indent + "  ")
        else:
            yield Line(head, below, leaf=False)
            yield from _items(value, below, indent + "  ")


def _items(items: list[Any], path: str, indent: str) -> Iterator[Line]:
    for index, item in enumerate(items):
        below = f"{path}[{index}]"
        if not isinstance(item, dict) or not item:
            yield Line(f"{indent}- {scalar(item)}", below, leaf=True)
            continue
        lines = emit(item, below, indent + "  ")
        first = next(lines)
        yield Line(f"{indent}- {first.text.lstrip()}", first.path, first.leaf)
        yield from lines


def scalar(value: Any) -> str:
    """Return a scalar, or an empty list or mapping, as YAML on one line."""
    text = _dump(value, None)
    return _dump(value, '"') if "\n" in text else text


def _dump(value: Any, style: str | None) -> str:
    text = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=_WIDE)
    return text.removesuffix("\n").removesuffix("\n...")
