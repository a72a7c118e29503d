"""The `--gateway` of the commands that ask a running gateway: its admin listener's URL.

One place says what is one and what is not. Must never contact it.
"""

import argparse
from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT = "http://127.0.0.1:9090"


class NoGatewayUrl(Exception):
    """The argument is no URL of a gateway; the message says why."""


@dataclass(slots=True, frozen=True)
class GatewayUrl:
    """An admin listener. `base` is the path before its routes (usually empty), `text` the whole."""

    text: str
    tls: bool
    host: str
    port: int | None
    base: str


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--gateway`."""
    parser.add_argument(
        "--gateway",
        metavar="URL",
        default=DEFAULT,
        help="admin listener of the gateway (default %(default)s)",
    )


def parse(text: str) -> GatewayUrl:
    """Return the URL that an argument gives.

    Raises:
        NoGatewayUrl: it is none.
    """
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise NoGatewayUrl(f"{text} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not host or url.query or url.fragment:
        raise NoGatewayUrl(f"{text} is no URL such as {DEFAULT}")
    base = url.path.rstrip("/")
    return GatewayUrl(text.rstrip("/"), url.scheme == "https", host, port, base)
