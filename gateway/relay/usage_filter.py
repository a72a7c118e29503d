"""Takes the usage chunk out of a stream again when the gateway asked for it on its own account.

Only the event whose `choices` is empty and that carries `usage` goes; every other byte passes
unchanged and in order. An incomplete event is held until it is whole (its rest is on the way),
unless it grows beyond `HOLD_MAX`: no usage chunk is that long.
"""

import re

HOLD_MAX = 16 * 1024
_USAGE_EVENT = re.compile(rb'"choices":\s*\[\s*\]')
_USAGE = re.compile(rb'"usage":\s*\{')
_BOUNDARY = re.compile(rb"\r?\n\r?\n")


class UsageFilter:
    """One stream's filter: `feed` returns what may go on now, `flush` the rest at the end."""

    __slots__ = ("_held", "_passing")

    def __init__(self) -> None:
        self._held = b""
        self._passing = False  # inside an event too long to be the usage chunk

    @property
    def idle(self) -> bool:
        """Return whether it stands between events."""
        return not self._held and not self._passing

    def feed(self, payload: bytes) -> bytes:
        """Return the bytes to send now; `b""` if all of it is held or removed."""
        if (  # the common case: whole events, none of them the usage chunk
            payload[-2:] == b"\n\n"
            and b'"choices":[]' not in payload
            and b'"choices": [' not in payload
            and not self._held
            and not self._passing
        ):
            return payload
        data = self._held + payload
        seen = max(0, len(self._held) - 3)  # no boundary is in what is held, but its start may be
        self._held = b""
        out: list[bytes] = []
        start = 0
        for match in _BOUNDARY.finditer(data, seen):
            event = data[start : match.end()]
            if self._passing or not _is_usage(event):
                out.append(event)
            self._passing = False
            start = match.end()
        rest = data[start:]
        if self._passing or len(rest) > HOLD_MAX:
            self._passing = bool(rest) or self._passing
            body = rest.rstrip(b"\r\n")  # what ends it may be half of a boundary
            out.append(body)
            self._held = rest[len(body) :]
        else:
            self._held = rest
        return b"".join(out)

    def flush(self) -> bytes:
        """Return what is still held: the stream has ended inside an event."""
        held, self._held = self._held, b""
        return held


def _is_usage(event: bytes) -> bool:
    return _USAGE.search(event) is not None and _USAGE_EVENT.search(event) is not None
