"""Chat templates as engines render them."""

from typing import Any

import orjson
import pytest

from gateway.core.request import ParsedRequest, UsageOption
from gateway.core.types import Api
from gateway.prompt.chat import conversation
from gateway.prompt.template import ChatTemplate, Unrenderable

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)


def asked(api: Api, fields: dict[str, Any]) -> ParsedRequest:
    return ParsedRequest(
        api, "m", False, None, 1, False, None, UsageOption.ABSENT, fields, len(orjson.dumps(fields))
    )


def render(source: str, *messages: object, **fields: Any) -> str:
    request = asked(Api.CHAT, {"messages": [*messages], **fields})
    return ChatTemplate(source, {"bos_token": "<s>"}).render(conversation(request))


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_messages_and_generation_prompt_are_rendered() -> None:
    assert render(CHATML, user("hi")) == "<|user|>hi\n<|assistant|>"
    assert render(CHATML, user("hi"), add_generation_prompt=False) == "<|user|>hi\n"


def test_text_parts_are_joined_by_lines_for_plain_templates() -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    assert render(CHATML, user(parts)) == "<|user|>a\nb\n<|assistant|>"


def test_templates_that_read_parts_are_given_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PARTS, user(parts), user("c")) == "[user](a)(b)[user](c)"


def test_special_tokens_and_options_are_known_by_name() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ reasoning_effort }}"
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert render(source, user("x"), **fields) == "<s>Falselow"


def test_tools_are_printed_as_the_engine_prints_them() -> None:
    tool = {"function": {"parameters": {"é": 1}, "name": "f", "strict": True}, "type": "function"}
    assert render("{{ tools | tojson }}", user("x"), tools=[tool]) == (
        '[{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": {"é": 1}, "strict": true}}]'
    )
    assert render("{{ tools is none }}", user("x")) == "True"


def test_tool_arguments_are_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].tool_calls[0].function.arguments.a[0] }}|{{ messages[0].content }}"
    assert render(source, message) == "1|"


def test_generation_marks_and_loop_controls_are_understood() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source, user("a"), user("b")) == "a"


def test_now_is_formatted_as_asked() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", user("x"))) == 10


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [5]},
        {"messages": [{"content": "x"}]},
        {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
        {"messages": [user(5)]},
        {"messages": [user([5])]},
        {"messages": [user("x")], "chat_template": "{{ 1 }}"},
        {"messages": [user("x")], "continue_final_message": True},
        {"messages": [user("x")], "tools": 5},
        {"messages": [user("x")], "tools": [5]},
        {"messages": [user("x")], "chat_template_kwargs": 5},
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]},
        {"messages": [user("x")], "truncate_prompt_tokens": 5},
        {"messages": [user("x")], "chat_template_kwargs": {"tokenize": True}},
    ],
)
def test_what_it_does_not_know_is_unrenderable(fields: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable):
        render(CHATML, *fields.pop("messages"), **fields)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ unknown.field.deep }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_fails_or_reaches_out_is_unrenderable(source: str) -> None:
    with pytest.raises(Unrenderable):
        render(source, user("x"))


def test_broken_template_is_refused_when_built() -> None:
    with pytest.raises(Unrenderable, match="does not compile"):
        ChatTemplate("{% for %}", {})
