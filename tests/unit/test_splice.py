"""Values replaced in place: what changes, and that nothing else does."""

import orjson
import pytest

from gateway.core.request import UsageOption
from gateway.core.splice import MAX_STEPS, replace_model, request_usage


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a"}', b'{"model":"NEW"}'),
        (b' {\n "x": 1, "model" :\t"a" , "y":2}\n', b' {\n "x": 1, "model" :\t"NEW" , "y":2}\n'),
        (b'{"model":"a","model":"b"}', b'{"model":"NEW","model":"NEW"}'),
        (b'{"mod\\u0065l":"a","model":"b"}', b'{"mod\\u0065l":"NEW","model":"NEW"}'),
        (b'{"model":"a\\"}b\\\\"}', b'{"model":"NEW"}'),
        (b'{"model":[{"model":"x"}],"model":null}', b'{"model":"NEW","model":"NEW"}'),
        (b'{"t":{"model":"in"},"model":"a"}', b'{"t":{"model":"in"},"model":"NEW"}'),
        (b'{"t":[{"model":"in"}],"model":"a"}', b'{"t":[{"model":"in"}],"model":"NEW"}'),
        (b'{"x":"model","model":"a"}', b'{"x":"model","model":"NEW"}'),
        (b'{"x":"\\"model\\":","model":"a"}', b'{"x":"\\"model\\":","model":"NEW"}'),
        (b'{"x":"{\\\\","model":"a"}', b'{"x":"{\\\\","model":"NEW"}'),
        (b'{"s":12345678901234567890123,"model":"a"}', b'{"s":12345678901234567890123,"model":"NEW"}'),
        (b'{"f":1.10,"model":"a","e":"\\u00e9"}', b'{"f":1.10,"model":"NEW","e":"\\u00e9"}'),
        (b'{"mo\\u0064el":7}', b'{"mo\\u0064el":"NEW"}'),
        (b'{"x":{}}', b'{"x":{}}'),
        (b'["model","a"]', b'["model","a"]'),
    ],
)  # fmt: skip
def test_only_the_top_level_model_changes(body: bytes, expected: bytes) -> None:
    assert replace_model(body, "NEW") == expected


def test_new_name_is_escaped() -> None:
    body = replace_model(b'{"model":"a"}', 'q"\\\n')
    assert orjson.loads(body) == {"model": 'q"\\\n'}


@pytest.mark.parametrize(
    "body",
    [b"", b'{"\\u006d":"\\{"', b"{", b'"model"', b'{"model":', b'{"model":"', b"}]", b"\xff"],
)
def test_broken_bodies_never_raise(body: bytes) -> None:
    replace_model(body, "NEW")
    for option in UsageOption:
        request_usage(body, option)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (b'{"a":"}"} \n', b'{"a":"}","stream_options":{"include_usage":true}} \n'),
        (b"{ }", b'{ "stream_options":{"include_usage":true}}'),
    ],
)
def test_absent_usage_option_is_appended(body: bytes, expected: bytes) -> None:
    assert request_usage(body, UsageOption.ABSENT) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"null", b'{"include_usage":true}'),
        (b"{}", b'{"include_usage":true}'),
        (b"{ }", b'{"include_usage":true }'),
        (b'{"x":[{}, 1.0]}', b'{"include_usage":true,"x":[{}, 1.0]}'),
    ],
)
def test_empty_usage_option_is_filled(options: bytes, expected: bytes) -> None:
    body = b'{"a": 1,"stream_options" : %b, "b":{"stream_options":null}}'
    assert request_usage(body % options, UsageOption.EMPTY) == body % expected


def test_of_duplicate_options_the_effective_one_is_filled() -> None:
    body = b'{"stream_options":{"include_usage":false},"stream_options":null}'
    assert request_usage(body, UsageOption.EMPTY) == (
        b'{"stream_options":{"include_usage":false},"stream_options":{"include_usage":true}}'
    )


def test_explicit_usage_option_is_left_alone() -> None:
    body = b'{"stream_options":{"include_usage":false}}'
    assert request_usage(body, UsageOption.EXPLICIT) == body


def test_work_on_a_body_is_bounded() -> None:
    filler = b'{"model":1},' * MAX_STEPS
    body = b'{"model":"a","x":[%b0],"model":"a"}' % filler
    assert replace_model(body, "NEW") == body.replace(b'{"model":"a"', b'{"model":"NEW"')
    endless = b'{"stream_options":{"x":[%b0]}}' % filler
    assert request_usage(endless, UsageOption.EMPTY) == endless
