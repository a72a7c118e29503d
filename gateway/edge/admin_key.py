"""The admin listener's own key: who has none sees only whether the gateway lives and is ready.

Keys are known by their SHA-256 and looked up by it, so timing tells nothing about any key's text.
Must never log or keep what was sent.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.errors import InvalidApiKey

_OPEN = frozenset({"/healthz", "/readyz"})  # load balancers and orchestrators ask without a key
# A browser asks its user for the second; programs send the first. A header of its own for each:
# Chromium looks at one challenge per header and knows no Bearer.
_CHALLENGES = (
    ("www-authenticate", "Bearer"),
    ("www-authenticate", 'Basic realm="radixgate admin", charset="UTF-8"'),
)


def key_required(
    digests: Callable[[], frozenset[str]], refused: Callable[[str], None]
) -> Middleware:
    """Return what lets only holders of a key pass; `digests` empty = everyone.

    `refused` hears `missing` or `wrong` for each request that is refused.
    """

    @web.middleware
    async def ask_for_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        known = digests()
        if known and request.path not in _OPEN:
            secret = _secret(request.headers.get("authorization", ""))
            if secret is None or hashlib.sha256(secret).hexdigest() not in known:
                refused("missing" if secret is None else "wrong")
                raise InvalidApiKey(
                    "The admin listener wants its key: 'Authorization: Bearer ...', or as the "
                    "password of any user.",
                    headers=_CHALLENGES,
                )
        return await handler(request)

    return ask_for_key


def _secret(authorization: str) -> bytes | None:
    """Return the key that a header brings, as a bearer token or as Basic's password."""
    scheme, _, value = authorization.partition(" ")
    value = value.strip()
    if not value:
        return None
    if scheme.lower() == "bearer":
        return value.encode("utf-8", "surrogateescape")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] or None
    except (binascii.Error, ValueError):
        return None
