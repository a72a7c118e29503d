"""Secrets: made, hashed, fetched from variables and files. Never printed or kept anywhere else."""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from gateway.config.problems import ConfigErrors, ConfigProblem
from gateway.config.schema import BackendConfig

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


def _read(path: Path) -> tuple[str, str]:
    try:
        with path.open("rb") as stream:
            return stream.read(_MOST_SECRET_BYTES).decode().strip(), "is empty"
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "", "is not UTF-8 text"


def _usable(value: str, backend: BackendConfig, key: str, reason: str) -> str:
    allowed = "expected the backend's key in it, one line of printable ASCII"
    if not value:
        problem = ConfigProblem(f"backend {backend.name}", None, key, reason, allowed)
    elif not (value.isascii() and value.isprintable()):
        message = f"{getattr(backend, key)} has what can't be sent in a header"
        problem = ConfigProblem(f"backend {backend.name}", None, key, message, allowed)
    else:
        return value
    raise ConfigErrors([problem])
