"""Why a backend could not be reached, in the words of the log.

System and resolver say it in many ways, most with the address; here each kind has one wording, so
that lines can be compared and searched. Must never name an address: reasons reach pages and clients'
operators.
"""

import errno
import os
import re
import socket
import ssl

_KINDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EPIPE: "connection reset",
    errno.ECONNABORTED: "connection aborted",
    errno.EHOSTUNREACH: "host unreachable",
    errno.EHOSTDOWN: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.ENETDOWN: "network unreachable",
    errno.ETIMEDOUT: "connect timed out",
    errno.EACCES: "forbidden by this system (a firewall?)",
    errno.EPERM: "forbidden by this system (a firewall?)",
}
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
_NUMBER = re.compile(r"\[Errno (\d+)\]")


def reason_of(error: Exception) -> str:
    """Return in words why TLS was not had: OpenSSL's, without its source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message.partition(', certificate is')[0]}"
    reason = getattr(error, "reason", None)  # one that Python itself made has none
    if isinstance(error, ssl.SSLError) and reason:
        return str(reason).lower().replace("_", " ")
    return str(error) or type(error).__name__


def why_unreached(error: BaseException) -> str:
    """Return why no connection was had, or why it went before it was used."""
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {reason_of(error)}"
    if isinstance(error, socket.gaierror):
        return _unresolved(error)
    if isinstance(error, UnicodeError):
        return "host name that cannot be one"
    if isinstance(error, OSError):
        return _of_system(error)
    return type(error).__name__


def _unresolved(error: socket.gaierror) -> str:
    if error.errno in _UNKNOWN_NAME:
        return "host name not found"
    if error.errno == socket.EAI_AGAIN:
        return "host name not resolved: no name server answers"
    return f"host name not resolved: {_worded(error.strerror or 'no reason told')}"


def _of_system(error: OSError) -> str:
    """Return the wording of an error number; of a host's several addresses, of each number once."""
    if error.errno is None:  # several addresses, each with an error of its own, in one text
        numbers = dict.fromkeys(int(number) for number in _NUMBER.findall(str(error)))
    else:
        numbers = {error.errno: None}
    words = dict.fromkeys(_KINDS.get(number) or _worded(os.strerror(number)) for number in numbers)
    if words:
        return ", ".join(words)
    return "connect timed out" if isinstance(error, TimeoutError) else _by_type(error)


def _by_type(error: OSError) -> str:
    """Return the wording of an error without a number, as the stack beneath makes them."""
    for kind, number in _TYPES:
        if isinstance(error, kind):
            return _KINDS[number]
    return "connection failed"


_TYPES = (
    (ConnectionRefusedError, errno.ECONNREFUSED),
    (ConnectionResetError, errno.ECONNRESET),
    (BrokenPipeError, errno.EPIPE),
    (ConnectionAbortedError, errno.ECONNABORTED),
)


def _worded(text: str) -> str:
    return text[:1].lower() + text[1:]
