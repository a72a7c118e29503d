"""A tree against the schema: plain data that msgspec surely accepts, and every mistake on the way.

A wrong value is reported and replaced by its default, so that the rest is still checked. What
concerns two keys at once is `crosscheck.py`'s.
"""

import difflib
import math
import typing
from typing import Any, Literal

import msgspec

from gateway.config.forms import FORMS, entry_path
from gateway.config.keys import Key
from gateway.config.meta import KeyInfo, describe, is_section, item_of, keys_of
from gateway.config.problems import Report, Where
from gateway.config.schema import Config
from gateway.config.tree import Raw

_MISSING = object()


class Validator:
    """One pass over a tree.

    `places` says where each given key stands, by its path.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.places: dict[str, Where] = {}

    def config(self, root: Raw) -> Config:
        """Return the best configuration the tree allows; mistakes are in the report."""
        return msgspec.convert(self._section(Config, root, ""), Config)

    def _section(self, section: type[msgspec.Struct], raw: Raw, path: str) -> dict[str, Any]:
        given = raw.value
        if not isinstance(given, dict):
            if given is not None:
                self._wrong(raw, path, "a mapping")
            given = {}
        known = keys_of(section)
        for name in given:
            if name not in known:
                self._unknown(name, given[name].where, path, known)
        made: dict[str, Any] = {}
        for name, info in known.items():
            value = self._key(info, given.get(name), raw, f"{path}.{name}" if path else name)
            if value is not _MISSING:
                made[name] = value
        return made

    def _unknown(self, name: str, where: Where, path: str, known: dict[str, KeyInfo]) -> None:
        full = f"{path}.{name}" if path else name
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "expected one of " + ", ".join(known)
        self._report.add(where, full[:200], "unknown key", hint)

    def _key(self, info: KeyInfo, raw: Raw | None, parent: Raw, path: str) -> Any:
        if raw is None:
            if not info.required:
                return _MISSING
            above = path.rpartition(".")[0]
            if not {above, f"{above}.<<"} & self._report.bad:
                allowed = f"expected {describe(info.kind, info.key)}"
                self._report.add(parent.where, path, "is missing", allowed)
            return _blank(info.kind)
        self.places[path] = raw.where
        if raw.value is None and (info.optional or _is_container(info.kind)):
            return None if info.optional else _MISSING
        value = self._value(info.kind, info.key, raw, path)
        if value is not _MISSING:
            return value
        return _blank(info.kind) if info.required else _MISSING

    def _value(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        if is_section(kind):
            return self._section(kind, raw, path)
        origin = typing.get_origin(kind)
        if origin in {list, dict}:
            items = self._list if origin is list else self._mapping
            return items(item_of(kind), key, raw, path)
        if origin is Literal:
            return self._choice(kind, key, raw, path)
        return self._scalar(kind, key, raw, path)

    def _scalar(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        if kind is str:
            return self._text(key, raw, path)
        if kind is bool:
            return (
                raw.value
                if isinstance(raw.value, bool)
                else self._wrong(raw, path, "true or false")
            )
        return self._number(kind, key, raw, path)

    def _list(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        if not isinstance(raw.value, list):
            return self._wrong(raw, path, describe(list[kind], key))
        made = []
        for index, item in enumerate(raw.value):
            below = f"{path}[{index}]"
            self.places[below] = item.where
            if item.value is None:
                self._wrong(item, below, "a mapping" if is_section(kind) else "text")
            value = self._value(kind, key, item, below) if item.value is not None else _MISSING
            made.append(_blank(kind) if value is _MISSING else value)
        return made

    def _mapping(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        if not isinstance(raw.value, dict):
            return self._wrong(raw, path, "a mapping")
        made = {}
        for name, item in raw.value.items():
            below = entry_path(path, name, key.form)
            self.places[below] = item.where
            if key.form is not None and not FORMS[key.form].ok(name):
                allowed = f"expected {FORMS[key.form].allowed}"
                self._report.add(item.where, below, "not a name", allowed, kept=True)
            made[name] = self._value(kind, key, item, below)
        return made

    def _choice(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        choices = typing.get_args(kind)
        if isinstance(raw.value, str) and raw.value in choices:
            return raw.value
        allowed = describe(kind, key)
        close = difflib.get_close_matches(str(raw.value)[:40], choices, n=1)
        hint = f"{allowed} (did you mean {close[0]}?)" if close else allowed
        return self._wrong(raw, path, hint)

    def _text(self, key: Key, raw: Raw, path: str) -> Any:
        value = raw.value
        if raw.loose and raw.text is not None:
            value = raw.text
        form = FORMS[key.form or "text"]
        if form.numbers and type(value) is int:
            value = str(value) if 0 <= value < 10**9 else "-"
        if not isinstance(value, str):
            scalar = not isinstance(value, dict | list)
            return self._wrong(raw, path, "text (put it in quotes)" if scalar else "text")
        if form.ok(value):
            return value
        # A pasted key or a password in a URL must not end up in a log by being wrong.
        hide = key.form == "sha256" or (key.form == "url" and "@" in value)
        return self._wrong(Raw("...", raw.where) if hide else raw, path, form.allowed)

    def _number(self, kind: Any, key: Key, raw: Raw, path: str) -> Any:
        value = raw.value
        if kind is float and isinstance(value, str) and raw.text is not None:
            value = _scientific(value)
        fits = isinstance(value, int) or (kind is float and isinstance(value, float))
        if isinstance(value, bool) or not fits or not _in_range(value, key):
            return self._wrong(raw, path, describe(kind, key))
        return kind(value)

    def _wrong(self, raw: Raw, path: str, allowed: str) -> Any:
        if path not in self._report.bad:  # a value of no kind at all is reported as such
            message = f"{_show(raw.value)} is not valid"
            self._report.add(raw.where, path, message, f"expected {allowed}")
        return _MISSING


def _is_container(kind: Any) -> bool:
    return is_section(kind) or item_of(kind) is not None


def _blank(kind: Any) -> Any:
    """Return a value of `kind` that stands for one already reported as wrong."""
    if is_section(kind):
        return {info.name: _blank(info.kind) for info in keys_of(kind).values() if info.required}
    return kind()


def _scientific(text: str) -> float | None:
    """Return the number in `1e6`, which YAML 1.1 reads as text."""
    try:
        return float(text)
    except ValueError:
        return None


def _in_range(value: float, key: Key) -> bool:
    if not abs(value) < 1e15 or not math.isfinite(value):
        return False
    above = (key.ge is None or value >= key.ge) and (key.gt is None or value > key.gt)
    return above and (key.le is None or value <= key.le)


def _show(value: Any) -> str:
    """Return a value for a message: short, one line, printable."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "so large a number"
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return ascii(short) if isinstance(value, str) else short
