"""What the edge tells telemetry about one request, and the words it may use. Data only."""

from enum import StrEnum, unique

import msgspec

from gateway.core.types import Outcome


@unique
class AttemptResult(StrEnum):
    """How one upstream attempt ended (`gateway_upstream_attempts_total`)."""

    OK = "ok"
    STATUS_3XX = "3xx"
    STATUS_4XX = "4xx"
    STATUS_5XX = "5xx"
    CONNECT_FAILED = "connect_failed"
    TLS_FAILED = "tls_failed"
    RESET = "reset"
    TIMEOUT = "timeout"
    ABORTED = "aborted"

    __hash__ = str.__hash__  # Enum's own is Python code


@unique
class HandshakeResult(StrEnum):
    """How a client's TLS handshake ended (`gateway_tls_handshakes_total`)."""

    OK = "ok"
    PLAINTEXT = "plaintext"  # it spoke plain HTTP
    CLIENT_CERTIFICATE = "client_certificate"  # it showed none, or none we accept
    REFUSED_BY_CLIENT = "refused_by_client"  # it does not like our certificate
    FAILED = "failed"


@unique
class AdmissionResult(StrEnum):
    """What admission said (`gateway_admission_total`)."""

    ADMITTED = "admitted"
    REJECTED_RATE = "rejected_rate"
    REJECTED_FULL = "rejected_full"
    EXPIRED = "expired"
    NO_BACKEND = "no_backend"
    WITHDRAWN = "withdrawn"

    __hash__ = str.__hash__  # Enum's own is Python code


class RequestRecord(msgspec.Struct, gc=False):
    """One request's story, filled in by the handler and handed to `Telemetry.finished` once.

    `received_at` is monotonic; `*_s` are durations from it, except `queue_s`, the time spent held
    at the gateway. `model` is the configured name, after aliases; `key` the key's configured name,
    never the key. None = not reached or not known. `ran` = its prompt was computed, for all we know;
    `chunks` stands for the answer's tokens where the engine did not tell them.
    """

    request_id: str
    api: str
    received_at: float
    cls: str | None = None
    model: str | None = None
    backend: str | None = None
    key: str | None = None
    status: int = 0
    outcome: Outcome = Outcome.INTERNAL_ERROR
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    predicted_tokens: int | None = None
    cached_tokens: int | None = None
    attempts: int = 0
    stream: bool = False
    client: str | None = None
    reason: str | None = None
    ran: bool = False
    chunks: int = 0
    trace_id: str | None = None  # 32 hex digits, while the request is traced

    @property
    def used_completion_tokens(self) -> int:
        """Tokens of the answer, those that came before a broken end included."""
        told = self.completion_tokens
        return self.chunks if told is None else told
