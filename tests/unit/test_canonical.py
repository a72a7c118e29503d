"""The canonical stream by example: what it holds, what it ignores, what it keeps apart."""

import itertools
from typing import Any

import orjson
import pytest

from gateway.core.canonical import MAX_PIECES, MAX_WEIGHED_MEDIA, MEDIA_BYTES, canonical
from gateway.core.request import parse_json, parse_multipart
from gateway.core.types import Api

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def stream(api: Api, *, isolation: str = "", **fields: Any) -> bytes:
    request = parse_json(api, orjson.dumps({"model": "m", **fields}))
    return canonical(request, isolation=isolation)


def chat(*messages: object, **fields: Any) -> bytes:
    return stream(Api.CHAT, messages=list(messages), **fields)


def user(content: object, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def test_key_order_and_sampling_fields_do_not_matter() -> None:
    first = parse_json(Api.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    other = b'{"temperature":1,"messages":[{"content":"x","role":"user"}],"seed":4,"model":"m"}'
    assert canonical(first) == canonical(parse_json(Api.CHAT, other))


def test_turns_of_a_conversation_are_prefixes() -> None:
    turns: list[object] = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert chat(*turns).startswith(chat(*turns[:1]))


def test_messages_with_a_common_beginning_share_it() -> None:
    document = "long document " * 100
    one, two = chat(user(document + "question 1")), chat(user(document + "question 2"))
    common = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    assert common > len(document)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"documents": [{"text": "d"}]},
    ],
)
def test_what_changes_the_rendered_prompt_changes_the_stream(fields: dict[str, Any]) -> None:
    assert chat(user("x"), **fields) != chat(user("x"))


def test_model_and_isolation_separate_streams() -> None:
    plain = stream(Api.COMPLETIONS, prompt="x")
    assert stream(Api.COMPLETIONS, prompt="x", model="n") != plain
    assert stream(Api.COMPLETIONS, prompt="x", isolation="team") != plain


def test_resolved_model_name_is_what_counts() -> None:
    request = parse_json(Api.COMPLETIONS, b'{"model":"alias","prompt":"x"}')
    request.model = "m"
    assert canonical(request) == stream(Api.COMPLETIONS, prompt="x")


def test_one_text_part_equals_its_string() -> None:
    assert chat(user([{"type": "text", "text": "x"}])) == chat(user("x"))


def test_cache_markers_do_not_break_the_prefix() -> None:
    marker = {"type": "ephemeral"}
    tool = {"name": "f", "input_schema": {}}
    block = {"type": "text", "text": "x"}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    marked = stream(
        Api.MESSAGES,
        system=[{**block, "cache_control": marker}],
        tools=[tool, {**tool, "cache_control": marker}],
        messages=[user([{**block, "cache_control": marker}, {**use, "cache_control": marker}])],
    )
    plain = stream(Api.MESSAGES, system=[block], tools=[tool, tool], messages=[user([block, use])])
    assert marked == plain


def test_billing_block_that_changes_per_request_is_left_out() -> None:
    def claude(mark: str) -> bytes:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"}
        system = [billing, {"type": "text", "text": "You are an agent."}]
        return stream(Api.MESSAGES, system=system, messages=[user("x")])

    assert claude("1") == claude("2")
    assert b"You are an agent." in claude("1")


def test_media_counts_by_digest_and_weighs_as_an_image() -> None:
    text, pictured = chat(user("x")), chat(user(["x", IMAGE]))
    assert MEDIA_BYTES <= len(pictured) - len(text) < MEDIA_BYTES + 16
    other = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]["url"] + "B"}}  # type: ignore[index]
    assert chat(user(["x", other])) != pictured


def test_image_in_a_tool_result_counts_by_digest() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE, "text"]}
    body = stream(Api.MESSAGES, messages=[user([result])])
    assert MEDIA_BYTES < len(body) < 2 * MEDIA_BYTES
    assert b"text" in body


def test_text_inside_and_after_a_tool_result_differ() -> None:
    def with_result(inner: list[str], after: list[str]) -> bytes:
        return chat(user([{"type": "tool_result", "content": inner}, *after]))

    assert with_result(["a", "b"], []) != with_result(["a"], ["b"])


def test_tool_calls_and_names_are_part_of_the_prompt() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    silent = {"role": "assistant", "content": None}
    assert chat({**silent, "tool_calls": [call]}) != chat(silent)
    assert chat(user("x", name="ann")) != chat(user("x"))
    assert chat({"content": "x", "name": "ann"}) != chat({"content": "x"})
    assert chat(user("x", tool_calls=[], name=None)) == chat(user("x"))


def test_responses_input_text_equals_one_user_message() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    assert stream(Api.RESPONSES, input="x") == stream(Api.RESPONSES, input=items)


def test_responses_grow_by_items() -> None:
    items: list[object] = [
        user("x"),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "message", "id": "m1", "role": "assistant", "content": "done"},
    ]  # fmt: skip
    streams = [stream(Api.RESPONSES, instructions="be kind", input=items[:n]) for n in range(1, 6)]
    for shorter, longer in itertools.pairwise(streams):
        assert longer.startswith(shorter)
        assert longer != shorter


