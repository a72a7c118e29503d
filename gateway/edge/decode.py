"""Request bodies that arrive compressed, decoded with a cap on what they decode to.

Only gzip and deflate are in the core install; zstd is used when the `zstandard` extra is there.
"""

import zlib
from collections.abc import Callable

from gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding


def decode_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decoded body.

    Raises:
        UnsupportedEncoding: a coding we do not know, or more than one.
        BodyTooLarge: it decodes to more than `limit` bytes.
        InvalidRequest: it is not what its header says.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    decoder = _DECODERS.get(coding)
    if decoder is None:
        raise UnsupportedEncoding(
            f"Content-Encoding must be one of {', '.join(sorted(_DECODERS))} or identity."
        )
    return decoder(body, limit)


def _gzip(body: bytes, limit: int) -> bytes:
    return _inflate(body, limit, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes, limit: int) -> bytes:
    """RFC 9110 means zlib by deflate; some clients send the raw stream."""
    zlib_header = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return _inflate(body, limit, zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS)


def _inflate(body: bytes, limit: int, window: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    rest = body
    try:
        while rest:  # gzip may hold several members
            stream = zlib.decompressobj(window)
            part = stream.decompress(rest, limit - size + 1)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not stream.eof:
                raise InvalidRequest("The compressed body is truncated.")
            rest = stream.unused_data
    except zlib.error:
        raise InvalidRequest("The body is not in its Content-Encoding.") from None
    return b"".join(parts)


def _zstd(body: bytes, limit: int) -> bytes:
    import zstandard  # noqa: PLC0415 - optional extra

    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            data = reader.read(limit + 1)
    except zstandard.ZstdError:
        raise InvalidRequest("The body is not in its Content-Encoding.") from None
    if len(data) > limit:
        raise _too_large(limit)
    return bytes(data)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body decodes to more than {limit} bytes (limits.body_mib).")


def _decoders() -> dict[str, Callable[[bytes, int], bytes]]:
    decoders: dict[str, Callable[[bytes, int], bytes]] = {
        "gzip": _gzip,
        "x-gzip": _gzip,
        "deflate": _deflate,
    }
    try:
        import zstandard  # noqa: F401, PLC0415 - optional extra
    except ImportError:
        return decoders
    return decoders | {"zstd": _zstd}


_DECODERS = _decoders()
