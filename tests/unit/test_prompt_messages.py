"""Messages in the form in which vLLM 0.32 hands them to templates."""

from typing import Any

import pytest

from gateway.prompt.messages import Unrenderable, shown


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("content", "string", "parts"),
    [
        ("a", "a", [text("a")]),
        ("", "", [text("")]),
        (None, "", []),
        ([], "", []),
        ([text("a"), text("b")], "a\nb", [text("a"), text("b")]),
        ([text("a"), text("")], "a", [text("a"), text("")]),
        ([{"type": "text", "text": None}, text("b")], "b", [text("b")]),
        ([{"type": "refusal", "refusal": "no"}], "no", [text("no")]),
        ([{"type": "thinking", "thinking": "hm"}], "hm", [text("hm")]),
        (["a"], "a", [text("a")]),
        (
            [{**text("a"), "cache_control": {"type": "ephemeral"}, "data": 1}],
            "a",
            [{**text("a"), "cache_control": {"type": "ephemeral"}}],
        ),
    ],
)
def test_content_is_one_string_or_a_list_of_parts(
    content: object, string: str, parts: list[object]
) -> None:
    message = {"role": "user", "content": content}
    assert shown(message, parts=False)["content"] == string
    assert shown(message, parts=True)["content"] == parts


def test_tool_calls_have_the_engines_order_and_arguments_that_are_objects() -> None:
    function = {"name": "f", "arguments": '{"b": NaN, "a": 18446744073709551617}', "more": 1}
    call = {"type": "function", "index": 0, "id": "1", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    seen = shown(message, parts=False)["tool_calls"][0]
    assert list(seen) == ["id", "function", "type", "index"]
    assert list(seen["function"]) == ["arguments", "name", "more"]
    assert list(seen["function"]["arguments"]) == ["b", "a"]
    assert seen["function"]["arguments"]["a"] == 2**64 + 1
    as_sent = shown(message, parts=False, ordered=False)["tool_calls"][0]
    assert list(as_sent) == list(call)
    assert list(as_sent["function"]) == list(function)


@pytest.mark.parametrize("arguments", ["", None, "nope", "[1]", "5", {}])
def test_arguments_that_are_no_object_are_an_empty_one(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    assert shown(message, parts=False)["tool_calls"][0]["function"]["arguments"] == {}


def test_empty_lists_of_calls_are_left_out() -> None:
    none: tuple[object, ...] = ([], None)
    for calls in none:
        message = {"role": "assistant", "content": "x", "tool_calls": calls}
        assert shown(message, parts=False) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "b", "reasoning_content": "a"}, "b"),
        ({"reasoning": ""}, ""),
    ],
)
def test_reasoning_goes_by_both_its_names(fields: dict[str, str], expected: str) -> None:
    seen = shown({"role": "assistant", "content": "x", **fields}, parts=False)
    assert seen["reasoning"] == seen["reasoning_content"] == expected


def test_results_of_tools_are_strings_whatever_the_format() -> None:
    message = {"role": "tool", "tool_call_id": "1", "content": [text("a"), text("b")]}
    assert shown(message, parts=True)["content"] == "a\nb"
    message["content"] = [{"type": "tool_reference", "name": "f"}]
    assert shown(message, parts=True)["content"] == [{"type": "tool_reference", "name": "f"}]
    assert shown(message, parts=False)["content"] == "f"


def test_billing_header_is_dropped_from_system_prompts_alone() -> None:
    header = "x-anthropic-billing-header: cch=1"
    assert shown({"role": "system", "content": f"{header}\nrest"}, parts=False)["content"] == "rest"
    assert shown({"role": "system", "content": [text(header), text("y")]}, parts=False) == {
        "role": "system",
        "content": "y",
    }
    assert shown({"role": "user", "content": header}, parts=False)["content"] == header


def test_names_tasks_and_a_developers_tools_stay_and_the_rest_goes() -> None:
    message = {"role": "developer", "content": "x", "name": "n", "task": "t", "other": 1}
    assert shown(message, parts=False) == {
        "role": "developer",
        "content": "x",
        "name": "n",
        "task": "t",
        "tools": None,
    }


def test_message_itself_is_never_changed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": [text("a")], "tool_calls": [call]}
    before = repr(message)
    shown(message, parts=True)
    assert repr(message) == before


@pytest.mark.parametrize(
    "message",
    [
        5,
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": [{**text("x"), "uuid": "1"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "user", "content": [{"type": "thinking", "thinking": None}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
    ],
)
def test_what_is_not_text_is_unrenderable(message: object) -> None:
    with pytest.raises(Unrenderable):
        shown(message, parts=False)
