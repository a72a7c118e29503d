"""YAML text to a tree of values that know their line. Never constructs an object from a tag.

Every fault of the text becomes a problem in the report: nothing else comes out, whatever the
bytes. Size, depth and node count are capped, so an alias bomb is a mistake and not an outage.
"""

from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from gateway.config.problems import Report, Where

MAX_BYTES = 1024 * 1024
_MAX_DEPTH = 32
_MAX_NODES = 50_000

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset(_TAG + kind for kind in ("str", "timestamp", "value", "merge"))


@dataclass(slots=True)
class Raw:
    """A value and where it stands. `value` is dict[str, Raw], list[Raw] or a YAML scalar.

    `text` is an unquoted scalar as written. `loose`: it came from a variable or an option, where
    quotes can't say that digits are meant as text.
    """

    value: Any
    where: Where
    text: str | None = None
    loose: bool = False


def raw_of(value: Any, where: Where) -> Raw:
    """Wrap plain data (dicts, lists, scalars), every part standing at `where`."""
    if isinstance(value, dict):
        return Raw({key: raw_of(item, where) for key, item in value.items()}, where)
    if isinstance(value, list):
        return Raw([raw_of(item, where) for item in value], where)
    return Raw(value, where)


def parse_file(data: bytes, file: str, report: Report) -> Raw | None:
    """Return the tree of a YAML file's bytes, an empty file being an empty mapping.

    None: the bytes are no YAML at all, which is in the report; there is nothing to check further.
    """
    if len(data) > MAX_BYTES:
        report.add(
            Where(file, 1), "", "the file is too large", f"expected at most {MAX_BYTES} bytes"
        )
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        report.add(Where(file, line), "", "not UTF-8 text")
        return None
    before = len(report.problems)
    node = _compose(text, file, report)
    if node is not None:
        return _Grower(file, report).grow(node, "", 0)
    return Raw({}, Where(file, 1)) if len(report.problems) == before else None


def parse_scalar(text: str, name: str) -> Raw:
    """Return the tree of a variable's or option's value; text that isn't YAML stands for itself."""
    where = Where(name)
    trial = Report()
    node = _compose(text[:MAX_BYTES], name, trial)
    if node is None:
        return Raw(text if trial.problems else None, where, text=text, loose=True)
    raw = _Grower(name, trial, lines=False).grow(node, "", 0)
    return Raw(text, where, text=text, loose=True) if trial.problems else raw


def _compose(text: str, file: str, report: Report) -> yaml.Node | None:
    try:
        # A SafeLoader that only composes: no constructor runs. The C loader recurses without limit.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        report.add(Where(file, line), "", f"not valid YAML: {_reason(error)}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        report.add(Where(file, line), "", "not valid YAML: a control character")
    except RecursionError:
        allowed = f"expected at most {_MAX_DEPTH} levels"
        report.add(Where(file, 1), "", "not valid YAML: nested too deep", allowed)
    except Exception as error:  # noqa: BLE001 - PyYAML leaks ValueError, OverflowError and others
        report.add(Where(file, 1), "", f"not valid YAML: {type(error).__name__}")
    else:
        return node
    return None


def _reason(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join(" ".join(parts).split())[:200]


class _Grower:
    """Turns composed nodes into Raw values, within the caps."""

    def __init__(self, file: str, report: Report, *, lines: bool = True) -> None:
        self._file = file
        self._report = report
        self._lines = lines
        self._left = _MAX_NODES
        self._constructor = SafeConstructor()

    def grow(self, node: yaml.Node, path: str, depth: int) -> Raw:
        """Return the tree under `node`; what is over a cap or has a foreign tag becomes null."""
        where = self._where(node)
        self._left -= 1
        if self._left <= 0 or depth > _MAX_DEPTH:
            if self._left == 0 or depth > _MAX_DEPTH:
                limits = f"at most {_MAX_NODES} values, {_MAX_DEPTH} levels deep"
                self._report.add(where, path, "too many values or levels", limits)
            return Raw(None, where)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Raw(self._mapping(node, path, depth), where)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = enumerate(node.value)
            return Raw([self.grow(item, f"{path}[{i}]", depth + 1) for i, item in items], where)
        return self._scalar(node, where, path)

    def _where(self, node: yaml.Node) -> Where:
        return Where(self._file, node.start_mark.line + 1 if self._lines else None)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Raw]:
        found: dict[str, Raw] = {}
        merged: dict[str, Raw] = {}
        for key_node, value_node in node.value:
            if self._left <= 0:
                break
            if key_node.tag == _TAG + "merge":
                merged = {**self._merge(value_node, path, depth + 1), **merged}
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            where = self._where(key_node)
            below = f"{path}.{key}" if path else key
            if key in found:
                message = f"given twice, first on line {found[key].where.line}"
                self._report.add(where, below, message, "expected once", kept=True)
                continue
            raw = self.grow(value_node, below, depth + 1)
            found[key] = Raw(raw.value, where, raw.text, raw.loose)
        return {**merged, **found}

    def _key(self, node: yaml.Node, path: str) -> str | None:
        if isinstance(node, yaml.ScalarNode):
            key = self._scalar(node, self._where(node), path).value
            if isinstance(key, str):
                return key
            message = f"the key {str(node.value)[:40]} is not text"
            self._report.add(
                self._where(node), path, message, "expected quotes around it", kept=True
            )
        else:
            message = "a key is a list or mapping"
            self._report.add(self._where(node), path, message, "expected text", kept=True)
        return None

    def _merge(self, node: yaml.Node, path: str, depth: int) -> dict[str, Raw]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Raw] = {}
        for part in nodes:
            value = self.grow(part, path, depth).value
            if isinstance(value, dict):
                merged = {**value, **merged}
            else:
                below = f"{path}.<<" if path else "<<"
                allowed = "expected *anchor of one"
                self._report.add(self._where(part), below, "<< needs a mapping", allowed)
        return merged

    def _scalar(self, node: yaml.Node, where: Where, path: str) -> Raw:
        plain = node.value if isinstance(node, yaml.ScalarNode) and node.style is None else None
        try:
            value = self._construct(node)
            if isinstance(value, str):
                value.encode()  # lone surrogates can't be printed, logged or sent
        except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
            self._report.add(where, path, f"not a value of kind {node.tag}"[:120])
            return Raw(None, where)
        return Raw(value, where, text=plain, loose=not self._lines)

    def _construct(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.YAMLError
        if node.tag in _TEXT_TAGS:
            return node.value
        make = {
            _TAG + "int": self._constructor.construct_yaml_int,
            _TAG + "float": self._constructor.construct_yaml_float,
            _TAG + "bool": self._constructor.construct_yaml_bool,
            _TAG + "null": self._constructor.construct_yaml_null,
        }.get(node.tag)
        if make is None:
            raise yaml.YAMLError
        return make(node)
