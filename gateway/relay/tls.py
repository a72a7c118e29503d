"""A backend's connection under TLS: what the stack beneath does otherwise than a plain socket.

Must never treat an end without TLS's own goodbye as a proper one: anyone on the way can cut.
"""

from gateway.relay.connection import Sink, UpstreamConnection


class TlsConnection(UpstreamConnection):
    """A backend socket under TLS."""

    __slots__ = ("_acked_before",)

    def send(self, sink: Sink, pieces: list[bytes], *, bodyless: bool = False) -> None:
        """Write one request and route its answer to `sink`; `bodyless` = it is a HEAD."""
        self._acked_before = self._acked()
        super().send(sink, pieces, bodyless=bodyless)

    def pause(self) -> None:
        """Read nothing on, not even the end of the connection.

        uvloop would go on to read 256 KiB ahead, and on meeting the end there drop them unread.
        """
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self._hold_back(0)

    def resume(self) -> None:
        """Read on."""
        if not self.transport.is_closing():
            self._hold_back(None)
            self.transport.resume_reading()

    def _hold_back(self, most: int | None) -> None:
        limit = getattr(self.transport, "set_read_buffer_limits", None)  # asyncio's own has it too
        if limit is not None:
            limit(high=most)

    def _nothing_acked(self) -> bool:
        """Return whether the peer's kernel acknowledged nothing since the request was written.

        The count holds the handshake and every record's overhead, so only its standing still tells.
        What was unacknowledged before may be acknowledged since: then it counts as read.
        """
        acked = self._acked()
        return acked is not None and acked == self._acked_before
