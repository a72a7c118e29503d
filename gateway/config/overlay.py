"""Values from variables and options, laid over the file's tree. Later layers win.

Order: file < `RADIXGATE_*` variables < `--set` < `--backend`. Reads the mapping it is given, never
`os.environ`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence

import msgspec

from gateway.config.meta import keys_of
from gateway.config.problems import Report, Where
from gateway.config.schema import BUILTIN_CLASSES, Config
from gateway.config.tree import Raw, parse_scalar, raw_of

PREFIX = "RADIXGATE_"
ADMIN_KEY = "RADIXGATE_ADMIN_KEY"
"""The key that commands show to an admin listener: a secret, no configuration key."""

_KUBERNETES = re.compile(r"([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)")
"""Variables Kubernetes sets by itself for a Service called radixgate: never ours."""

BUILTIN = Where("built-in")


def lay_env(root: Raw, env: Mapping[str, str], report: Report) -> None:
    """Lay `RADIXGATE_A__B=value` over the tree: a double underscore stands for a dot."""
    sections = keys_of(Config)
    for variable in sorted(name for name in env if name.startswith(PREFIX)):
        rest = variable[len(PREFIX) :]
        parts = rest.lower().split("__")
        if parts[0] not in sections:
            _stray(variable, parts, report)
            continue
        _lay(root, parts, parse_scalar(env[variable], variable), report, exact=False)


def _stray(variable: str, parts: list[str], report: Report) -> None:
    if variable == ADMIN_KEY:
        return
    if len(parts) == 1 and _KUBERNETES.fullmatch(variable[len(PREFIX) :]):
        return
    close = difflib.get_close_matches(parts[0], keys_of(Config), n=1)
    hint = (
        f"did you mean {PREFIX}{close[0].upper()}?"
        if close
        else f"expected {PREFIX}SECTION__KEY=value"
    )
    note = report.add if len(parts) > 1 else report.warn
    note(Where(variable), ".".join(parts)[:200], "sets no configuration key", hint)


def lay_overrides(root: Raw, overrides: Sequence[str], report: Report) -> None:
    """Lay `a.b=value` texts over the tree; list items are `a.0.b` or `a[0].b`."""
    for override in overrides:
        path, equals, value = override.partition("=")
        parts = path.strip().replace("[", ".").replace("]", "").split(".")
        name = f"--set {path.strip()[:80]!s}"
        if not equals or not all(parts):
            report.add(Where("--set"), "", f"{override[:80]!a} sets nothing", "expected a.b=value")
            continue
        _lay(root, parts, parse_scalar(value, name), report, exact=True)


def lay_backends(root: Raw, urls: Sequence[str]) -> None:
    """Append `--backend` URLs to the top-level backends."""
    if not urls:
        return
    where = Where("--backend")
    have = root.value.get("backends")
    items = have.value if have is not None and isinstance(have.value, list) else []
    added = [raw_of({"url": url}, where) for url in urls]
    root.value["backends"] = Raw([*items, *added], where if have is None else have.where)


def _lay(root: Raw, parts: list[str], value: Raw, report: Report, *, exact: bool) -> None:
    if parts[0] == "classes" and len(parts) > 1:
        _seed_classes(root)
    at = root
    for index, part in enumerate(parts[:-1]):
        below = _step(at, part, parts[index + 1], value.where, exact=exact)
        if below is None:
            _no_item(parts, value.where, report)
            return
        at = below
    if isinstance(at.value, list):
        if not _put_item(at.value, parts[-1], value):
            _no_item(parts, value.where, report)
        return
    at.value[_spelled(at.value, parts[-1], exact=exact)] = value


def _step(at: Raw, part: str, following: str, where: Where, *, exact: bool) -> Raw | None:
    """Go to the mapping or list under `part`, made if it isn't there; None = no such list item."""
    made = Raw([] if following.isdecimal() else {}, where)
    if isinstance(at.value, list):
        if part.isdecimal() and len(part) < 6 and int(part) < len(at.value):
            below: Raw = at.value[int(part)]
        elif _put_item(at.value, part, made):
            below = made
        else:
            return None
    else:
        below = at.value.setdefault(_spelled(at.value, part, exact=exact), made)
    if not isinstance(below.value, dict | list):
        below.value, below.where = made.value, where
    return below


def _put_item(items: list[Raw], part: str, value: Raw) -> bool:
    if not part.isdecimal() or len(part) > 5 or int(part) > len(items):
        return False
    items[int(part) : int(part) + 1] = [value]
    return True


def _no_item(parts: list[str], where: Where, report: Report) -> None:
    allowed = "expected an index from 0 to the length"
    report.add(where, ".".join(parts)[:200], "no such list item", allowed)


def _spelled(have: dict[str, Raw], part: str, *, exact: bool) -> str:
    """Return the key as the tree spells it: variables know no case and no hyphen."""
    if exact or part in have:
        return part
    for key in have:
        if key.lower().replace("-", "_") == part.replace("-", "_"):
            return key
    return part


def _seed_classes(root: Raw) -> None:
    """Let an override of a built-in class change that class instead of replacing them all."""
    have = root.value.get("classes")
    if have is None or not have.value:
        root.value["classes"] = raw_of(
            msgspec.to_builtins(BUILTIN_CLASSES),
            BUILTIN,
        )
