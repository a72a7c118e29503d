"""From when until when a certificate is valid, read from its PEM file.

The standard library tells it of connections only, so the few bytes of DER before it are walked here.
Looks at certificates alone: a private key in the same file is passed over.
"""

import re
from binascii import Error, a2b_base64
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Final

SOON_S: Final = 14 * 86_400.0
"""Who renews automatically does it 30 days before the end: at 14 it has failed."""

_MOST_BYTES = 1 << 20
_DAY_S = 86_400.0
# OpenSSL looks at the beginnings of lines alone, after a byte order mark: what is commented out is not
# there. It takes all three names.
_PEM = re.compile(
    rb"(?:^|\A\xef\xbb\xbf)-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)^-----END",
    re.MULTILINE,
)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18  # DER tags
_LONG_FORM, _MOST_LENGTH_BYTES = 0x80, 4
_CENTURY = "50"  # two digits of a year below are 20xx (RFC 5280, 4.1.2.5.1)


@dataclass(slots=True, frozen=True)
class Validity:
    """Unix seconds of a certificate's first and last moment."""

    begins: float
    ends: float

    def fault(self, now: float) -> str | None:
        """Return why it is not valid at `now`; None = it is."""
        if now > self.ends:
            return f"the certificate expired on {_date(self.ends)}"
        return (
            f"the certificate is not valid before {_date(self.begins)}" if self.early(now) else None
        )

    def early(self, now: float) -> bool:
        """Return whether it will only be valid later."""
        return now < self.begins

    def warning(self, now: float) -> str | None:
        """Return what is wrong with it at `now`, or will be within `SOON_S`."""
        if self.ends >= now >= self.begins and self.ends - now < SOON_S:
            days = ceil((self.ends - now) / _DAY_S)
            return f"the certificate expires on {_date(self.ends)}, within {days} days"
        return self.fault(now)


def validity_of(path: str) -> Validity | None:
    """Return the validity of the first certificate of a file, the one that is shown.

    None = nothing there that can be read: whoever uses the file says why.
    """
    try:
        with Path(path).open("rb") as stream:
            found = _PEM.search(stream.read(_MOST_BYTES))
        return None if found is None else _validity(a2b_base64(found[1]))
    except (OSError, ValueError, IndexError, Error):
        return None


def _validity(der: bytes) -> Validity:
    """Return the validity of a certificate (RFC 5280, section 4.1)."""
    _, at, _ = _element(der, 0)  # the certificate
    _, at, _ = _element(der, at)  # what is signed of it
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in range(3):  # its number, algorithm and issuer
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    tag, at, end = _element(der, at)
    begins = _time(tag, der[at:end])
    tag, at, end = _element(der, end)
    return Validity(begins, _time(tag, der[at:end]))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag at `at`, and where what it stands for begins and ends."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & _LONG_FORM:
        count = length & ~_LONG_FORM
        if not 0 < count <= _MOST_LENGTH_BYTES:
            raise ValueError("no length")
        length = int.from_bytes(der[start : start + count], "big")
        start += count
    if start + length > len(der):
        raise ValueError("cut off")
    return tag, start, start + length


def _time(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if text[:2] < _CENTURY else "19") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
