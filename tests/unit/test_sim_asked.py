"""What requests ask for: every prompt form, every refusal, nothing refused that vLLM takes."""

from typing import Any

import pytest

from gateway.sim import tokens
from gateway.sim.asked import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Asked,
    Limits,
    parse,
    parse_body,
)
from gateway.sim.faults import Fault

LIMITS = Limits("m", 1000)
HI = [{"role": "user", "content": "hi"}]


def ask(api: str, **fields: Any) -> Asked:
    return parse(api, fields, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        ("abcdefgh", [2]),
        (["abcd", "abcdefgh"], [1, 2]),
        ([1, 2, 3], [3]),
        ([[1, 2], [3]], [2, 1]),
    ],
)
def test_every_prompt_form_of_completions(prompt: Any, counts: list[int]) -> None:
    asked = ask(COMPLETIONS, prompt=prompt)

    assert [tokens.count(packed) for packed in asked.prompts] == counts
    assert asked.max_tokens == 16


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"messages": HI}),
        (MESSAGES, {"messages": HI, "max_tokens": 5}),
        (RESPONSES, {"input": "hi"}),
        (RESPONSES, {"input": HI}),
    ],
)
def test_every_conversation_api_renders_the_same_prompt(api: str, fields: dict[str, Any]) -> None:
    assert ask(api, **fields).prompts == (tokens.render(HI),)


def test_system_and_instructions_lead_the_prompt() -> None:
    expected = tokens.render(HI, system="be kind")

    assert ask(MESSAGES, messages=HI, system="be kind").prompts == (expected,)
    assert ask(RESPONSES, input=HI, instructions="be kind").prompts == (expected,)


def test_options_are_read() -> None:
    asked = ask(
        CHAT,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        n=3,
        stop=["a", ""],
        cache_salt="s",
        max_tokens=9,
        max_completion_tokens=4,
    )

    assert (asked.stream, asked.usage, asked.continuous) == (True, True, True)
    assert (asked.n, asked.stop, asked.salt, asked.max_tokens) == (3, ("a",), "s", 4)


@pytest.mark.parametrize(
    ("api", "fields", "status", "param"),
    [
        (CHAT, {}, 400, "body.messages"),
        (CHAT, {"messages": None}, 400, "body.messages"),
        (CHAT, {"messages": "hi"}, 400, "body.messages"),
        (CHAT, {"messages": []}, 400, None),
        (CHAT, {"messages": HI, "model": "other"}, 404, "model"),
        (CHAT, {"messages": HI, "temperature": -0.5}, 400, "temperature"),
        (CHAT, {"messages": HI, "temperature": "warm"}, 400, "body.temperature"),
        (CHAT, {"messages": HI, "n": 0}, 400, "n"),
        (CHAT, {"messages": HI, "n": 2, "temperature": 0}, 400, None),
        (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": 1001}, 400, "max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": "x"}, 400, "body.max_tokens"),
        (CHAT, {"messages": HI, "max_tokens": 999}, 400, "input_tokens"),
        (CHAT, {"messages": HI, "stream_options": {}}, 400, "stream_options"),
        (COMPLETIONS, {}, 400, "body.prompt"),
        (COMPLETIONS, {"prompt": []}, 400, None),
        (COMPLETIONS, {"prompt": ""}, 400, None),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, None),
        (COMPLETIONS, {"prompt": "x" * 4000}, 400, "input_tokens"),
        (RESPONSES, {}, 400, "body.input"),
    ],
)
def test_what_vllm_refuses_is_refused(
    api: str, fields: dict[str, Any], status: int, param: str | None
) -> None:
    with pytest.raises(Fault) as refused:
        ask(api, **fields)

    assert (refused.value.status, refused.value.param) == (status, param)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"3", "application/json"),
        (b"{}", "text/plain"),
        (b"{}", ""),
    ],
)
def test_bodies_that_are_no_json_object_are_a_400(body: bytes, kind: str) -> None:
    with pytest.raises(Fault) as refused:
        parse_body(body, kind)

    assert refused.value.status == 400


def test_a_charset_does_not_make_it_another_media_type() -> None:
    assert parse_body(b'{"a":1}', "application/json; charset=utf-8") == {"a": 1}


def test_unknown_fields_and_a_missing_model_are_fine() -> None:
    assert ask(CHAT, messages=HI, no_such=1).model == "m"
