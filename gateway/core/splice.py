"""Change one value of a JSON body in place; every other byte stays the client's.

Bodies come here after the parser accepted them, so this scanner need not judge JSON, only find
its way: a body it cannot follow is returned unchanged. Must never re-serialise (a re-emitted body
loses key order, which costs the prefix cache, and big integers, which lose digits).
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

import orjson

from gateway.core.request import UsageOption

_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NEXT: Final = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_STRINGS: Final = re.compile(_STRING, re.DOTALL)
_SCALAR: Final = re.compile(_STRING + rb"|[^\s,\]}]+", re.DOTALL)
_ESCAPED_KEY: Final = (rb"\u005", rb"\u006", rb"\u007")  # an ASCII letter or underscore
_COLON: Final = re.compile(rb"\s*+:\s*+")
MAX_STEPS: Final = 50_000
"""Strings and brackets looked at before giving up: some 50 ms, and no honest body comes near."""

_BACKSLASH: Final = 0x5C
_USAGE: Final = b'"include_usage":true'


def replace_model(body: bytes, new: str) -> bytes:
    """Return the body with every top-level `model` value replaced."""
    return _replace(body, _values(body, "model"), orjson.dumps(new))


def replace_priority(body: bytes, new: int) -> bytes:
    """Return the body with every top-level `priority` value replaced."""
    return _replace(body, _values(body, "priority"), b"%d" % new)


def set_priority(body: bytes, new: int) -> bytes:
    """Return the body with `priority` set to `new`, whether the client gave one or not."""
    spans = list(_values(body, "priority"))
    if spans:
        return _replace(body, iter(spans), b"%d" % new)
    return _with_member(body, b'"priority":%d' % new)


def request_usage(body: bytes, option: UsageOption) -> bytes:
    """Return the body with `stream_options.include_usage` set, unless the client gave it."""
    if option is UsageOption.ABSENT:
        return _with_member(body, b'"stream_options":{%b}' % _USAGE)
    if option is UsageOption.EMPTY:
        spans = list(_values(body, "stream_options"))
        return _replace(body, iter(spans[-1:]), _with_usage(body, spans))  # the last one counts
    return body


def _with_member(body: bytes, member: bytes) -> bytes:
    """Return an object with one more member at its end."""
    end = body.rfind(b"}")
    if end < 0:
        return body
    comma = b"," if body[:end].rstrip()[-1:] != b"{" else b""
    return b"%b%b%b%b" % (body[:end], comma, member, body[end:])


def _with_usage(body: bytes, spans: list[tuple[int, int]]) -> bytes:
    """Return the effective `stream_options` (null or an object) with the usage wish in it."""
    if not spans:
        return b""
    start, end = spans[-1]
    inner = body[start + 1 : end - 1] if body[start : start + 1] == b"{" else b""
    return b"{%b%b%b}" % (_USAGE, b"," if inner.strip() else b"", inner)


def _replace(body: bytes, spans: Iterator[tuple[int, int]], value: bytes) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for start, end in spans:
        pieces += (body[at:start], value)
        at = end
    pieces.append(body[at:])
    return b"".join(pieces)


def _values(body: bytes, key: str) -> Iterator[tuple[int, int]]:
    """Yield the span of each value that a top-level `key` has, in order.

    Strings between two candidates are stripped at C speed and the brackets counted: walking every
    string of a 128 KB body in Python would cost more than parsing it.
    """
    quoted = orjson.dumps(key)
    # no client writes its keys so, but it is JSON
    hidden = b"\\u00" in body and any(mark in body for mark in _ESCAPED_KEY)
    candidates = _all_keys(body, key) if hidden else _find_all(body, quoted)
    depth = at = 0
    for start, end in islice(candidates, MAX_STEPS):
        colon = None if start < at else _COLON.match(body, end)
        if colon is None:
            continue
        bare = _STRINGS.sub(b"", body[at:start])
        depth += bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")
        at = start
        if depth != 1:
            continue
        value_end = _value_end(body, colon.end())
        if value_end is None:
            return
        yield colon.end(), value_end
        at = value_end


def _find_all(body: bytes, quoted: bytes) -> Iterator[tuple[int, int]]:
    """Yield where `quoted` occurs as a whole string (not the end of a longer, escaped one)."""
    at = body.find(quoted)
    while at >= 0:
        before = at
        while before and body[before - 1] == _BACKSLASH:
            before -= 1
        if (at - before) % 2 == 0:
            yield at, at + len(quoted)
        at = body.find(quoted, at + 1)


def _all_keys(body: bytes, key: str) -> Iterator[tuple[int, int]]:
    """Yield every string that reads `key` once its escapes are resolved. Slow, and rarely run."""
    for found in islice(_STRINGS.finditer(body), MAX_STEPS):
        text = found[0]
        if len(text) <= 6 * len(key) + 2 and _unescaped(text) == key:
            yield found.span()


def _unescaped(text: bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _value_end(body: bytes, start: int) -> int | None:
    """Return where the value that starts at `start` ends; None if that is too far to look for."""
    if body[start : start + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(body, start)
        return scalar.end() if scalar else start
    depth = 0
    for found in islice(_NEXT.finditer(body, start), MAX_STEPS):
        if found[0] in (b"{", b"["):
            depth += 1
        elif found[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return found.end()
    return None
