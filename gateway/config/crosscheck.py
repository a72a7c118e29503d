"""Mistakes that take two keys to see: duplicates, references to nothing, contradictions.

Works on the best configuration `validate` could make; what is already reported is not judged
again. Changes nothing.
"""

from collections.abc import Callable, Mapping

from gateway.config.backends import ANY_HOST, KINDS, group_key, occurrences
from gateway.config.forms import entry_path
from gateway.config.identities import check_backends
from gateway.config.places import Places
from gateway.config.problems import Report, Where
from gateway.config.schema import BUILTIN_CLASSES, Config, MatchConfig

_NO_RULE = MatchConfig()
_ONE_DEFAULT = "expected exactly one class with default: true"


def cross_check(config: Config, places: Mapping[str, Where], top: Where, report: Report) -> None:
    """Report every mistake between keys; `top` is where the whole configuration stands."""
    at = Places(places, top, report)
    checks: tuple[Callable[[Config, Places], None], ...] = (
        _listeners,
        _models,
        check_backends,
        _events,
        _tls,
        _weights,
        _rules,
        _keys,
        _classes,  # last: what it says of all of them must not hide who names one that is not there
    )
    for check in checks:
        check(config, at)


def _listeners(config: Config, at: Places) -> None:
    keys = [f"{section}.{key}" for section in ("listen", "admin") for key in ("host", "port")]
    same = config.listen.host == config.admin.host and config.listen.port == config.admin.port
    if same and config.listen.port != 0 and not any(at.bad(key) for key in keys):
        at.add("admin.port", "the same address as listen", "expected another port")


def _models(config: Config, at: Places) -> None:
    if not (config.models or config.backends) and at.sure("models") and at.sure("backends"):
        allowed = "expected models with backends, a list of backends, or --backend URL"
        at.add("models", "no backend is given", allowed)
    seen: dict[str, str] = {}
    for i, model in enumerate(config.models):
        path = f"models[{i}]"
        ids = [(f"{path}.name", model.name)]
        ids += [(f"{path}.aliases[{j}]", alias) for j, alias in enumerate(model.aliases)]
        for where, name in ids:
            if at.bad(where):
                continue
            if name in seen:
                at.add(where, f"{name!a} is already {seen[name]}", "expected each model id once")
            seen.setdefault(name, f"given on {at.of(where)}")
        if not model.backends and not at.bad(f"{path}.backends") and at.merged(path):
            at.add(f"{path}.backends", "the model has no backend", "expected at least one")


def _events(config: Config, at: Places) -> None:
    for path, backend in occurrences(config):
        for key in ("kv_events", "kv_replay"):
            endpoint = getattr(backend, key)
            where = f"{path}.{key}"
            kinds = [kind for kind in KINDS if getattr(backend, kind) is not None]
            unclear = any(at.bad(f"{path}.{kind}") for kind in KINDS)
            if endpoint is None or at.bad(where) or at.bad(path) or unclear:
                continue
            many = endpoint.startswith(f"tcp://{ANY_HOST}:")
            if many and group_key(backend) is None:
                at.add(where, "one backend has one address", "expected tcp://HOST:PORT")
            elif group_key(backend) is not None and not many:
                message = f"every address behind {kinds[0]} has its own"
                at.add(where, message, "expected tcp://*:PORT")
        if backend.kv_replay is not None and backend.kv_events is None:
            at.add(f"{path}.kv_replay", "no kv_events to replay", "expected kv_events too")


def _tls(config: Config, at: Places) -> None:
    for path, backend in occurrences(config):
        tls, where = backend.tls, f"{path}.tls"
        if tls is None or at.bad(path) or at.bad(where):
            continue
        plain = backend.url is not None and backend.url.lower().startswith("http:")
        if plain and not at.bad(f"{path}.url"):
            at.add(where, "the url is not https", "expected https://HOST:PORT as url")
        if tls.key is not None and tls.cert is None and not at.bad(f"{where}.cert"):
            at.add(f"{where}.key", "a key without its certificate", "expected cert too")
        if tls.ca is not None and not tls.verify and not at.bad(f"{where}.verify"):
            at.add(f"{where}.ca", "verify: false asks no authority", "expected one of them")


def _weights(config: Config, at: Places) -> None:
    weights = config.routing.weights
    if weights.prefix + weights.queue + weights.kv <= 0 and not at.bad("routing.weights"):
        at.add("routing.weights", "all weights are 0", "expected at least one above 0")


def _classes(config: Config, at: Places) -> None:
    classes = config.classes
    if not classes or at.bad("classes"):
        return
    defaults = [name for name, cls in classes.items() if cls.default]
    for name in defaults[1:]:
        place = at.of(f"{_class(defaults[0])}.default")
        message = f"{_shown(defaults[0])} on {place} is the default already"
        at.add(f"{_class(name)}.default", message, _ONE_DEFAULT)
    judged = at.sure("classes") and not any(at.bad(f"{_class(name)}.default") for name in classes)
    if not defaults and len(classes) > 1 and judged:
        at.add("classes", "no class is the default", _ONE_DEFAULT)
    shares = sum(cls.share or 0.0 for cls in classes.values())
    if shares > 1 + 1e-9:
        at.add("classes", f"the shares add up to {shares:.6g}", "expected at most 1 together")


def _class(name: str) -> str:
    return entry_path("classes", name, "name")


def _shown(name: str) -> str:
    return _class(name).partition(".")[2]


def _rules(config: Config, at: Places) -> None:
    keys = {key.name for key in config.keys if key.name}
    for name, cls in config.classes.items():
        for i, rule in enumerate(cls.match):
            path = f"{_class(name)}.match[{i}]"
            if rule == _NO_RULE and not _touched(path, at):
                allowed = "expected path, tools, min_prompt_tokens or another"
                at.add(path, "the rule has no condition", allowed)
            if rule.key is not None and rule.key not in keys and at.sure("keys"):
                at.add(f"{path}.key", f"no key is named {rule.key!a}", _names_of(keys))
            low, high = rule.min_prompt_tokens, rule.max_prompt_tokens
            if low is not None and high is not None and low > high:
                allowed = f"expected at least {low}"
                at.add(f"{path}.max_prompt_tokens", "below min_prompt_tokens", allowed)


def _touched(path: str, at: Places) -> bool:
    """Whether anything at or below `path` is reported already."""
    return any(bad == path or bad.startswith(f"{path}.") for bad in at.report.bad)


def _keys(config: Config, at: Places) -> None:
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
                at.add(
                    where, f"the same {field} as on {at.of(seen[value])}", "expected each key once"
                )
            seen.setdefault(value, where)
        if key.class_ is not None and key.class_ not in classes and at.sure("classes"):
            at.add(f"{path}.class", f"no class is named {key.class_!a}", _names_of(classes))


def _names_of(names: Mapping[str, object] | set[str]) -> str:
    if not names:
        return "expected the name of an entry of keys"
    return "expected one of " + ", ".join(sorted(names)[:20])
