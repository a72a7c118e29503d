"""Which files and directories a configuration names that are not here, and which are out of date.

Only looks for them, and at the dates of certificates: what else is in a file, and whether a key in it
will do, is told when it is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from time import time  # noqa: TID251 - certificates have dates

from gateway.config.backends import occurrences
from gateway.config.problems import Report, Where
from gateway.config.schema import Config
from gateway.config.validity import validity_of


def warn_of_files(config: Config, places: Mapping[str, Where], top: Where, report: Report) -> None:
    """Warn of what is to be read or written and is not there, and of certificates out of date."""
    allowed = "expected it where the gateway runs"
    for key, file in _read(config):
        if file is not None and not _is_there(Path(file)):
            report.warn(
                places.get(key, top), key, f"{file} does not exist on this machine", allowed
            )
    for key, file in _shown(config):
        validity = None if file is None else validity_of(file)
        warning = None if validity is None else validity.warning(time())
        if warning is not None:
            report.warn(places.get(key, top), key, f"{file}: {warning}", "expected a valid one")
    for key, file in _written(config):
        if file is not None and not _is_there(Path(file).parent):
            message = f"there is no directory {Path(file).parent} on this machine"
            report.warn(places.get(key, top), key, message, allowed)


def _read(config: Config) -> Iterator[tuple[str, str | None]]:
    yield "admin.key_file", config.admin.key_file
    if config.listen.tls is not None:
        for field in ("cert", "key", "client_ca"):
            yield f"listen.tls.{field}", getattr(config.listen.tls, field)
    for path, backend in occurrences(config):
        yield f"{path}.file", backend.file
        yield f"{path}.api_key_file", backend.api_key_file
        if backend.tls is not None:
            for field in ("ca", "cert", "key"):
                yield f"{path}.tls.{field}", getattr(backend.tls, field)
    for index, model in enumerate(config.models):
        yield f"models[{index}].tokenizer", model.tokenizer
        yield f"models[{index}].chat_template", model.chat_template


def _shown(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield the certificates that are shown to others."""
    if config.listen.tls is not None:
        yield "listen.tls.cert", config.listen.tls.cert
    for path, backend in occurrences(config):
        if backend.tls is not None:
            yield f"{path}.tls.cert", backend.tls.cert


def _written(config: Config) -> Iterator[tuple[str, str | None]]:
    yield "state.path", config.state.path
    yield "record", config.record
    yield "usage_log.path", config.usage_log.path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # not allowed to look, or no possible name
        return False
