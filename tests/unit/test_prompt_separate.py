"""Which cuts are proven for which template habits, and what makes a template unfit."""

from typing import Any

import pytest

from gateway.prompt.chat import Conversation
from gateway.prompt.content_format import reads_parts
from gateway.prompt.frames import Kind
from gateway.prompt.separate import Separation
from gateway.prompt.template import ChatTemplate, One
from tests.prompt_kit import ADDED, SPECIAL_TOKENS, SPECIALS, TEMPLATES, encode

PLAIN = {"add_generation_prompt": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MACRO = "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
CHAT: set[Kind] = {("user", "assistant"), ("assistant", "user")}


def separation(source: str) -> Separation:
    return Separation(ChatTemplate(source, SPECIAL_TOKENS), [*SPECIALS, *ADDED], encode)


def proven(found: Separation, tools: Any = None, **variables: Any) -> frozenset[Kind]:
    frame = found.frame(Conversation([], tools, {**PLAIN, **variables}))
    return frozenset() if frame is None else frame[1].proven


def test_plain_chatml_is_cut_before_every_speaker() -> None:
    found = separation(TEMPLATES["chatml"])
    assert proven(found) == CHAT | {("system", "user"), ("tool", "assistant")}


def test_template_that_drops_thoughts_knows_the_words_that_matter() -> None:
    found = separation(TEMPLATES["thinking"])
    assert proven(found) >= CHAT
    assert found.words == {"</think>"}
    assert found.unsafe == {"<tool_response>", "</tool_response>"}


def test_tools_in_the_first_question_leave_it_with_the_system_prompt() -> None:
    found = separation(TEMPLATES["headers"])
    assert ("system", "user") in proven(found)
    assert ("system", "user") not in proven(found, TOOLS)
    assert proven(found, TOOLS) >= CHAT


def test_tools_in_the_last_question_are_rendered_whole() -> None:
    found = separation(TEMPLATES["last_tools"])
    assert proven(found) >= CHAT
    assert not proven(found, TOOLS)


def test_options_that_were_not_tried_are_rendered_whole() -> None:
    found = separation(TEMPLATES["thinking"])
    assert proven(found, enable_thinking=False)
    assert not proven(found, enable_thinking="perhaps")
    assert proven(found, unknown_to_the_template="perhaps")


@pytest.mark.parametrize("name", ["documents", "bos_token", "raise_exception", "namespace"])
def test_options_in_the_place_of_what_templates_rely_on_are_rendered_whole(name: str) -> None:
    shown = "{% if documents %}{{ documents }}{% endif %}" + TEMPLATES["headers"]
    for source in (shown, TEMPLATES["thinking"]):
        found = separation(source)
        assert proven(found)
        assert not proven(found, **{name: [1]})


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATES["plain"],
        TEMPLATES["chatml"].replace("m['role']", "m['role'] ~ loop.index"),
        TEMPLATES["chatml"] + "{{ messages | length }}",
        TEMPLATES["chatml"] + "{{ strftime_now('%H:%M') }}",
        "<|im_start|>{{ messages[-1].content }}<|im_end|>",
    ],
)
def test_template_that_looks_at_more_than_each_message_is_never_cut(source: str) -> None:
    assert not proven(separation(source)) & CHAT


def test_date_is_allowed_and_read_anew_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    day = "2026-11-30"
    monkeypatch.setattr("gateway.prompt.separate._today", lambda: day)
    monkeypatch.setattr(
        "gateway.prompt.template._strftime_now", lambda pattern: day if pattern == "%F" else ""
    )
    found = separation("{{ strftime_now('%F') }}<|im_end|>" + TEMPLATES["chatml"])
    chat = Conversation([], None, dict(PLAIN))
    first = found.frame(chat)
    assert first is not None
    seen = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert first[1].part(seen[1:], "user", "user", closed=True)
    day = "2026-12-01"
    later = found.frame(chat)
    assert later is not None
    assert later[0] != first[0]
    assert first[1].part(seen[1:], "user", "user", closed=True).endswith("a")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages[1:] %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% set x = messages %}{% for m in x %}{% for p in m.content %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for p in content %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        (
            MACRO + "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", False),
        ("{% for a, b in messages %}{% for p in content %}{% endfor %}{% endfor %}", False),
    ],
)
def test_parts_are_given_where_the_engine_would_give_them(source: str, expected: bool) -> None:
    assert reads_parts(One(source).tree) is expected
