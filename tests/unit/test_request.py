"""Bodies of every shape, right and wrong, as routing reads them."""

from pathlib import Path

import orjson
import pytest

from gateway.core.canonical import canonical
from gateway.core.request import (
    MAX_PARTS,
    RequestFault,
    UsageOption,
    parse_json,
    parse_multipart,
)
from gateway.core.types import Api

SAMPLES = Path(__file__).parents[1] / "samples"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BOUNDARY = "multipart/form-data; boundary=xx"


def fault(api: Api, body: bytes) -> RequestFault:
    with pytest.raises(RequestFault) as caught:
        parse_json(api, body)
    return caught.value


def form(*parts: tuple[str, bytes], end: bytes = b"--xx--\r\n") -> bytes:
    text = b"".join(
        b'--xx\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (head.encode(), value)
        for head, value in parts
    )
    return text + end


def test_chat_fields_are_read() -> None:
    body = orjson.dumps({**CHAT, "stream": True, "max_tokens": 7, "n": 2, "tools": [{}]})
    request = parse_json(Api.CHAT, body)
    assert (request.model, request.stream, request.max_tokens, request.n) == ("m", True, 7, 2)
    assert request.has_tools
    assert request.body_len == len(body)
    assert request.data["messages"] == CHAT["messages"]


def test_absent_fields_have_neutral_values() -> None:
    request = parse_json(Api.CHAT, orjson.dumps(CHAT))
    assert (request.stream, request.max_tokens, request.n) == (False, None, 1)
    assert not request.has_tools
    assert request.session is None
    assert request.usage_option is UsageOption.ABSENT


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"NaN",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e400}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\xff"}',
        b'{"a":1,}',
        b"{} {}",
        b'{"a":"x \\ud83d y"}',
        b"[" * 1_000_000,
        b'{"a":' * 20_000,
        b"5" * 5000,
    ],
)
def test_what_is_not_one_json_object_is_invalid_json(body: bytes) -> None:
    assert fault(Api.CHAT, body).code == "invalid_json"


def test_fault_never_echoes_the_body() -> None:
    error = fault(Api.CHAT, b'{"model": "m", "messages": canary-secret}')
    assert "canary" not in error.message
    assert "line 1" in error.message
    assert error.__suppress_context__


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.EMBEDDINGS])
@pytest.mark.parametrize("model", [None, 5, ["m"], {}])
def test_model_that_is_no_string_is_invalid(api: Api, model: object) -> None:
    error = fault(api, orjson.dumps({**CHAT, "model": model}))
    assert (error.code, error.param) == ("invalid_request", "model")


def test_model_may_be_absent_where_engines_do_without() -> None:
    assert parse_json(Api.TOKENIZE, b'{"prompt":"x"}').model is None
    assert fault(Api.SCORE, b'{"model":7}').param == "model"


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.COUNT_TOKENS])
@pytest.mark.parametrize("messages", [b"", b',"messages":null', b',"messages":123'])
def test_messages_must_be_a_list(api: Api, messages: bytes) -> None:
    error = fault(api, b'{"model":"m"' + messages + b"}")
    assert (error.code, error.param) == ("invalid_request", "messages")


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"model": "m", "messages": []}),
        (Api.CHAT, {"model": "m", "messages": [5, None, {"role": 3}]}),
        (Api.CHAT, {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Api.CHAT, {**CHAT, "temperature": "hot", "max_tokens": "many", "n": "two"}),
        (Api.COMPLETIONS, {"model": "m"}),
        (Api.COMPLETIONS, {"model": "m", "prompt": [[1, 2], [3]]}),
        (Api.RESPONSES, {"model": "m"}),
    ],
)
def test_what_the_engine_judges_is_passed_on(api: Api, body: dict[str, object]) -> None:
    request = parse_json(api, orjson.dumps(body))
    assert request.data == body
    assert request.n == 1


@pytest.mark.parametrize("value", [True, 1, "true", "True", "on"])
def test_stream_is_true_for_all_that_the_engine_takes_for_true(value: object) -> None:
    assert parse_json(Api.CHAT, orjson.dumps({**CHAT, "stream": value})).stream


