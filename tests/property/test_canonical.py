"""Streams of growing conversations are prefixes; equal streams mean equal prompts."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.canonical import canonical
from gateway.core.chain import chain_bytes
from gateway.core.request import parse_json
from gateway.core.types import Api

TEXT = st.text('ab\x00\n"é\xff🌍', max_size=6)
TEXT_PART = st.builds(lambda text: {"type": "text", "text": text}, TEXT)
OTHER_PART = st.one_of(
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, TEXT),
    st.builds(lambda name: {"type": "tool_use", "name": name, "input": {}}, TEXT),
    st.builds(lambda inner: {"type": "tool_result", "content": inner}, st.lists(TEXT_PART, max_size=2)),
)  # fmt: skip
CONTENT = TEXT | st.lists(TEXT_PART | OTHER_PART, max_size=3) | st.none()
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "other"]), "content": CONTENT},
    optional={"name": TEXT, "tool_calls": st.lists(st.dictionaries(TEXT, TEXT), max_size=2)},
)
MESSAGES = st.lists(MESSAGE, max_size=4)
PROMPT = st.one_of(
    TEXT,
    st.lists(TEXT, max_size=3),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3),
)


def stream(api: Api, **fields: Any) -> bytes:
    return canonical(parse_json(api, orjson.dumps({"model": "m", **fields})))


def meaning(message: dict[str, Any]) -> Any:
    """What a template can tell apart: a text is its one text part, empty extras are absent."""
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    extras = {key: value for key, value in message.items() if key not in ("role", "content")}
    return message["role"], content or [], {key: value for key, value in extras.items() if value}


@given(MESSAGES, MESSAGES, st.lists(st.dictionaries(TEXT, TEXT), max_size=2))
def test_growing_conversation_extends_its_stream_and_its_chain(
    old: list[dict[str, Any]], new: list[dict[str, Any]], tools: list[dict[str, str]]
) -> None:
    for api in (Api.CHAT, Api.MESSAGES):
        before = stream(api, messages=old, tools=tools, system="s")
        after = stream(api, messages=old + new, tools=tools, system="s")
        assert after.startswith(before)
        chain = chain_bytes(before, 1, 16)
        assert chain_bytes(after, 1, 16)[: len(chain)] == chain


@given(MESSAGES, MESSAGES)
def test_equal_streams_mean_equal_conversations(
    one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> None:
    same = [meaning(message) for message in one] == [meaning(message) for message in two]
    assert (stream(Api.CHAT, messages=one) == stream(Api.CHAT, messages=two)) == same


@given(MESSAGE, st.data())
def test_a_small_change_changes_the_stream(message: dict[str, Any], data: st.DataObject) -> None:
    other = {**message, data.draw(st.sampled_from(["content", "name"])): data.draw(CONTENT)}
    same = meaning(message) == meaning(other)
    assert (stream(Api.CHAT, messages=[message]) == stream(Api.CHAT, messages=[other])) == same


def prompt_meaning(prompt: Any) -> Any:
    """A list of one is its element, as far as the engine's prompt goes."""
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0] != []:
        return prompt[0] if isinstance(prompt[0], str | list) else prompt
    return prompt


@given(PROMPT, PROMPT)
def test_equal_streams_mean_equal_prompts(one: Any, two: Any) -> None:
    same = prompt_meaning(one) == prompt_meaning(two)
    assert (stream(Api.COMPLETIONS, prompt=one) == stream(Api.COMPLETIONS, prompt=two)) == same


@given(st.text(max_size=40), st.text(max_size=40))
def test_growing_text_extends_its_stream(old: str, new: str) -> None:
    old, new = (text.encode("utf-8", "replace").decode() for text in (old, new))
    before = stream(Api.COMPLETIONS, prompt=old)
    assert stream(Api.COMPLETIONS, prompt=old + new).startswith(before)
