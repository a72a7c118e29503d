"""The conversation cache gives what rendering and encoding the whole prompt gives: always."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.chain import chain_tokens
from gateway.prompt.chat import Conversation
from gateway.prompt.conversation import Chained, Conversations
from gateway.prompt.messages import Unrenderable
from gateway.prompt.separate import Separation
from gateway.prompt.template import ChatTemplate
from tests.prompt_kit import ADDED, SPECIAL_TOKENS, SPECIALS, TEMPLATES, encode

TEXTS = st.sampled_from(
    [
        *("hello", "the quick brown fox", " lead and trail ", "a\n\nb", "x" * 40, "é 日本", "\n"),
        *("<|im_end|>", "a<|im_start|>user\nb", "</think>", "<think>why</think>\n\nso", "[INST]"),
        *("<tool_response>r</tool_response>", "<tool_response>\nr", "</s>", "<", "|im_start|>"),
    ]
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": None, "parameters": {}}}
    for name in ("f", "look")
]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def answer(text: str, thought: str | None) -> list[dict[str, Any]]:
    extra = {} if thought is None else {"reasoning_content": thought}
    return [{"role": "assistant", "content": text, **extra}]


def calls(text: str, thought: str | None, results: list[str]) -> list[dict[str, Any]]:
    made = [
        {"id": f"id{i}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        for i in range(len(results))
    ]
    message = {**answer(text, thought)[0], "tool_calls": made}
    return [
        message,
        *({"role": "tool", "content": r, "tool_call_id": f"id{i}"} for i, r in enumerate(results)),
    ]


THOUGHTS = st.none() | TEXTS
STEPS = st.one_of(
    st.builds(user, TEXTS),
    st.builds(answer, TEXTS, THOUGHTS),
    st.builds(calls, TEXTS, THOUGHTS, st.lists(TEXTS, min_size=1, max_size=2)),
)
SYSTEM = st.lists(
    st.sampled_from(
        [{"role": "system", "content": "You are."}, {"role": "developer", "content": "Be."}]
    ),
    max_size=2,
)
OPTIONS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"add_generation_prompt": True, "enable_thinking": "odd"},
    ]
)


@cache
def separated(name: str) -> tuple[ChatTemplate, Separation]:
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    return template, Separation(template, [*SPECIALS, *ADDED], encode)


def whole(template: ChatTemplate, chat: Conversation, chained: Chained) -> tuple[int, list[int]]:
    ids = encode(template.render(chat))
    return len(ids), list(chain_tokens(ids, chained.seed, chained.block_tokens))


@st.composite
def asked(draw: st.DrawFn) -> list[tuple[Conversation, Chained]]:
    """Draw requests along a few conversations that fork and grow."""
    roots = draw(st.lists(SYSTEM, min_size=1, max_size=2))
    known: list[list[dict[str, Any]]] = [list(root) for root in roots]
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        trunk = draw(st.sampled_from(known))
        cut = draw(st.integers(0, len(trunk))) if draw(st.booleans()) else len(trunk)
        steps = draw(st.lists(STEPS, min_size=1, max_size=3))
        messages = [*trunk[:cut], *(message for step in steps for message in step)]
        known.append(messages)
        chat = Conversation(
            messages, draw(st.sampled_from([None, TOOLS[:1], TOOLS])), draw(OPTIONS)
        )
        chained = Chained(draw(st.sampled_from([5, 6])), draw(st.sampled_from([2, 4, 16])))
        requests.append((chat, chained))
    return requests


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@given(requests=asked(), max_bytes=st.sampled_from([0, 3_000, 20_000, 1 << 20]))
@settings(max_examples=100, deadline=None)
def test_any_tree_of_conversations_in_any_order_gives_the_whole_prompts_chain(
    name: str, requests: list[tuple[Conversation, Chained]], max_bytes: int
) -> None:
    template, separation = separated(name)
    table = Conversations(template, separation, max_bytes)
    for chat, chained in [*requests, *requests]:
        try:
            route = table.route(chat, chained)
        except Unrenderable:
            continue
        chain = route.finish([encode(text) for text in route.texts])
        assert (chain.tokens, list(chain.hashes)) == whole(template, chat, chained)
        assert table.bytes <= max_bytes


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "last_tools"])
def test_usual_conversations_take_the_short_way(name: str) -> None:
    template, separation = separated(name)
    table = Conversations(template, separation)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are."}]
    for turn in range(8):
        messages += user(f"question {turn}")
        chat = Conversation(list(messages), None, {"add_generation_prompt": True})
        route = table.route(chat, Chained(1, 16))
        if turn > 1:
            assert len(route.texts) == 2
            assert len(route.texts[0]) < 120
        route.finish([encode(text) for text in route.texts])
        messages += answer(f"answer {turn}", None)


def test_template_without_special_tokens_is_rendered_whole() -> None:
    assert not separated("plain")[1].proven
