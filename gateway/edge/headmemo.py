"""Remembers a connection's last request head, so that the same head need not be parsed again.

An SDK sends the same bytes with every request on a connection, but for the Content-Length's digits.
A head that equals one llhttp has accepted, digits aside, means the same (measured: parsing and
sorting a head of 11 fields costs 25-30 µs, recognising it 1 µs). Anything else is not recognised
and goes to the parser. Lives and dies with its connection, as it holds the head's credentials.
"""

import re

from gateway.edge.http import HttpRequest

MAX_HEAD = 16 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_SPECIAL = re.compile(rb"\r\n(?:expect|transfer-encoding|upgrade):", re.IGNORECASE)
_MAX_DIGITS = 12
_MAX_MISSES = 8  # heads noted in vain before a connection is believed to vary them


class HeadMemo:
    """One connection's memory of one head."""

    __slots__ = ("_misses", "_prefix", "_suffix", "_template")

    def __init__(self) -> None:
        self._template: HttpRequest | None = None
        self._prefix = self._suffix = b""
        self._misses = 0

    def note(self, data: bytes, request: HttpRequest) -> None:
        """Remember the head that `data` begins with, which was parsed as `request`."""
        self._template = None
        if self._misses >= _MAX_MISSES:
            return
        self._misses += 1
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0 or not request.keep_alive or not request.version_11:
            return
        found = _LENGTH.search(data, 0, end + 2)
        if found is None or _SPECIAL.search(data, 0, end + 2) is not None:
            return
        self._prefix = data[: found.start(1)]
        self._suffix = data[found.end(1) : end + 4]
        self._template = request

    def renew(self, request: HttpRequest) -> None:
        """Remember what a change of the configuration made of the head."""
        if self._template is not None and request.error is None:
            self._template = request

    def match(self, data: bytes, now: float) -> tuple[HttpRequest, int, int] | None:
        """Return (request, where its body starts, the body's length) if `data` has that head."""
        template, prefix = self._template, self._prefix
        if template is None or not data.startswith(prefix):
            return None
        start = len(prefix)
        end = data.find(self._suffix, start, start + _MAX_DIGITS + len(self._suffix))
        digits = data[start:end]
        if end < 0 or not digits.isdigit():
            return None
        self._misses = 0
        request: HttpRequest = template.__copy__()  # type: ignore[attr-defined] # not in the stubs
        request.received_at = now
        request.body = b""
        request.error = None
        return request, end + len(self._suffix), int(digits)
