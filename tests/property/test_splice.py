"""Splicing changes one value and no other byte, whatever JSON surrounds it."""

import json  # noqa: TID251 - the reference writer: keeps big integers, can indent and escape
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import UsageOption
from gateway.core.splice import replace_model, request_usage

TEXT = st.text(st.sampled_from('model"\\{}[]:,\n é🌍'), max_size=8)
KEYS = st.sampled_from(["model", "stream_options", "a", "b", 'x"model']) | TEXT
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just("model") | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
STYLES = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"separators": (" ,\n", "\t: ")},
        {"indent": 2},
        {"ensure_ascii": False},
    ]
)


def render(members: list[tuple[str, Any]], style: dict[str, Any]) -> bytes:
    """Write an object, duplicate keys and all."""
    comma, colon = style.get("separators", (", ", ": "))
    texts: list[str] = [json.dumps(k, **style) + colon + json.dumps(v, **style) for k, v in members]
    return f"{{{comma.join(texts)}}}".encode()


@given(st.lists(st.tuples(KEYS, VALUES), max_size=5), STYLES)
def test_every_top_level_model_and_nothing_else_changes(
    members: list[tuple[str, Any]], style: dict[str, Any]
) -> None:
    changed = [(key, "NEW" if key == "model" else value) for key, value in members]
    assert replace_model(render(members, style), "NEW") == render(changed, style)


@given(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=5), STYLES)
def test_appended_usage_leaves_every_other_member(
    members: list[tuple[str, Any]], style: dict[str, Any]
) -> None:
    members = [(key, value) for key, value in members if key != "stream_options"]
    body = render(members, style)
    result = request_usage(body, UsageOption.ABSENT)
    assert result.startswith(body[: body.rindex(b"}")])
    assert json.loads(result) == {**dict(members), "stream_options": {"include_usage": True}}


@given(
    st.lists(st.tuples(KEYS, VALUES), max_size=4),
    st.none() | st.dictionaries(st.sampled_from(["a", "continuous"]), VALUES, max_size=2),
    STYLES,
)
def test_filled_usage_leaves_every_other_member(
    members: list[tuple[str, Any]], options: dict[str, Any] | None, style: dict[str, Any]
) -> None:
    members = [*members, ("stream_options", options)]
    result = request_usage(render(members, style), UsageOption.EMPTY)
    expected = {**dict(members), "stream_options": {"include_usage": True, **(options or {})}}
    assert json.loads(result) == expected


@given(st.binary(max_size=100), st.sampled_from(UsageOption))
def test_any_bytes_are_survived(body: bytes, option: UsageOption) -> None:
    assert isinstance(replace_model(body, "NEW"), bytes)
    assert isinstance(request_usage(body, option), bytes)


@given(st.lists(st.sampled_from([b'"model"', b'"', b"\\", b"{", b"}", b"[", b":", b",", b"u006d"])))
def test_any_near_json_is_survived(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    replace_model(body, "NEW")
    request_usage(body, UsageOption.EMPTY)
    try:
        before = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    assert type(orjson.loads(replace_model(body, "NEW"))) is type(before)
