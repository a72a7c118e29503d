"""Checks of texts by form: addresses, names, hashes. Pure: nothing is resolved or opened."""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from urllib.parse import urlsplit


@dataclass(slots=True, frozen=True)
class Form:
    """`ok` judges a text; `allowed` says in words what passes; `numbers` may be unquoted."""

    ok: Callable[[str], bool]
    allowed: str
    numbers: bool = False


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda text: compiled.fullmatch(text) is not None


def _is_text(text: str) -> bool:
    return 0 < len(text) <= 4096 and text.isprintable()


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _is_hostname(text) and not text.rpartition(".")[2].isdigit()
    return True


_is_hostname = _matches(r"(?=.{1,253}\.?$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _is_root_url(text: str, schemes: tuple[str, ...] = ("http", "https")) -> bool:
    """Whether `text` is scheme://host[:port][/] and no more: a path, query or password is a slip."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    if parts.scheme not in schemes or not host or port == 0 or "@" in parts.netloc:
        return False
    if parts.path not in {"", "/"} or "?" in text or "#" in text or parts.netloc.endswith(":"):
        return False
    return _is_text(text) and _is_host(host)


def _is_zmq(text: str) -> bool:
    if text.startswith("ipc://"):
        return _is_text(text) and len(text) > len("ipc://")
    named = text.replace("tcp://*:", "tcp://any:", 1)  # every address behind a dns name
    return _is_root_url(named, ("tcp",)) and urlsplit(named).port is not None


_is_port_name = _matches(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _is_port(text: str) -> bool:
    if text.isdecimal():
        return len(text) <= 5 and 1 <= int(text) <= 65535
    return _is_port_name(text)


def split_address(text: str) -> tuple[str, int | None] | None:
    """Return the IP address and port in ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT; None = neither."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    if port and not (port.isascii() and port.isdecimal() and _is_port(port)):
        return None
    return host, int(port) if port else None


def _is_origin(text: str) -> bool:
    return text == "*" or (_is_root_url(text) and not text.endswith("/"))


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return len(text) == len("2026-01-31")


FORMS: dict[str, Form] = {
    "text": Form(_is_text, "1 to 4096 printable characters"),
    "name": Form(
        _matches(r"[A-Za-z0-9_\[][A-Za-z0-9_.:@\[\]-]{0,127}"),
        "letters, digits and _ . : @ -, at most 128",
    ),
    "host": Form(_is_host, "a host name or IP address, without scheme or port"),
    "url": Form(
        _is_root_url,
        "http://HOST:PORT or https://HOST:PORT, without /v1, user or query",
    ),
    "zmq": Form(_is_zmq, "tcp://HOST:PORT or ipc://PATH (with dns, tcp://*:PORT)"),
    "env_name": Form(
        _matches(r"[A-Za-z_][A-Za-z0-9_]{0,127}"), "the name of an environment variable"
    ),
    "path": Form(_matches(r"/[\x21-\x7e]{0,255}"), "a path that begins with /"),
    "sha256": Form(
        _matches(r"[0-9a-fA-F]{64}"), "64 hex digits, as `radixgate key new NAME` prints them"
    ),
    "origin": Form(_is_origin, 'https://HOST[:PORT] without a path, or "*"'),
    "port": Form(_is_port, "the name of a port, or a number from 1 to 65535", numbers=True),
    "address": Form(
        lambda text: split_address(text) is not None, "an IP address, or one with :PORT behind it"
    ),
    "date": Form(_is_date, "a date such as 2027-01-31"),
    "network": Form(_is_network, "an IP address or network such as 10.0.0.0/8"),
}


def entry_path(path: str, name: str, form: str | None) -> str:
    """Return the key path of an entry of a mapping; a name that is none is quoted and cut."""
    readable = form is None or FORMS[form].ok(name)
    return f"{path}.{name}" if readable else f"{path}.{name[:40]!a}"
