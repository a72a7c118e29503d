"""An answer's head: what of it goes on to the client, and a memory of the last one.

An engine's heads differ in nothing but the date and the length's digits. One that equals a head
llhttp has accepted, these two aside, means the same (measured: parsing and sorting 5 fields costs
9 µs, recognising them 0.6 µs). Anything else is not recognised and goes to the parser.
"""

import re
from urllib.parse import urlsplit

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = HOP_BY_HOP | frozenset(  # an engine's CORS headers would open what stays closed
    {
        b"x-request-id",
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"access-control-max-age",
        b"x-gateway-attempts",
        b"x-gateway-backend",
        b"x-gateway-class",
        b"x-gateway-policy",
        b"x-gateway-prefix",
        b"x-gateway-queue-ms",
    }
)
# As uvicorn and most servers write them: no need to fold their case.
_LOWER = frozenset({b"content-length", b"content-type", b"date", b"server", b"vary"})
_PLACES = frozenset({b"location", b"content-location"})
_MAX_HEAD = 8 * 1024
_MAX_DIGITS = 9
_MAX_MISSES = 8  # heads noted in vain before a connection is believed to vary them
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_DATE = re.compile(rb"\r\ndate:[ \t]*([A-Za-z0-9,: ]{29})\r\n", re.IGNORECASE)
_DATE_VALUE = re.compile(rb"[A-Za-z]{3}, \d\d [A-Za-z]{3} \d{4} \d\d:\d\d:\d\d GMT")
_DATE_BYTES = 29
_NO_HEAD = b"\0"  # no answer begins like this


class Sorted:
    """What an answer's header fields say. `lines` go on, in order; `length` is Content-Length."""

    __slots__ = ("encoded", "length", "lines", "stream")

    def __init__(self, headers: Headers) -> None:
        self.length: bytes | None = None
        self.stream = self.encoded = False
        self.lines: list[bytes] = []
        nominated = None
        for name, value in headers:
            low = name if name in _LOWER else name.lower()
            if low == b"content-length":
                self.length = value
            elif low not in _NOT_FORWARDED:
                self.lines.append(b"%b: %b\r\n" % (name, value))
                if low == b"content-type":
                    self.stream = value[:17].lower() == b"text/event-stream"
                elif low == b"content-encoding":
                    self.encoded = True
            elif low == b"connection":
                nominated = value if nominated is None else nominated + b"," + value
        if nominated is not None:
            drop = frozenset(token.strip().lower() for token in nominated.split(b","))
            self.lines = without(self.lines, drop)


def without(lines: list[bytes], drop: frozenset[bytes]) -> list[bytes]:
    """Return header lines but for those named in `drop`."""
    return [line for line in lines if line.partition(b":")[0].lower() not in drop]


def without_places(headers: Headers, host: str) -> Headers:
    """Return headers but for redirections to `host`: clients follow them, and learn an address."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in _PLACES or not _leads_to(value, host)
    ]


def _leads_to(place: bytes, host: str) -> bool:
    """Return whether an absolute URL names `host`, on whatever port; unreadable ones may."""
    try:
        named = urlsplit(place.decode("latin-1").replace("\\", "/").strip()).hostname
    except ValueError:
        return True
    return named is not None and named.rstrip(".") == host.lower().rstrip(".")


class AnswerMemo:
    """One connection's memory of one head: `note` what was parsed, `match` what comes.

    After a match, `status` is the answer's and `head` begins the client's: status line and fields
    up to the length's digits, which are `length`.
    """

    __slots__ = (
        "_after",
        "_before",
        "_between",
        "_date",
        "_misses",
        "_out_after",
        "_out_before",
        "head",
        "length",
        "status",
    )

    def __init__(self) -> None:
        self._before = _NO_HEAD
        self._between = self._after = self._date = self._out_before = self._out_after = b""
        self._misses = 0
        self.status = 0
        self.head = self.length = b""

    def match(self, data: bytes) -> int:
        """Return where the body starts if `data` is that head and its whole body, otherwise 0."""
        at = len(self._before)
        if not data.startswith(self._before):
            return 0
        if self._date:
            date = data[at : at + _DATE_BYTES]
            at += _DATE_BYTES
            if not data.startswith(self._between, at):
                return 0
            if date != self._date and not self._take_date(date):
                return 0
            at += len(self._between)
        after = self._after
        end = data.find(after, at, at + _MAX_DIGITS + len(after))
        digits = data[at:end]
        if end < 0 or not digits.isdigit():
            return 0
        start = end + len(after)
        length = int(digits)
        if not length or len(data) - start != length:
            return 0
        self._misses = 0
        self.length = digits
        return start

    def note(self, data: bytes, status: int, reason: bytes, headers: Headers) -> None:
        """Remember the head that `data` begins with, parsed as the other arguments.

        The parser must have found the connection reusable after it.
        """
        self._before = _NO_HEAD
        if self._misses >= _MAX_MISSES:
            return
        self._misses += 1
        end = data.find(b"\r\n\r\n", 0, _MAX_HEAD) + 2
        if end < 2 or status in (204, 304) or not data.startswith(b"HTTP/1.1 %d " % status):
            return
        fields = Sorted(headers)
        lengths = list(_LENGTH.finditer(data, 0, end))
        if fields.stream or len(lengths) != 1 or lengths[0][1] != fields.length:
            return
        if any(name.lower() == b"transfer-encoding" for name, _ in headers):
            return
        first, last = lengths[0].span(1)
        dates = list(_DATE.finditer(data, 0, first))
        shown = [i for i, line in enumerate(fields.lines) if line[:6].lower() == b"date: "]
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason), *fields.lines, b"content-length: "]
        if len(dates) == 1 and len(shown) == 1:
            at = shown[0] + 1
            self._date = dates[0][1]
            self._between = data[dates[0].end(1) : first]
            self._out_before = b"".join([*lines[:at], lines[at][:6]])
            self._out_after = b"".join([b"\r\n", *lines[at + 1 :]])
            first = dates[0].start(1)
        else:
            self._date = b""
        self._before, self._after = data[:first], data[last : end + 2]
        self.status = status
        self.head = b"".join(lines)

    def _take_date(self, date: bytes) -> bool:
        """Put another second into the client's head."""
        if _DATE_VALUE.fullmatch(date) is None:
            return False
        self._date = date
        self.head = b"".join([self._out_before, date, self._out_after])
        return True
