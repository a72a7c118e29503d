"""Listening sockets: bound before anything else is open, so that an address in use is told first."""

import socket


def bind(host: str, port: int) -> socket.socket:
    """Return a bound, non-blocking TCP socket.

    Raises:
        OSError: the address cannot be had; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the URL that a listening socket answers at."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
