"""Which bodies are worked on in a thread, and what is done there."""

from typing import Any

import orjson
import pytest

from gateway.core.canonical import canonical, write_ahead
from gateway.core.request import parse_json
from gateway.core.types import Api
from gateway.edge.large import LARGE, is_large


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
