"""Which bodies are worked on in a thread, and what is done there."""

from typing import Any

import orjson
import pytest

from gateway.core.canonical import canonical, write_ahead
from gateway.core.request import parse_json
from gateway.core.types import Api
from gateway.edge.large import LARGE, has_many, is_large


def body(messages: int, chars: int, **fields: Any) -> bytes:
    said = [{"role": "user", "content": "x" * chars} for _ in range(messages)]
    return orjson.dumps({"model": "m", "messages": said, **fields})


@pytest.mark.parametrize(
    ("messages", "chars", "large"),
    [
        (1, LARGE, True),
        (1, LARGE // 2, False),
        (300, 3_000, False),
        (3_000, 1, False),
        (3_500, 200, False),
        (6_000, 1, True),
        (6_000, 100, True),
        (20_000, 1, True),
    ],
)
def test_large_is_what_has_many_bytes_or_many_messages(
    messages: int, chars: int, large: bool
) -> None:
    assert is_large(body(messages, chars)) == large


@pytest.mark.parametrize("place", range(0, 100, 9))
@pytest.mark.parametrize("unit", [b"[]", b"{}", b'{"a":[]}'])
def test_bodies_of_empty_values_are_large_wherever_they_stand(unit: bytes, place: int) -> None:
    values = b",".join([unit] * 100_000)
    cut = len(values) * place // 100
    made = b'{"messages":[' + values[:cut] + b'"",' + values[cut:] + b"]}"
    assert is_large(made[: LARGE - 1])


def test_a_body_that_is_text_where_samples_used_to_be_taken_is_large() -> None:
    step = (LARGE - 1) // 8
    made = bytearray(b"[]," * (LARGE // 3))
    for at in range(0, LARGE, step):
        made[at : at + 1024] = b"x" * 1024
    del made[LARGE - 1 :]
    assert sum(is_large(bytes(made)) for _ in range(50)) >= 40


PLAIN = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("api", "data", "many"),
    [
        (Api.CHAT, {"messages": [PLAIN] * 3_900}, False),
        (Api.CHAT, {"messages": [PLAIN] * 4_100}, True),
        (Api.CHAT, {"messages": [1] * 20_000}, True),
        (Api.CHAT, {"messages": [""] * 20_000}, True),
        (Api.CHAT, {"messages": [{"content": [PART] * 41}] * 100}, True),
        (Api.CHAT, {"messages": [{"content": [PART] * 30}] * 100}, False),
        (Api.CHAT, {"messages": [{"content": [{"content": [PART] * 5_000}]}]}, True),
        (Api.CHAT, {"messages": [{str(n): n for n in range(60)}] * 400}, True),
        (Api.CHAT, {"messages": [{"content": [{"content": [PART] * 300}] * 20}]}, True),
        (Api.CHAT, {"messages": [{"content": [{"content": [PART] * 300}]}] * 10}, False),
        (Api.MESSAGES, {"messages": [PLAIN] * 500, "system": [PART] * 4_000}, True),
        (Api.CHAT, {"messages": [PLAIN] * 500, "tools": [1] * 20_000}, True),
        (Api.RESPONSES, {"input": [1] * 20_000}, True),
        (Api.RESPONSES, {"input": [{"type": "f", "output": [PART] * 5_000}]}, True),
        (Api.EMBEDDINGS, {"input": [1] * 20_000}, False),
        (Api.COMPLETIONS, {"prompt": [1] * 131_072}, False),
        (Api.COMPLETIONS, {"prompt": [1] * 500_000}, True),
        (Api.COMPLETIONS, {"prompt": [""] * 20_000}, True),
        (Api.COMPLETIONS, {"prompt": "x" * 900_000}, False),
    ],
)
def test_prompts_of_very_many_parts_are_told_after_parsing(
    api: Api, data: dict[str, Any], many: bool
) -> None:
    assert has_many(parse_json(api, orjson.dumps({"model": "m", "messages": [], **data}))) == many


def test_small_bodies_are_not_looked_into() -> None:
    assert not has_many(parse_json(Api.CHAT, b'{"model":"m","messages":[%s1]}' % (b"1," * 5_000)))


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "s", "tools": [{"type": "f"}]}])
@pytest.mark.parametrize("isolation", ["", "team"])
def test_a_stream_written_ahead_is_the_same_under_any_name(
    fields: dict[str, Any], isolation: str
) -> None:
    plain = parse_json(Api.CHAT, body(50, 3, **fields))
    ahead = parse_json(Api.CHAT, body(50, 3, **fields))
    write_ahead(ahead)
    plain.model = ahead.model = "resolved"
    made = ahead.written
    assert made
    assert canonical(ahead, isolation=isolation) == canonical(plain, isolation=isolation)
    assert ahead.written is None  # not kept
    assert canonical(ahead, isolation=isolation) == canonical(plain, isolation=isolation)
