"""HTTP/1.1 messages as the data listener sees them: a request's head, sorted, and answer heads.

A head is walked once: each header is forwarded, picked for our own use, or dropped. Dropped are
hop-by-hop fields (RFC 9110 7.6.1), credentials, and everything that steers an engine or this
gateway; they never reach a backend.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from gateway.config.schema import KeyConfig
from gateway.edge.routes import Route
from gateway.errors import GatewayError
from gateway.relay.heads import HOP_BY_HOP

Header = tuple[bytes, bytes]

_PICKED = frozenset(  # read by us and not forwarded
    {
        b"authorization",
        b"x-api-key",
        b"x-request-id",
        b"x-forwarded-for",
        b"accept-encoding",
        b"content-encoding",
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"host",
    }
)
_LISTS = frozenset({b"x-forwarded-for", b"accept-encoding", b"content-encoding"})
_NOTED = frozenset(  # read by us and forwarded
    {
        b"user-agent",
        b"content-type",
        b"origin",
        b"access-control-request-headers",
        b"x-session-id",
        b"session_id",
        b"session-id",
        b"x-claude-code-session-id",
        b"x-session-affinity",
        b"x-stainless-read-timeout",
        b"x-stainless-timeout",
        b"conversation_id",
        b"x-opencode-session",
        b"x-task-id",
        b"traceparent",
    }
)
_STEERING = frozenset(  # forwarded headers that vLLM obeys, or that would lie about the client
    {
        b"x-vllm-priority",
        b"x-data-parallel-rank",
        b"endpoint-load-metrics-format",
        b"forwarded",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)
_DROPPED = HOP_BY_HOP | _STEERING
_GATEWAY_PREFIX = b"x-gateway-"
_SESSION_HEADERS = (
    b"x-gateway-session",
    b"x-session-id",
    b"session_id",
    b"session-id",
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"conversation_id",
    b"x-opencode-session",
    b"x-task-id",
)
# (header, its units in a second): the first in our words, the others of the OpenAI and Anthropic SDKs
_PATIENCE = (
    (b"x-gateway-deadline-ms", 1000.0),
    (b"x-stainless-read-timeout", 1.0),
    (b"x-stainless-timeout", 1.0),
)
_MAX_PATIENCE_S = 86_400.0
_AUTHORITY = re.compile(rb"[^/?]*")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class Plan(msgspec.Struct):
    """What a head alone decides under one configuration; shared by all requests with that head.

    `patience_s` is how long the client says it waits for a first byte. `lines` are the header lines
    a backend gets but for the request id and the length; `plain` the same when the answer must come
    without a content coding. Both are empty until first used.
    """

    coding: str | None = None
    forced_class: str | None = None
    patience_s: float | None = None
    lines: bytes = b""
    plain: bytes = b""


class HttpRequest(msgspec.Struct):
    """One request. `body` is complete when the request reaches the handler."""

    method: str
    path: str
    query: bytes  # with its "?", byte for byte; b"" without one
    version_11: bool
    keep_alive: bool
    received_at: float
    picked: dict[bytes, bytes]
    forward: bytes  # header lines for the backend, each ending in CRLF
    body: bytes = b""
    route: Route | None = None
    key: KeyConfig | None = None
    error: GatewayError | None = None
    request_id: bytes = b""
    user_agent: str = ""
    session: str | None = None  # the conversation id the client's headers name, if any
    era: object = None  # the configuration (`Handler.era`) under which route and key were found
    named: bool = False  # the client brought the request id
    plan: Plan = msgspec.field(default_factory=Plan)  # the handler's; of all with the same head

    def text(self, name: bytes) -> str | None:
        """Return a picked header as text."""
        value = self.picked.get(name)
        return None if value is None else value.decode("latin-1")


def origin_form(target: bytes) -> bytes:
    """Return an absolute-form target's path and query (RFC 9112 3.2.2), any other unchanged."""
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return target
    authority = _AUTHORITY.match(rest)
    tail = rest[authority.end() if authority else 0 :]
    return tail if tail.startswith(b"/") else b"/" + tail


def path_of(target: bytes) -> str:
    """Return a request target's path, however little of it came."""
    return origin_form(target).partition(b"?")[0].decode("latin-1")


def sort_headers(headers: Iterable[Header]) -> tuple[dict[bytes, bytes], bytes]:
    """Return (picked headers by lower-case name, header lines to forward).

    A header picked twice keeps its first value, except `x-request-id`, where two are none, and
    lists, which continue.
    """
    picked: dict[bytes, bytes] = {}
    forward: list[bytes] = []
    nominated: list[bytes] = []
    for name, value in headers:
        low = name.lower()
        if low in _PICKED:
            _pick(picked, low, value)
        elif low in _DROPPED:
            if low == b"connection":
                nominated += [token.strip().lower() for token in value.split(b",")]
        elif low.startswith(_GATEWAY_PREFIX):
            picked.setdefault(low, value)
        else:
            if low in _NOTED:
                picked.setdefault(low, value)
            forward.append(b"%b: %b\r\n" % (name, value))
    if nominated:
        forward = _without(forward, nominated)
    return picked, b"".join(forward)


def session_of(picked: dict[bytes, bytes]) -> str | None:
    """Return the conversation id a request's headers name, if any."""
    for name in _SESSION_HEADERS:
        value = picked.get(name)
        if value:
            return value[:256].decode("latin-1")
    return None


def patience_of(picked: dict[bytes, bytes]) -> float | None:
    """Return the seconds after which the client gives up, the least of what it says sensibly."""
    least = None
    for name, units in _PATIENCE:
        stated = picked.get(name)
        if stated is None:
            continue
        try:
            seconds = float(stated) / units
        except ValueError:
            continue
        if 0.0 < seconds < _MAX_PATIENCE_S and (least is None or seconds < least):
            least = seconds
    return least


def client_request_id(picked: dict[bytes, bytes]) -> bytes | None:
    """Return the client's request id when it is one we accept (contract, section 3)."""
    value = picked.get(b"x-request-id")
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


def answer_head(status: int, headers: bytes, length: int, request: HttpRequest | None) -> bytes:
    """Return the head of an answer of ours; `headers` are CRLF-terminated lines.

    A 204 has no body, so it must not tell its length (RFC 9110 8.6).
    """
    keep = request is not None and request.keep_alive
    old = request is not None and not request.version_11
    connection = b"connection: keep-alive\r\n" if old else b""
    if not keep:
        connection = b"connection: close\r\n"
    size = b"content-length: %d\r\n" % length if status != 204 else b""
    return b"%b%b%b%b\r\n" % (STATUS_LINES[status], headers, size, connection)


def _pick(picked: dict[bytes, bytes], low: bytes, value: bytes) -> None:
    if low not in picked:
        picked[low] = value
    elif low == b"x-request-id":
        picked[low] = b""
    elif low in _LISTS:
        picked[low] += b", " + value


def _without(lines: list[bytes], nominated: list[bytes]) -> list[bytes]:
    drop = frozenset(nominated)
    return [line for line in lines if line.partition(b":")[0].lower() not in drop]
