"""An answer that came after its stream was opened, and is no stream: kept for an in-band error.

Opening early (`streams.keepalive_s`) commits to status 200, so an engine's refusal can only be
told as an event. Must never keep more than `LATE_MAX` bytes.
"""

from typing import TYPE_CHECKING

from gateway.relay.heads import AnswerMemo, Headers

if TYPE_CHECKING:
    from gateway.relay.relay import Relay

LATE_MAX = 64 * 1024


class LateAnswer:
    """The sink that takes a relay's place for such an answer."""

    __slots__ = ("_body", "_relay")

    def __init__(self, relay: "Relay") -> None:
        self._relay = relay
        self._body = bytearray()

    def head(self, status: int, reason: bytes, headers: Headers) -> None:
        """Ignore a second head: the relay has read the first."""

    def body(self, payload: bytes) -> None:
        """Keep the beginning."""
        self._body += payload[: LATE_MAX - len(self._body)]

    def whole(self, memo: AnswerMemo, data: bytes, start: int) -> None:
        """Keep the body of an answer that came at once."""
        self.head(memo.status, b"", [])
        self.body(data[start:])
        self.complete()

    def event(self, framed: bytes, start: int) -> None:
        """Keep a chunk's payload."""
        self.body(framed[start:-2])

    def chunk(self, framed: bytes, start: int) -> None:
        """Keep a chunk's payload."""
        self.body(framed[start:-2])

    def complete(self) -> None:
        """Hand the whole over."""
        self._relay.late = bytes(self._body)
        self._relay.complete()

    def lost(self, *, unread: bool, reason: str) -> None:
        """Pass it on."""
        self._relay.lost(unread=unread, reason=reason)
