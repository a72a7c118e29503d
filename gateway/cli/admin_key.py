"""The key that a command shows to a gateway's admin listener: from a variable, never an argument.

Arguments stand in process lists and shell histories. Must never print the key.
"""

import argparse
import os

from gateway.config.overlay import ADMIN_KEY


class NoAdminKey(Exception):
    """The variable that was named holds no key that can be sent."""


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--admin-key-env`."""
    parser.add_argument(
        "--admin-key-env",
        metavar="NAME",
        help=f"environment variable with the admin listener's key (default: {ADMIN_KEY}, if set)",
    )


def admin_headers(args: argparse.Namespace) -> dict[str, str]:
    """Return the headers to send; none without a key.

    Raises:
        NoAdminKey: the variable that was named is not set, or holds what no header can.
    """
    name = args.admin_key_env or ADMIN_KEY
    key = os.environ.get(name, "").strip()
    if not key:
        if args.admin_key_env:
            raise NoAdminKey(f"{name} is not set")
        return {}
    if not (key.isascii() and key.isprintable()):
        raise NoAdminKey(f"{name} has what can't be sent in a header")
    return {"authorization": f"Bearer {key}"}