@pytest.mark.parametrize("value", [False, 0, None, "false", "x", [1], {}])
def test_stream_is_false_otherwise(value: object) -> None:
    assert not parse_json(Api.CHAT, orjson.dumps({**CHAT, "stream": value})).stream


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_output_tokens": 6}, 6),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 1.5}, None),
        ({"max_tokens": None}, None),
    ],
)
def test_output_limit_is_read_under_each_name(
    fields: dict[str, object], expected: int | None
) -> None:
    assert parse_json(Api.CHAT, orjson.dumps({**CHAT, **fields})).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"session_id": "s"}, "s"),
        ({"prompt_cache_key": "k"}, "k"),
        ({"metadata": {"user_id": "u"}}, "u"),
        ({"session_id": "s", "metadata": {"user_id": "u"}}, "s"),
        ({"session_id": ""}, None),
        ({"session_id": "x" * 257}, None),
        ({"session_id": 5, "metadata": "odd"}, None),
    ],
)
def test_session_comes_from_the_first_usable_field(
    fields: dict[str, object], expected: str | None
) -> None:
    assert parse_json(Api.CHAT, orjson.dumps({**CHAT, **fields})).session == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, UsageOption.EMPTY),
        ({}, UsageOption.EMPTY),
        ({"continuous_usage_stats": True}, UsageOption.EMPTY),
        ({"include_usage": False}, UsageOption.EXPLICIT),
        ({"include_usage": True}, UsageOption.EXPLICIT),
        ("odd", UsageOption.EXPLICIT),
    ],
)
def test_usage_option_is_explicit_only_when_given(options: object, expected: UsageOption) -> None:
    body = orjson.dumps({**CHAT, "stream_options": options})
    assert parse_json(Api.CHAT, body).usage_option is expected


def test_last_of_duplicate_keys_counts() -> None:
    assert parse_json(Api.COMPLETIONS, b'{"model":"a","model":"b"}').model == "b"


def test_form_fields_are_read_and_files_digested() -> None:
    body = form(
        ('file"; filename="a.wav', b"RIFF\x00\r\n--x"), ("model", b"whisper"), ("stream", b"true")
    )
    request = parse_multipart(Api.TRANSCRIPTIONS, BOUNDARY, body)
    assert (request.model, request.stream) == ("whisper", True)
    other = parse_multipart(Api.TRANSCRIPTIONS, BOUNDARY, body.replace(b"RIFF", b"RIFX"))
    assert len(request.data["file:file"]) == 32
    assert other.data["file:file"] != request.data["file:file"]


@pytest.mark.parametrize(
    ("content_type", "body", "param"),
    [
        ("multipart/form-data", form(("model", b"m")), None),
        (BOUNDARY, form(("language", b"en")), "model"),
        (BOUNDARY, b"", "model"),
        (BOUNDARY, b"--xx", "model"),
        (BOUNDARY, b"--xx--", "model"),
        (BOUNDARY, b"--xx\r\nno head at all", "model"),
        (BOUNDARY, form(*[("x", b"1")] * MAX_PARTS, ("model", b"m")), "model"),
    ],
)
def test_form_without_a_model_is_invalid(content_type: str, body: bytes, param: str | None) -> None:
    with pytest.raises(RequestFault) as caught:
        parse_multipart(Api.TRANSCRIPTIONS, content_type, body)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_quoted_boundary_and_missing_end_are_accepted() -> None:
    body = form(("model", b"m"), end=b"")
    request = parse_multipart(Api.TRANSLATIONS, 'multipart/form-data; boundary="xx"', body)
    assert request.model == "m"


def recorded() -> list[tuple[str, Api, bytes]]:
    """Every request to a routed path that was recorded from a real engine, with its body."""
    paths = {api.value: api for api in Api}
    found: list[tuple[str, Api, bytes]] = []
    for file in sorted(SAMPLES.rglob("*.request.http")):
        head, _, body = file.read_bytes().partition(b"\r\n\r\n")
        method, path = head.split(b" ", 2)[:2]
        api = paths.get(path.decode())
        if method == b"POST" and api is not None:
            found.append((f"{file.parent.name}/{file.name}", api, body))
    return found


@pytest.mark.parametrize(("name", "api", "body"), recorded())
def test_recorded_requests_are_refused_only_where_the_engine_did(
    name: str, api: Api, body: bytes
) -> None:
    try:
        request = parse_json(api, body)
    except RequestFault:
        assert "err_" in name
    else:
        assert canonical(request).startswith(b"\xffM")


def test_there_are_recorded_requests() -> None:
    assert len(recorded()) > 50
