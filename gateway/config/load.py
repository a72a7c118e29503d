"""From a file, variables and options to one checked Config, or to all of its mistakes.

Raises ConfigErrors and nothing else, whatever the file holds. Reads the file and nothing beside
it: whether the files it names are there is only looked up, secrets are read later, by
`secrets.backend_key`.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from gateway.config.backends import Names, occurrences
from gateway.config.crosscheck import cross_check
from gateway.config.files import warn_of_files
from gateway.config.installed import warn_of_missing
from gateway.config.overlay import lay_backends, lay_env, lay_overrides
from gateway.config.problems import ConfigErrors, ConfigProblem, Report, Where
from gateway.config.schema import Config
from gateway.config.tree import MAX_BYTES, Raw, parse_file
from gateway.config.validate import Validator


@dataclass(slots=True, frozen=True)
class Loaded:
    """A checked configuration. `origins` has the place of each given key path; others: default."""

    config: Config
    origins: dict[str, str]
    warnings: tuple[ConfigProblem, ...] = ()


def load(
    path: str | PathLike[str] | None = None,
    *,
    backends: Sequence[str] = (),
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """Load and check: defaults < file < `env` < `overrides` (`a.b=value`) < `backends` (URLs).

    Raises:
        ConfigErrors: the file can't be read or anything in it is wrong; lists every mistake.
    """
    report = Report()
    file = "configuration" if path is None else fspath(path)
    top = Where(file, None if path is None else 1)
    root = Raw({}, top) if path is None else _read(Path(path), file, report)
    lay_env(root, env or {}, report)
    lay_overrides(root, overrides, report)
    lay_backends(root, backends)
    validator = Validator(report)
    config = validator.config(root)
    cross_check(config, validator.places, top, report)
    report.raise_any()
    _warn(config, validator.places, env, top, report)
    warn_of_files(config, validator.places, top, report)
    warn_of_missing(config, validator.places, top, report)
    origins = {key: str(where) for key, where in validator.places.items()}
    return Loaded(config, origins, tuple(report.warnings))


_KEY_IN_CLEAR = "the admin listener speaks plain HTTP: its key can be read on the way"


def _read(path: Path, file: str, report: Report) -> Raw:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = ConfigProblem(file, None, "", f"cannot be read: {reason}", "expected a YAML file")
        raise ConfigErrors([problem]) from None
    root = parse_file(data, file, report)
    if root is None:
        report.raise_any()
    if root is not None and isinstance(root.value, dict):
        return root
    if root is not None and root.value is not None:
        report.add(root.where, "", "the file is not a mapping", "expected keys such as listen")
    return Raw({}, Where(file, 1))


def _warn(
    config: Config,
    places: Mapping[str, Where],
    env: Mapping[str, str] | None,
    top: Where,
    report: Report,
) -> None:
    if not config.keys and not _is_loopback(config.listen.host):
        report.warn(
            places.get("listen.host", top),
            "keys",
            f"open to everyone who can reach {config.listen.host}",
            "expected keys (`radixgate key new NAME`), or listen.host 127.0.0.1",
        )
    admin = config.admin
    keyed = admin.key_env or admin.key_file or admin.sha256
    if not _is_loopback(admin.host):
        report.warn(
            places.get("admin.host", top),
            "admin.host",
            _KEY_IN_CLEAR if keyed else "the admin listener has no key",
            "expected 127.0.0.1, or an operators' network"
            if keyed
            else "expected admin.key_env, key_file or sha256, 127.0.0.1, or an operators' network",
        )
    for path, backend in occurrences(config):
        variable = backend.api_key_env
        if variable is not None and env is not None and not env.get(variable):
            where = places.get(f"{path}.api_key_env", top)
            allowed = "expected the backend's key in it when serving"
            report.warn(where, f"{path}.api_key_env", f"{variable} is not set", allowed)
        if backend.tls is not None and not backend.tls.verify:
            where = places.get(f"{path}.tls.verify", top)
            message = "anyone who answers there is believed and gets the backend's key"
            report.warn(where, f"{path}.tls.verify", message, "expected tls.ca instead")
    _warn_blind(config, places, top, report)


def _warn_blind(config: Config, places: Mapping[str, Where], top: Where, report: Report) -> None:
    """Say which KV events tell nothing: they are token ids, and no prompt of ours is."""
    names = Names(config)
    counted = {
        names.of(backend)
        for model in config.models
        if model.tokenizer is not None
        for backend in model.backends
    }
    for path, backend in occurrences(config):
        if backend.kv_events is not None and names.of(backend) not in counted:
            key = f"{path}.kv_events"
            message = "not read: no model of this backend has a tokenizer"
            report.warn(places.get(key, top), key, message, "expected tokenizer on the model")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
