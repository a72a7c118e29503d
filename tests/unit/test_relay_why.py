import errno
import socket
import ssl

import pytest

from gateway.relay.why import why_unreached


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            ConnectionRefusedError(111, "Connect call failed ('10.0.0.7', 8000)"),
            "connection refused",
        ),
        (ConnectionRefusedError(), "connection refused"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "connection reset"),
        (ConnectionResetError(), "connection reset"),
        (BrokenPipeError(), "connection reset"),
        (ConnectionAbortedError("SSL handshake is taking longer"), "connection aborted"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "host unreachable"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "network unreachable"),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), "connect timed out"),
        (TimeoutError(), "connect timed out"),
        (PermissionError(errno.EACCES, "x"), "forbidden by this system (a firewall?)"),
        (OSError(errno.EMFILE, "x"), "too many open files"),
        (OSError("told nothing"), "connection failed"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "host name not found"),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            "host name not resolved: no name server answers",
        ),
        (socket.gaierror(socket.EAI_FAIL, "It failed"), "host name not resolved: it failed"),
        (UnicodeError("label too long"), "host name that cannot be one"),
        (ssl.SSLEOFError(8, "EOF occurred"), "TLS failed: EOF occurred"),
        (ValueError("x"), "ValueError"),
    ],
)
def test_each_kind_of_failure_has_one_wording(error: Exception, why: str) -> None:
    assert why_unreached(error) == why


def test_a_name_that_does_not_match_is_told_without_the_name() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "Hostname mismatch, certificate is not valid for 'vllm-a.internal'."
    assert why_unreached(error) == "TLS failed: certificate not accepted: Hostname mismatch"


def test_several_addresses_are_told_as_their_kinds_without_themselves() -> None:
    """As asyncio puts the errors of a host's addresses into one, which has no number."""
    error = OSError(
        "Multiple exceptions: [Errno 111] Connect call failed ('::1', 8000, 0, 0), "
        "[Errno 101] Connect call failed ('10.0.0.7', 8000), "
        "[Errno 111] Connect call failed ('127.0.0.1', 8000)"
    )
    assert why_unreached(error) == "connection refused, network unreachable"
