"""Errors the gateway answers with (contract, section 4). One class per code.

GatewayError
├── InvalidJson, InvalidRequest            400
├── InvalidApiKey                          401
├── PermissionDenied                       403
├── NotFound, ModelNotFound                404
├── MethodNotAllowed                       405
├── RequestTimeout                         408
├── BodyTooLarge                           413
├── UnsupportedEncoding                    415
├── RateLimited, InsufficientQuota,
│   QueueFull, QueueTimeout              429
├── HeadersTooLarge                        431
├── InternalError                          500
├── UpstreamError                          502
├── NoBackend, Overloaded, Draining        503
└── UpstreamTimeout                        504

A message never echoes a body, a key or an address.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import orjson

from gateway.core.types import Outcome


@dataclass
class GatewayError(Exception):
    """An answer the gateway makes itself. `param` names the offending field, if one does."""

    message: str
    param: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = field(default=())

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    anthropic_type: ClassVar[str] = "api_error"
    outcome: ClassVar[Outcome] = Outcome.INTERNAL_ERROR
    should_retry: ClassVar[bool | None] = None

    def __str__(self) -> str:
        """Return code and message, for logs."""
        return f"{self.code}: {self.message}"

    def body(self, *, anthropic: bool = False) -> bytes:
        """Return the JSON body, in OpenAI's form or, on `/v1/messages*`, Anthropic's."""
        if anthropic:
            error = {"type": self.anthropic_type, "message": self.message}
            return orjson.dumps({"type": "error", "error": error})
        error_body = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error_body})


class _BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    outcome = Outcome.BAD_REQUEST


class InvalidJson(_BadRequest):
    """The body is not one JSON object."""

    code = "invalid_json"


class InvalidRequest(_BadRequest):
    """A field that routing reads is missing or of the wrong kind, or the HTTP is malformed."""

    code = "invalid_request"


class InvalidApiKey(GatewayError):
    """No key, or none we know."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"
    anthropic_type = "authentication_error"
    outcome = Outcome.UNAUTHORIZED


class PermissionDenied(GatewayError):
    """The key is valid but may not use this model or path."""

    status = 403
    code = "permission_denied"
    type = "permission_error"
    anthropic_type = "permission_error"
    outcome = Outcome.UNAUTHORIZED


class NotFound(GatewayError):
    """No such route."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"
    anthropic_type = "not_found_error"
    outcome = Outcome.NOT_FOUND


class ModelNotFound(NotFound):
    """No such model."""

    code = "model_not_found"


class MethodNotAllowed(GatewayError):
    """The route exists, for another method."""

    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    outcome = Outcome.NOT_FOUND


class RequestTimeout(_BadRequest):
    """The client did not send its header or body in time."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(_BadRequest):
    """The body, or what it decodes to, is over the limit."""

    status = 413
    code = "body_too_large"
    anthropic_type = "request_too_large"


class UnsupportedEncoding(_BadRequest):
    """A Content-Encoding we do not decode."""

    status = 415
    code = "unsupported_encoding"


class HeadersTooLarge(_BadRequest):
    """The request line or header block is over the limit."""

    status = 431
    code = "headers_too_large"


class RateLimited(GatewayError):
    """The class's (or key's) token bucket cannot pay for this request now."""

    status = 429
    code = "rate_limited"
    type = "rate_limit_error"
    anthropic_type = "rate_limit_error"
    outcome = Outcome.REJECTED_RATE


class InsufficientQuota(RateLimited):
    """The key has used what it may use today: coming back sooner does not help."""

    code = "insufficient_quota"
    type = "insufficient_quota"
    should_retry = False


class QueueFull(RateLimited):
    """The class's queue has no place, or no room for this body."""

    code = "queue_full"
    outcome = Outcome.REJECTED_FULL


class QueueTimeout(RateLimited):
    """No backend could start the request within the time it may wait."""

    code = "queue_timeout"
    outcome = Outcome.EXPIRED


class InternalError(GatewayError):
    """A fault of ours. Its cause is in the log, never in the answer."""


class UpstreamError(GatewayError):
    """The backend broke before its answer's head."""

    status = 502
    code = "upstream_error"
    outcome = Outcome.UPSTREAM_ERROR


class NoBackend(GatewayError):
    """No backend of the model is up."""

    status = 503
    code = "no_backend"
    type = "service_unavailable"
    anthropic_type = "overloaded_error"
    outcome = Outcome.NO_BACKEND


class Overloaded(NoBackend):
    """The gateway itself is at a limit (streams, descriptors)."""

    code = "overloaded"
    outcome = Outcome.REJECTED_FULL


class Draining(NoBackend):
    """The gateway is stopping."""

    code = "draining"
    outcome = Outcome.REJECTED_FULL


class UpstreamTimeout(GatewayError):
    """The backend's answer did not begin, or did not end, in time. A retry repeats the prefill."""

    status = 504
    code = "upstream_timeout"
    outcome = Outcome.UPSTREAM_TIMEOUT
    should_retry = False
