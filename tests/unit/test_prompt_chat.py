"""Requests of every chat API as conversations: what vLLM makes of them, or nothing."""

from typing import Any

import orjson
import pytest

from gateway.core.request import ParsedRequest, parse_json
from gateway.core.types import Api
from gateway.prompt.chat import conversation
from gateway.prompt.messages import Unrenderable

HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}


def request(api: Api, **fields: Any) -> ParsedRequest:
    return parse_json(api, orjson.dumps({"model": "m", **fields}))


def test_options_become_variables_and_unset_ones_do_not() -> None:
    chat = conversation(
        request(
            Api.CHAT,
            messages=HI,
            chat_template_kwargs={"a": 1, "b": None, "c": "auto", "add_generation_prompt": False},
            documents=[{"text": "d"}],
            tool_choice="none",
        )
    )
    documents = [{"text": "d"}]
    assert chat.variables == {"a": 1, "add_generation_prompt": True, "documents": documents}


def test_effort_turns_thinking_on_or_off_unless_the_client_says_so() -> None:
    def thinking(**fields: Any) -> object:
        found = conversation(request(Api.CHAT, messages=HI, **fields)).variables
        return found.get("enable_thinking")

    assert thinking() is None
    assert thinking(reasoning_effort="low") is True
    assert thinking(reasoning_effort="none") is False
    options = {"enable_thinking": False}
    assert thinking(reasoning_effort="low", chat_template_kwargs=options) is False


def test_tools_keep_the_fields_that_the_engine_knows_in_its_order() -> None:
    function = {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f", "extra": 1}
    tool = {"function": function, "type": "function", "more": 2}
    chat = conversation(request(Api.CHAT, messages=HI, tools=[tool]))
    assert orjson.dumps(chat.tools) == orjson.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": None,
                    "parameters": {"b": 1, "a": 2},
                    "strict": True,
                },
            }
        ]
    )


def test_inline_system_messages_lead_where_the_template_wants_it() -> None:
    messages = [*HI, {"role": "system", "content": "later"}, {"role": "user", "content": "x"}]
    asked = request(Api.MESSAGES, system=[{"type": "text", "text": "first "}], messages=messages)
    merged = conversation(asked, merges_system=True).messages
    assert merged == [{"role": "system", "content": "first later"}, *HI, messages[2]]
    assert conversation(asked).messages[2] == messages[1]


def test_tool_results_come_before_what_else_the_user_says() -> None:
    blocks = [
        {"type": "text", "text": "and"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
    ]
    chat = conversation(request(Api.MESSAGES, messages=[{"role": "user", "content": blocks}]))
    assert chat.messages == [
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "user", "content": "and"},
    ]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"output_config": {"effort": "high"}}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, "high"),
    ],
)
def test_thinking_of_messages_is_an_effort(fields: dict[str, Any], effort: str | None) -> None:
    asked = request(Api.MESSAGES, messages=HI, **fields)
    found = conversation(asked, disabled_effort="low").variables
    assert found.get("reasoning_effort") == effort


def test_items_of_responses_join_into_one_answer() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ]
    chat = conversation(request(Api.RESPONSES, instructions="be", input=items))
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
    assert not chat.ordered
    assert chat.messages == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.CHAT, {"messages": []}),
        (Api.CHAT, {"messages": HI, "tools": 5}),
        (Api.CHAT, {"messages": HI, "tools": [5]}),
        (Api.CHAT, {"messages": HI, "chat_template": "x"}),
        (Api.CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}),
        (Api.CHAT, {"messages": HI, "truncate_prompt_tokens": 5}),
        (Api.CHAT, {"messages": HI, "continue_final_message": True}),
        (Api.MESSAGES, {"messages": [5]}),
        (Api.MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}),
        (Api.MESSAGES, {"messages": [{"role": "user", "content": 5}]}),
        (Api.MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (Api.MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        (Api.MESSAGES, {"messages": HI, "system": 5}),
        (Api.MESSAGES, {"messages": HI, "system": [{"type": "tool_addition"}]}),
        (Api.MESSAGES, {"messages": HI, "tools": [{"name": "f"}]}),
        (
            Api.MESSAGES,
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        ),
        (
            Api.MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}
                ]
            },
        ),
        (Api.RESPONSES, {"input": []}),
        (Api.RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (Api.RESPONSES, {"input": "x", "truncation": "auto"}),
        (Api.RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}),
        (Api.RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (Api.RESPONSES, {"input": [{"role": "user", "content": "x", "status": "incomplete"}]}),
        (Api.RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
        (Api.EMBEDDINGS, {"input": "x"}),
    ],
)
def test_what_is_not_covered_is_unrenderable(api: Api, fields: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        conversation(request(api, **fields))


ODD: list[Any] = [None, True, 1, 1.5, "x", [], [[]], [None], [1], {}, {"a": {"b": [1]}}]
_ODD_SHAPES = [
    *({"messages": HI, "tools": odd} for odd in ODD),
    *({"messages": [{"role": "user", "content": [{"type": odd, "text": "x"}]}]} for odd in ODD),
    *({"messages": [{"role": odd, "content": "x"}]} for odd in ODD),
    *({"messages": [{"role": "assistant", "tool_calls": odd}]} for odd in ODD),
    *({"messages": HI, "system": odd} for odd in ODD),
    *({"messages": HI, "chat_template_kwargs": odd} for odd in ODD),
    *({"messages": HI, "instructions": odd, "reasoning": odd, "truncation": odd} for odd in ODD),
]


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.COUNT_TOKENS, Api.RESPONSES])
def test_what_a_client_puts_in_the_wrong_place_is_the_engines_to_refuse(api: Api) -> None:
    refused = 0
    for fields in _ODD_SHAPES:
        asked = dict(fields)
        if api is Api.RESPONSES:
            asked["input"] = asked.pop("messages")
        try:
            conversation(request(api, **asked))
        except Unrenderable:
            refused += 1
    assert 0 < refused < len(_ODD_SHAPES)
