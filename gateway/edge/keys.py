"""API keys: known only by their SHA-256, compared by digest look-up, never kept or logged."""

import hashlib
from fnmatch import fnmatchcase

from gateway.config.schema import KeyConfig
from gateway.errors import InvalidApiKey, PermissionDenied


class KeyRing:
    """The keys that are valid on one day. Without configured keys the listener is open."""

    def __init__(self, keys: list[KeyConfig], today: str = "") -> None:
        """Take the keys that have not expired before `today` (UTC, YYYY-MM-DD)."""
        self.open = not keys
        self.today = today
        self._by_digest = {
            key.sha256.lower(): key for key in keys if key.expires is None or key.expires >= today
        }

    def check(self, authorization: bytes | None, x_api_key: bytes | None) -> KeyConfig | None:
        """Return the caller's key, None when the ring is open.

        Raises:
            InvalidApiKey: none given, or none we know.
        """
        if self.open:
            return None
        for secret in (_bearer(authorization), x_api_key):
            if secret:
                # The digest is what is looked up, so timing tells nothing about any key's text.
                key = self._by_digest.get(hashlib.sha256(secret).hexdigest())
                if key is not None:
                    return key
        message = "Missing or unknown API key. Send it as 'Authorization: Bearer …' or 'x-api-key'."
        raise InvalidApiKey(message, headers=(("www-authenticate", "Bearer"),))


def may_use(key: KeyConfig | None, model: str) -> bool:
    """Return whether `key` may use `model` (globs in the key's list)."""
    return key is None or any(fnmatchcase(model, pattern) for pattern in key.models)


def require(key: KeyConfig | None, model: str, *asked: str | None) -> None:
    """Raise PermissionDenied when `key` may use neither `model` nor a name it was `asked` by."""
    if not may_use(key, model) and not any(name and may_use(key, name) for name in asked):
        raise PermissionDenied("This key may not use this model.", param="model")


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, secret = authorization.partition(b" ")
    return secret.strip() or None if scheme.lower() == b"bearer" else None
