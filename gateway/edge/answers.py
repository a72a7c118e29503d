"""Header lines and bodies of the answers the gateway makes itself (contract, sections 3 and 4)."""

import math
import os
import random
import re
from collections.abc import Iterable
from itertools import count

from gateway.core.key_limits import Level, Standing
from gateway.edge.http import HttpRequest
from gateway.errors import GatewayError

JSON = b"content-type: application/json\r\n"
_RETRY_MAX_S = 60.0
_RETRY_DEFAULT_S = 1.0
_RETRY_JITTER = (
    0.5  # refused in the same millisecond, clients return spread over half the wait more
)
_PREFLIGHT = (
    b"access-control-allow-methods: GET, HEAD, POST, OPTIONS\r\naccess-control-max-age: 600\r\n"
)
_ALLOWED = (
    b"authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta, "
    b"x-gateway-class, x-gateway-session, x-gateway-deadline-ms"
)
_ASKED = re.compile(rb"[A-Za-z0-9_\-, ]{1,2048}")
_EXPOSED = (
    b"access-control-expose-headers: x-request-id, retry-after, retry-after-ms, x-should-retry, "
    b"x-gateway-backend, x-gateway-class, x-gateway-policy, x-gateway-prefix, x-gateway-queue-ms, "
    b"x-gateway-attempts, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, "
    b"x-ratelimit-reset-tokens\r\n"
)


class RequestIds:
    """Ids for requests that brought none: unique to this process, cheap, unguessable enough."""

    def __init__(self) -> None:
        self._prefix = b"rg-" + os.urandom(8).hex().encode() + b"-"
        self._next = count(1)

    def new(self) -> bytes:
        """Return a fresh id."""
        return self._prefix + b"%x" % next(self._next)


class Cors:
    """Cross-origin header lines for the configured origins; none by default."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in origins)
        self.any = b"*" in self._origins
        self.on = bool(self._origins)

    def lines(self, request: HttpRequest | None) -> bytes:
        """Return the header lines an answer to `request` carries."""
        if not self._origins or request is None:
            return b""
        origin = request.picked.get(b"origin")
        if origin is None or not (self.any or origin in self._origins):
            return b"vary: origin\r\n"
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n%b" % (origin, _EXPOSED)

    def preflight(self, request: HttpRequest) -> bytes:
        """Return the header lines of an OPTIONS answer: what is asked for is allowed (SDKs add)."""
        asked = request.picked.get(b"access-control-request-headers", b"")
        allowed = asked if _ASKED.fullmatch(asked) else _ALLOWED
        allow = b"access-control-allow-headers: %b\r\n" % allowed
        return self.lines(request) + allow + _PREFLIGHT


def error_lines(error: GatewayError, request_id: bytes, rng: random.Random) -> bytes:
    """Return an error's header lines; every 429 and 503 says when to come back."""
    lines = [b"x-request-id: %b\r\n" % request_id, JSON]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in error.headers]
    if error.status in (429, 503):
        lines.append(_retry_lines(error.retry_after_s, rng))
    if error.should_retry is not None:
        lines.append(b"x-should-retry: %b\r\n" % (b"true" if error.should_retry else b"false"))
    return b"".join(lines)


def limit_lines(standing: Standing) -> bytes:
    """Return the `x-ratelimit-*` lines, in OpenAI's form, of a key's limits per minute."""
    return _level_lines("requests", standing.requests) + _level_lines("tokens", standing.tokens)


def _level_lines(kind: str, level: Level | None) -> bytes:
    if level is None:
        return b""
    return (
        f"x-ratelimit-limit-{kind}: {level.limit}\r\n"
        f"x-ratelimit-remaining-{kind}: {level.left}\r\n"
        f"x-ratelimit-reset-{kind}: {_duration(level.reset_s)}\r\n"
    ).encode()


def _duration(seconds: float) -> str:
    """Return seconds as OpenAI writes them: 120ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    minutes, rest = divmod(ms, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text


def _retry_lines(after_s: float | None, rng: random.Random) -> bytes:
    base = after_s if after_s is not None else _RETRY_DEFAULT_S
    jittered = max(base, 0.05) * (1 + _RETRY_JITTER * rng.random())
    # At the ceiling the spread must lie below it, or every long wait would end in one instant.
    ceiling = _RETRY_MAX_S * (1 - 0.1 * rng.random())
    seconds = min(jittered, ceiling)
    ms = max(1, math.ceil(seconds * 1000))
    return b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, math.ceil(seconds)), ms)
