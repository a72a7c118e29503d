"""Optional dependencies, imported when they are first needed, with one clear error when missing.

Must never import anything but what was asked for.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


class MissingExtra(ValueError):
    """A feature was configured whose packages are not installed; the message says how to."""


_NEEDED = {
    "tokens": ("tokenizers", "jinja2"),
    "events": ("zmq",),
    "discovery": ("dns",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def is_missing(extra: str) -> bool:
    """Return whether a package of `extra` is not installed; nothing of it is run."""
    return not all(_is_there(module) for module in _NEEDED[extra])


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # what holds it is not there
        return False


def load_zmq(needed_by: str) -> ModuleType:
    """Return pyzmq. `needed_by` is what asked for it, in the user's words.

    Raises:
        MissingExtra: it is not installed.
    """
    return _load("zmq", needed_by, "events")


def load_otel(needed_by: str) -> ModuleType:
    """Return OpenTelemetry's OTLP exporter, as `load_zmq` does pyzmq."""
    return _load("opentelemetry.exporter.otlp.proto.http.trace_exporter", needed_by, "otel")


def load_optuna(needed_by: str) -> ModuleType:
    """Return optuna, as `load_zmq` does pyzmq."""
    return _load("optuna", needed_by, "tune")


def load_figure(needed_by: str) -> ModuleType:
    """Return the part of matplotlib that draws without a screen, as `load_zmq` does pyzmq."""
    return _load("matplotlib.figure", needed_by, "tune")


def load_rich(needed_by: str) -> ModuleType:
    """Return rich with what draws a live screen, as `load_zmq` does pyzmq."""
    for module in ("rich.live", "rich.text"):
        _load(module, needed_by, "top")
    return _load("rich", needed_by, "top")


def load_dns(needed_by: str) -> ModuleType:
    """Return dnspython with its asynchronous resolver, as `load_zmq` does pyzmq."""
    _load("dns.asyncresolver", needed_by, "discovery")
    return _load("dns", needed_by, "discovery")


def _load(module: str, needed_by: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra(
            f"{needed_by} needs the extra `{extra}`: pip install '.[{extra}]' in the clone"
        ) from None
