"""What is too much to render on the loop, and that it then goes by byte blocks."""

from typing import Any

import orjson
import pytest

from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.types import Api
from gateway.prompt.amount import MAX_MESSAGES, MAX_TEXT_CHARS, MAX_WEIGHT, check_amount
from gateway.prompt.conversation import Conversations
from gateway.prompt.engines import Encoder
from gateway.prompt.messages import Unrenderable
from gateway.prompt.separate import Separation
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokens import TokenPrompter
from tests.prompt_kit import ADDED, SPECIAL_TOKENS, SPECIALS, TEMPLATES, encode

HI = {"role": "user", "content": "hi"}


def call(arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def calls(count: int, arguments: object = "{}") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call(arguments)] * count}


def tools(count: int, fields: int) -> list[dict[str, Any]]:
    properties = {f"field{number}": {"type": "string"} for number in range(fields)}
    described = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": described}] * count


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ([HI] * MAX_WEIGHT, None),
        ([calls(MAX_WEIGHT // 2 - 1)], None),
        ([HI], tools(150, 30)),
        ([{"role": "user", "content": "x" * MAX_TEXT_CHARS}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}], None),
        ([1, None, {"role": "user", "content": 1, "tool_calls": 1}], "odd"),
    ],
)
def test_what_engines_serve_every_day_is_rendered(messages: list[Any], given: object) -> None:
    check_amount(messages, given)


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ([HI] * (MAX_WEIGHT + 1), None),
        ([calls(MAX_WEIGHT)], None),
        ([calls(1, {str(number): number for number in range(20_000)})], None),
        ([calls(1, orjson.dumps({str(n): n for n in range(20_000)}).decode())], None),
        ([HI], tools(1, 20_000)),
        ([HI], tools(5_000, 3)),
        ([{"role": "user", "content": "x" * (MAX_TEXT_CHARS // 2 + 1)}] * 2, None),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}], None),
    ],
)
def test_what_would_hold_the_loop_up_is_not(messages: list[Any], given: object) -> None:
    with pytest.raises(Unrenderable):
        check_amount(messages, given)


class Prompts:
    """A prompter with the short way, and how often its template was asked for much."""

    def __init__(self) -> None:
        template = ChatTemplate(TEMPLATES["thinking"], SPECIAL_TOKENS)
        separation = Separation(template, [*SPECIALS, *ADDED], encode)
        self.prompter = TokenPrompter(
            NoEncoder(),
            template,
            BytePrompter(1),
            salt=7,
            block_tokens=16,
            conversations=Conversations(template, separation),
        )

    def exact(self, **fields: Any) -> bool:
        request = parse_json(Api.CHAT, orjson.dumps({"model": "m", **fields}))
        return self.prompter.chain(request).exact


class NoEncoder(Encoder):
    """The kit's tokenizer."""

    def __init__(self) -> None:
        self.name, self.inline_chars, self.chars_per_s, self.wraps = "kit", 8192, 1e6, True
        self._encode = encode


def test_a_chat_of_too_much_goes_by_byte_blocks() -> None:
    prompts = Prompts()
    assert prompts.exact(messages=[HI])
    assert not prompts.exact(messages=[HI], tools=tools(5_000, 3))
    assert not prompts.exact(messages=[HI] * (MAX_WEIGHT + 1))


def test_a_conversation_that_grew_beyond_is_still_rendered_in_parts() -> None:
    prompts = Prompts()
    turns: list[Any] = []
    for _ in range(4):
        for _ in range(MAX_WEIGHT // 4):
            turns += [HI, {"role": "assistant", "content": "ho"}]
        assert prompts.exact(messages=[*turns, HI])
    assert len(turns) > 1.9 * MAX_WEIGHT
    assert prompts.prompter.in_parts == 4


def test_not_even_then_without_an_end() -> None:
    assert not Prompts().exact(messages=[HI] * (MAX_MESSAGES + 1))
