"""Optional dependencies, imported when they are first needed, with one clear error when missing.

Must never import anything but what was asked for.
"""

from importlib import import_module
from types import ModuleType


class MissingExtra(ValueError):
    """A feature was configured whose packages are not installed; the message says how to."""


def load_zmq(needed_by: str) -> ModuleType:
    """Return pyzmq. `needed_by` is what asked for it, in the user's words.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return import_module("zmq")
    except ImportError:
        raise MissingExtra(
            f"{needed_by} needs the extra `events`: pip install '.[events]' in the clone"
        ) from None
