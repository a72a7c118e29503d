"""TLS on the data listener: why handshakes fail, and connections that end as TLS does.

The stack beneath (uvloop) drops the alert of a failed handshake and tells nobody; here the client
hears why, and it is counted. Must never log what a client sent.
"""

import array
import fcntl
import logging
import ssl
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gateway.edge.answers import JSON
from gateway.edge.client import ClientConnection
from gateway.edge.http import answer_head
from gateway.edge.receiver import NEVER
from gateway.errors import InvalidRequest
from gateway.relay.why import reason_of
from gateway.telemetry.record import HandshakeResult

if TYPE_CHECKING:
    from gateway.edge.server import Listener

_log = logging.getLogger("radixgate.tls")
_QUIET_S = 10.0  # between two lines about failed handshakes: scanners must not fill a disk
_LOOK_S = 0.2  # how often a closed connection is asked what is still unsent
_FAREWELL_S = 1.0  # how long a client that has read everything may take to say goodbye
_NOT_TLS = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
_NONE_SHOWN = frozenset({"PEER_DID_NOT_RETURN_A_CERTIFICATE"})
_REFUSED = frozenset(  # alerts of a client that does not like our certificate
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    }
)


def _answer_to_plaintext() -> bytes:
    body = InvalidRequest("This port speaks HTTPS only: the URL begins with https://.").body()
    head = answer_head(400, JSON, len(body), None)
    return head + body


class Handshakes:
    """Counts and logs how handshakes ended."""

    def __init__(
        self, count: Callable[[HandshakeResult], None], clock: Callable[[], float]
    ) -> None:
        self._count = count
        self._clock = clock
        self._quiet_until = 0.0
        self._unsaid = 0

    def done(self, error: ssl.SSLError | None) -> HandshakeResult:
        """Note how a handshake ended; return the word for it."""
        result = _result(error)
        self._count(result)
        if error is not None:
            self._say(error)
        return result

    def _say(self, error: ssl.SSLError) -> None:
        now = self._clock()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more in the last while)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + _QUIET_S, 0
        _log.warning("TLS handshake with a client failed: %s%s", reason_of(error), more)


def _result(error: ssl.SSLError | None) -> HandshakeResult:
    if error is None:
        return HandshakeResult.OK
    if error.reason in _NOT_TLS:
        return HandshakeResult.PLAINTEXT
    if error.reason in _REFUSED:
        return HandshakeResult.REFUSED_BY_CLIENT
    if isinstance(error, ssl.SSLCertVerificationError) or error.reason in _NONE_SHOWN:
        return HandshakeResult.CLIENT_CERTIFICATE
    return HandshakeResult.FAILED


class _ToldObject(ssl.SSLObject):
    """A handshake whose failure is told to the client and counted."""

    handshakes: Handshakes | None = None
    outgoing: ssl.MemoryBIO
    failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Go on with the handshake.

        A failure is raised only with the next call: the first says "more is wanted", upon which the
        caller sends what OpenSSL has left for the client, the alert. A client that then does nothing
        is cut by the handshake's deadline.
        """
        if self.failure is not None:
            raise self.failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self.failure = error
            handshakes = self.handshakes
            if handshakes is not None and handshakes.done(error) is HandshakeResult.PLAINTEXT:
                self.outgoing.read()  # an alert is nothing to who speaks no TLS
                self.outgoing.write(_answer_to_plaintext())
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert goes first") from None
        if self.handshakes is not None:
            self.handshakes.done(None)


class ListenerContext(ssl.SSLContext):
    """The data listener's context; `handshakes` hears how each ended."""

    handshakes: Handshakes | None = None
    sslobject_class = _ToldObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **how: Any) -> Any:  # type: ignore[override]
        """Return the object that does one connection's handshake."""
        made: Any = super().wrap_bio(incoming, outgoing, **how)
        made.handshakes, made.outgoing = self.handshakes, outgoing
        return made


class TlsClientConnection(ClientConnection):
    """A client socket under TLS, where only the kernel knows what has not been sent.

    The transport's own count leaves out what it has handed down, and closing waits for the peer's
    goodbye, which a client that is not reading never sends.
    """

    __slots__ = ("_closing_until",)

    def __init__(self, listener: "Listener") -> None:
        super().__init__(listener)
        self._closing_until = 0.0

    def unsent(self) -> int:
        """Return how many bytes are not acknowledged by the client's system."""
        waiting = self.transport.get_write_buffer_size()
        return waiting + (self._queued() if self.transport.get_extra_info("socket") else 0)

    def expired(self, now: float) -> None:
        """Look after a connection that closes; anything else is as without TLS."""
        if not (self._discarding and self.transport.is_closing()):
            self._look(now)
        elif now >= self._closing_until:
            self.deadline = NEVER
            self.transport.abort()
        else:
            if not self.unsent():
                self._closing_until = min(self._closing_until, now + _FAREWELL_S)
            self.deadline = min(now + _LOOK_S, self._closing_until)

    def _look(self, now: float) -> None:
        """As without TLS, but for a client that closed without a goodbye, which nobody tells."""
        if self._exchange is not None and self._left():
            self.eof_received()
            return
        super().expired(now)
        if self._exchange is not None:
            self.deadline = min(self.deadline, now + _LOOK_S)

    def _left(self) -> bool:
        return self.transport.get_extra_info("socket") is None or super()._left()

    def _close(self) -> None:
        """Close once the client has read what is written; it gets `idle_s` for that."""
        self._begin_closing(self._listener.timeouts.idle_s or NEVER)

    def _linger(self) -> None:
        """Close; what still comes is read away meanwhile, so that no reset overtakes the answer."""
        self._begin_closing(_FAREWELL_S)

    def _begin_closing(self, within_s: float) -> None:
        now = self._listener.clock()
        self._discarding = True
        self._closing_until = now + within_s
        self.deadline = now + min(_LOOK_S, within_s)
        self.transport.close()

    def _queued(self) -> int:
        """Return the bytes in the kernel's send queue, 0 if the socket is gone."""
        size = array.array("i", [0])
        try:
            sock = self.transport.get_extra_info("socket")
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, size)
        except (OSError, AttributeError):
            return 0
        return size[0]
