"""Checks of a request's framing beyond what llhttp asks, and the errors of the head's limits.

Must never let a request through that a second parser could read otherwise.
"""

from gateway.edge.http import HttpRequest
from gateway.errors import BodyTooLarge, HeadersTooLarge, InvalidRequest


def framing_line(request: HttpRequest) -> bytes:
    """Return the header line that told how long this request's body is."""
    if b"transfer-encoding" in request.picked:
        return b"transfer-encoding: chunked\r\n"
    length = request.picked.get(b"content-length")
    return b"" if length is None else b"content-length: %b\r\n" % length


def check_framing(
    version: str, headers: list[tuple[bytes, bytes]], picked: dict[bytes, bytes]
) -> None:
    """Refuse what llhttp lets pass and a second parser could read otherwise (RFC 9112 6)."""
    if version not in ("1.1", "1.0"):
        raise InvalidRequest("HTTP version not supported: use HTTP/1.1.")
    hosts = sum(1 for name, _ in headers if name.lower() == b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise InvalidRequest("Exactly one Host header is required.")
    coding = picked.get(b"transfer-encoding")
    if coding is not None and (version == "1.0" or coding.strip().lower() != b"chunked"):
        raise InvalidRequest("Transfer-Encoding must be chunked, on HTTP/1.1.")


def headers_too_large(size: int, count: int) -> HeadersTooLarge:
    """Return the error of a head over `size` bytes or `count` fields."""
    return HeadersTooLarge(
        f"Request head over the limit of {size} bytes or "
        f"{count} fields (limits.header_kib, limits.header_count)."
    )


def body_too_large(size: int) -> BodyTooLarge:
    """Return the error of a body over `size` bytes."""
    return BodyTooLarge(f"Request body over the limit of {size} bytes (limits.body_mib).")
