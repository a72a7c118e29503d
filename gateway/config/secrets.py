"""Secrets: made, hashed, fetched from variables and files. Never printed or kept anywhere else."""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from gateway.config.problems import ConfigErrors, ConfigProblem
from gateway.config.schema import AdminConfig, BackendConfig

KEY_PREFIX = "rg-"
_KEY_BYTES = 32
_MOST_SECRET_BYTES = 64 * 1024


def new_key() -> str:
    """Return a new client key with 256 bits of entropy from the system."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> str:
    """Return what the configuration keeps of a client key: its SHA-256 in lower-case hex.

    A plain hash is enough: the keys are random, so there is nothing to guess.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def backend_key(backend: BackendConfig, env: Mapping[str, str]) -> str | None:
    """Return the key to send to `backend`, from its variable or file; None = it needs none.

    Reads a small file: call it at start and on reload, not per request.

    Raises:
        ConfigErrors: the variable is not set, or the file is unreadable or empty.
    """
    if backend.api_key_env is not None:
        value = env.get(backend.api_key_env, "").strip()
        return _usable(value, backend, "api_key_env", f"{backend.api_key_env} is not set")
    if backend.api_key_file is not None:
        value, reason = _read(Path(backend.api_key_file))
        return _usable(value, backend, "api_key_file", f"{backend.api_key_file} {reason}")
    return None


def admin_digests(admin: AdminConfig, env: Mapping[str, str]) -> frozenset[str]:
    """Return the SHA-256 of every key the admin listener accepts; empty = it is open.

    Raises:
        ConfigErrors: the variable is not set, or the file is unreadable or empty.
    """
    digests = set() if admin.sha256 is None else {admin.sha256.lower()}
    if admin.key_env is not None:
        value = env.get(admin.key_env, "").strip()
        _check(value, "admin", "key_env", admin.key_env, f"{admin.key_env} is not set")
        digests.add(hash_key(value))
    if admin.key_file is not None:
        value, reason = _read(Path(admin.key_file))
        _check(value, "admin", "key_file", admin.key_file, f"{admin.key_file} {reason}")
        digests.add(hash_key(value))
    return frozenset(digests)


def _read(path: Path) -> tuple[str, str]:
    try:
        with path.open("rb") as stream:
            return stream.read(_MOST_SECRET_BYTES).decode().strip(), "is empty"
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "", "is not UTF-8 text"


def _usable(value: str, backend: BackendConfig, key: str, reason: str) -> str:
    _check(value, f"backend {backend.name}", key, getattr(backend, key), reason)
    return value


def _check(value: str, who: str, key: str, source: str, reason: str) -> None:
    """Raise unless `value`, read from `source`, can be sent in a header."""
    if not value:
        message = reason
    elif not (value.isascii() and value.isprintable()):
        message = f"{source} has what can't be sent in a header"
    else:
        return
    allowed = f"expected the {who.partition(' ')[0]}'s key in it, one line of printable ASCII"
    raise ConfigErrors([ConfigProblem(who, None, key, message, allowed)])
