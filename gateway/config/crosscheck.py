"""Mistakes that take two keys to see: duplicates, references to nothing, contradictions.

Works on the best configuration `validate` could make; what is already reported is not judged
again. Changes nothing.
"""

from collections.abc import Callable, Mapping

from gateway.config.backends import MERGED, Names, address, backends_of, occurrences
from gateway.config.problems import Report, Where
from gateway.config.schema import BUILTIN_CLASSES, BackendConfig, Config, MatchConfig
from gateway.core.trie import MAX_SLOTS

_NO_RULE = MatchConfig()


class _Places:
    """Where key paths stand: the path's own line, else that of what holds it."""

    def __init__(self, places: Mapping[str, Where], top: Where, report: Report) -> None:
        self._places = places
        self._top = top
        self.report = report

    def of(self, path: str) -> Where:
        while path:
            if path in self._places:
                return self._places[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._top

    def add(self, path: str, message: str, allowed: str) -> None:
        self.report.add(self.of(path), path, message, allowed)

    def bad(self, path: str) -> bool:
        """Whether `path` or what holds it is already reported."""
        while path:
            if path in self.report.bad:
                return True
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return False


def cross_check(config: Config, places: Mapping[str, Where], top: Where, report: Report) -> None:
    """Report every mistake between keys; `top` is where the whole configuration stands."""
    at = _Places(places, top, report)
    count = len(backends_of(config))
    if count > MAX_SLOTS:
        report.add(top, "", f"{count} backends are given", f"at most {MAX_SLOTS}")
    checks: tuple[Callable[[Config, _Places], None], ...] = (
        _listeners,
        _models,
        _addresses,
        _identities,
        _weights,
        _classes,
        _rules,
        _keys,
    )
    for check in checks:
        check(config, at)


def _listeners(config: Config, at: _Places) -> None:
    same = config.listen.host == config.admin.host and config.listen.port == config.admin.port
    if same and config.listen.port != 0 and not at.bad("listen") and not at.bad("admin"):
        at.add("admin.port", "the same address as listen", "another port")


def _models(config: Config, at: _Places) -> None:
    if not config.models and not config.backends and not (at.bad("models") or at.bad("backends")):
        at.add("models", "no backend is given", "models with backends, backends, or --backend URL")
    seen: dict[str, str] = {}
    for i, model in enumerate(config.models):
        path = f"models[{i}]"
        ids = [(f"{path}.name", model.name)]
        ids += [(f"{path}.aliases[{j}]", alias) for j, alias in enumerate(model.aliases)]
        for where, name in ids:
            if at.bad(where):
                continue
            if name in seen:
                at.add(where, f"{name!a} is already {seen[name]}", "each model id once")
            seen.setdefault(name, f"given on {at.of(where)}")
        if not model.backends and not at.bad(f"{path}.backends"):
            at.add(f"{path}.backends", "the model has no backend", "at least one")


def _addresses(config: Config, at: _Places) -> None:
    defined = {b.name for _, b in occurrences(config) if address(b) is not None}
    for path, backend in occurrences(config):
        if any(at.bad(f"{path}.{key}") for key in ("url", "dns", "port", "name")):
            continue
        if backend.url is not None and backend.dns is not None:
            at.add(f"{path}.dns", "both url and dns are given", "one of them")
        elif backend.dns is not None and backend.port is None:
            at.add(f"{path}.port", "dns is given without port", "a port from 1 to 65535")
        elif backend.url is not None and backend.port is not None:
            at.add(f"{path}.port", "port belongs to dns", "the port inside url")
        elif address(backend) is None and backend.name not in defined:
            at.add(f"{path}.url", "the backend has no address", "url, or dns and port")
        if backend.api_key_env is not None and backend.api_key_file is not None:
            at.add(f"{path}.api_key_file", "api_key_env is given as well", "one of them")


def _identities(config: Config, at: _Places) -> None:
    names = Names(config)
    first: dict[str, tuple[str, BackendConfig]] = {}
    in_list: set[tuple[str, str]] = set()
    for path, backend in occurrences(config):
        name = names.of(backend)
        if not name or at.bad(f"{path}.name") or at.bad(f"{path}.url") or at.bad(f"{path}.dns"):
            continue
        key = f"{path}.name" if backend.name is not None else f"{path}.url"
        if backend.dns is not None and backend.name is None:
            key = f"{path}.dns"
        held = first.get(name)
        holder = path.rpartition("[")[0]
        if held is not None and _differ(held[1], backend):
            at.add(
                key,
                f"{name!a} is already another backend, on {at.of(held[0])}",
                "a name of its own",
            )
        elif backend.name is not None and backend.name != name:
            at.add(
                key, f"{backend.name!a} has the same address as {name!a}", "one name per address"
            )
        elif (holder, name) in in_list:
            at.add(key, f"{name!a} is listed twice", "each backend once")
        elif held is not None:
            _agree(path, held, backend, at)
        in_list.add((holder, name))
        if held is None or address(held[1]) is None:
            first[name] = (path, backend)


def _differ(first: BackendConfig, second: BackendConfig) -> bool:
    one, other = address(first), address(second)
    return one is not None and other is not None and one != other


def _agree(path: str, held: tuple[str, BackendConfig], second: BackendConfig, at: _Places) -> None:
    plain = BackendConfig()
    for key in MERGED:
        stated = {getattr(held[1], key), getattr(second, key)} - {getattr(plain, key)}
        if len(stated) > 1:
            place = at.of(f"{held[0]}.{key}")
            at.add(f"{path}.{key}", f"differs from the same backend on {place}", "the same value")


def _weights(config: Config, at: _Places) -> None:
    weights = config.routing.weights
    if weights.prefix + weights.queue + weights.kv <= 0 and not at.bad("routing.weights"):
        at.add("routing.weights", "all weights are 0", "at least one above 0")


def _classes(config: Config, at: _Places) -> None:
    classes = config.classes
    if not classes or at.bad("classes"):
        return
    defaults = [name for name, cls in classes.items() if cls.default]
    for name in defaults[1:]:
        at.add(
            f"classes.{name}.default",
            f"{defaults[0]} on {at.of(f'classes.{defaults[0]}.default')} is the default already",
            "exactly one class with default: true",
        )
    judged = not any(at.bad(f"classes.{name}.default") for name in classes)
    if not defaults and len(classes) > 1 and judged:
        at.add("classes", "no class is the default", "exactly one class with default: true")
    shares = sum(cls.share or 0.0 for cls in classes.values())
    if shares > 1 + 1e-9:
        at.add("classes", f"the shares add up to {shares:.6g}", "at most 1 together")


def _rules(config: Config, at: _Places) -> None:
    keys = {key.name for key in config.keys if key.name}
    for name, cls in config.classes.items():
        for i, rule in enumerate(cls.match):
            path = f"classes.{name}.match[{i}]"
            if rule == _NO_RULE and not _touched(path, at):
                at.add(path, "the rule has no condition", "path, tools, min_prompt_tokens, ...")
            if rule.key is not None and rule.key not in keys:
                at.add(f"{path}.key", f"no key is named {rule.key!a}", _names_of(keys))
            low, high = rule.min_prompt_tokens, rule.max_prompt_tokens
            if low is not None and high is not None and low > high:
                at.add(f"{path}.max_prompt_tokens", "below min_prompt_tokens", f"at least {low}")


def _touched(path: str, at: _Places) -> bool:
    """Whether anything at or below `path` is reported already."""
    return any(bad == path or bad.startswith(f"{path}.") for bad in at.report.bad)


def _keys(config: Config, at: _Places) -> None:
    names: dict[str, str] = {}
    hashes: dict[str, str] = {}
    classes = config.classes or BUILTIN_CLASSES
    for i, key in enumerate(config.keys):
        path = f"keys[{i}]"
        for field, value, seen in (
            ("name", key.name, names),
            ("sha256", key.sha256.lower(), hashes),
        ):
            where = f"{path}.{field}"
            if at.bad(where):
                continue
            if value in seen:
                at.add(where, f"the same {field} as on {at.of(seen[value])}", "each key once")
            seen.setdefault(value, where)
        if key.class_ is not None and key.class_ not in classes and not at.bad("classes"):
            at.add(f"{path}.class", f"no class is named {key.class_!a}", _names_of(classes))


def _names_of(names: Mapping[str, object] | set[str]) -> str:
    return "one of " + ", ".join(sorted(names)[:20]) if names else "none is configured"