def test_counting_tokens_sees_the_stream_of_the_message() -> None:
    fields: dict[str, Any] = {"messages": [user("x")], "system": "s"}
    assert stream(Api.COUNT_TOKENS, **fields) == stream(Api.MESSAGES, **fields)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2, 3], "1,2,3"),
        ([1, 2, 3], "[1,2,3]"),
        ([1, 2, 3], [1, 2, 4]),
        ([1, 2, 3], [3, 2, 1]),
        ([[1, 2], [3]], [[1], [2, 3]]),
        ([[1, 2], [3]], [1, 2, 3]),
        ([[1], [2]], [[1, 2]]),
        (["a", "b"], ["ab"]),
        (["a", "b"], "ab"),
        ([1], [-1]),
        ([2**40], [2**41]),
        ([1.5], [2.5]),
        ("", None),
        ([], ""),
        ([[]], []),
    ],
)
def test_different_prompts_have_different_streams(one: object, two: object) -> None:
    assert stream(Api.COMPLETIONS, prompt=one) != stream(Api.COMPLETIONS, prompt=two)


@pytest.mark.parametrize(
    ("short", "long"), [("ab", "abc"), ([1, 2], [1, 2, 3]), (["a"], ["a", "b"])]
)
def test_growing_prompts_are_prefixes(short: object, long: object) -> None:
    grown = stream(Api.COMPLETIONS, prompt=long, suffix="s")
    assert grown.startswith(stream(Api.COMPLETIONS, prompt=short, suffix="s"))


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.EMBEDDINGS, {"input": ["text", "more"]}),
        (Api.SCORE, {"text_1": "text", "text_2": ["more"]}),
        (Api.SCORE_V1, {"queries": "text", "documents": ["more"]}),
        (Api.RERANK, {"query": "q", "documents": ["text", "more"]}),
        (Api.RERANK_V1, {"query": "q", "documents": [{"text": "text"}, "more"]}),
        (Api.POOLING, {"input": "text more"}),
        (Api.CLASSIFY, {"input": ["text more"]}),
        (Api.TOKENIZE, {"prompt": "text more"}),
        (Api.TOKENIZE, {"messages": [user("text more")]}),
    ],
)
def test_every_shape_carries_its_text(api: Api, fields: dict[str, Any]) -> None:
    body = stream(api, **fields)
    assert b"text" in body
    assert b"more" in body or fields.get("query")


def test_token_ids_are_carried_whatever_the_field() -> None:
    assert stream(Api.DETOKENIZE, tokens=[1, 2]) != stream(Api.DETOKENIZE, tokens=[1, 3])


def test_uploads_are_told_apart() -> None:
    def upload(sound: bytes) -> bytes:
        head = b'--x\r\nContent-Disposition: form-data; name="'
        body = head + b'file"; filename="a"\r\n\r\n' + sound + b"\r\n"
        body += head + b'model"\r\n\r\nm\r\n--x--'
        kind = "multipart/form-data; boundary=x"
        return canonical(parse_multipart(Api.TRANSCRIPTIONS, kind, body))

    assert upload(b"one") == upload(b"one")
    assert upload(b"one") != upload(b"two")


@pytest.mark.parametrize("content", [5, True, {}, {"a": 1}, [5, None, [[]]], [{"type": 7}], [{}]])
def test_odd_content_never_raises(content: object) -> None:
    assert chat(user(content)) != chat(user("x"))
    assert chat({"role": [content], "content": "x"}, content) != chat()


def test_very_deep_content_never_raises_and_is_told_apart() -> None:
    def deep(leaf: bytes) -> bytes:
        nested = b"[" * 900 + leaf + b"]" * 900
        body = b'{"model":"m","messages":[%b],"tools":[%b]}' % (nested, nested)
        return canonical(parse_json(Api.CHAT, body))

    assert deep(b"1") == deep(b"1")
    assert deep(b"1") != deep(b"2")


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [[]], [{"a": [1]}]])
def test_any_kind_in_any_field_never_raises(api: Api, value: object) -> None:
    names = [
        "input",
        "prompt",
        "tools",
        "system",
        "instructions",
        "cache_salt",
        "documents",
        "query",
    ]
    fields: dict[str, Any] = dict.fromkeys(names, value)
    assert stream(api, messages=[user(value)], **fields)


def test_a_million_tiny_images_do_not_inflate_the_stream() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":[%b{}]}]}' % (b"{}," * 20_000)
    size = len(canonical(parse_json(Api.CHAT, body)))
    assert size < MAX_WEIGHED_MEDIA * MEDIA_BYTES + 20_001 * 18 + 100


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[%b{}]}',
        b'{"model":"m","messages":[{"role":"user","content":[%b{}]}]}',
        b'{"model":"m","messages":[],"input":[%b{}],"prompt":[%b""]}',
    ],
)
@pytest.mark.parametrize("api", [Api.CHAT, Api.RESPONSES])
def test_work_on_a_body_is_bounded(api: Api, body: bytes) -> None:
    filled = body.replace(b"%b", b"{}," * 180_000)
    assert (
        len(canonical(parse_json(api, filled))) < 40 * MAX_PIECES + MAX_WEIGHED_MEDIA * MEDIA_BYTES
    )


def test_a_message_of_countless_fields_is_told_apart_cheaply() -> None:
    odd = {f"k{number}": number for number in range(1000)}
    assert chat(odd) != chat({**odd, "k5": 0})
    assert len(chat(odd)) < 20 * len(odd)


def test_a_long_batch_of_prompts_is_bounded() -> None:
    texts, ids = [""] * (3 * MAX_PIECES), [[1]] * (3 * MAX_PIECES)
    assert len(stream(Api.EMBEDDINGS, input=texts)) < 3 * MAX_PIECES
    assert len(stream(Api.EMBEDDINGS, input=ids)) < 9 * MAX_PIECES
