"""Any bytes give a ParsedRequest or a RequestFault, nothing else."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import ParsedRequest, RequestFault, parse_json, parse_multipart
from gateway.core.types import Api

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text("aé🌍\x00", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab", max_size=3), inner),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.sampled_from(
    ("model", "messages", "stream", "max_tokens", "n", "tools", "metadata", "stream_options")
)


def outcome(api: Api, body: bytes) -> ParsedRequest | RequestFault:
    try:
        return parse_json(api, body)
    except RequestFault as fault:
        return fault


@given(st.sampled_from(Api), st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(api: Api, body: bytes) -> None:
    result = outcome(api, body)
    if isinstance(result, RequestFault):
        assert result.code in {"invalid_json", "invalid_request"}


@given(st.sampled_from(Api), st.dictionaries(FIELDS, JSON))
def test_any_object_is_parsed_or_refused(api: Api, data: dict[str, object]) -> None:
    result = outcome(api, orjson.dumps(data))
    if isinstance(result, ParsedRequest):
        assert result.n >= 1
        assert result.max_tokens is None or result.max_tokens >= 0
        assert isinstance(result.model, str | None)
    else:
        assert result.code == "invalid_request"
        assert result.param in {"model", "messages"}


@given(
    st.text(max_size=60) | st.just("multipart/form-data; boundary=xx"),
    st.lists(st.sampled_from([b"--xx", b"\r\n", b"--", b'name="model"', b"\r\n\r\n", b"\xff",
                              b"Content-Disposition: form-data; "])),
)  # fmt: skip
def test_any_form_is_parsed_or_refused(content_type: str, pieces: list[bytes]) -> None:
    try:
        request = parse_multipart(Api.TRANSCRIPTIONS, content_type, b"".join(pieces))
    except RequestFault:
        return
    assert isinstance(request.model, str)
