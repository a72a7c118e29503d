import gzip
import zlib

import pytest
import zstandard

from gateway.edge.decode import decode_body
from gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

BODY = b'{"model":"m"}' * 50
RAW = zlib.compressobj(wbits=-15)
ENCODED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY[:100]) + gzip.compress(BODY[100:]),
    "deflate": zlib.compress(BODY),
    "Deflate": RAW.compress(BODY) + RAW.flush(),
    "zstd": zstandard.compress(BODY),
    "identity": BODY,
}


@pytest.mark.parametrize("coding", ENCODED)
def test_known_codings_are_decoded(coding: str) -> None:
    assert decode_body(ENCODED[coding], coding, len(BODY)) == BODY


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_a_bomb_is_refused_by_its_decoded_size(coding: str) -> None:
    with pytest.raises(BodyTooLarge):
        decode_body(ENCODED[coding], coding, len(BODY) - 1)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("body", [b"not compressed", b""])
def test_what_is_not_compressed_is_a_bad_request(coding: str, body: bytes) -> None:
    if body:
        with pytest.raises(InvalidRequest):
            decode_body(body, coding, 100)
    else:
        assert decode_body(body, coding, 100) == b""


def test_a_truncated_body_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest):
        decode_body(ENCODED["gzip"][:-9], "gzip", 10_000)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress"])
def test_unknown_codings_name_the_known_ones(coding: str) -> None:
    with pytest.raises(UnsupportedEncoding, match="gzip"):
        decode_body(BODY, coding, 10_000)
