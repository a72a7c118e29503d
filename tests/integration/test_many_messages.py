"""A body of thousands of tiny messages: read in a thread, routed as any other."""

from typing import Any

import orjson
import pytest

from tests.integration.rig import ok_chat, post, running

PATH = "/v1/chat/completions"
PLAIN = [{"role": "user", "content": f"message {number}"} for number in range(6_000)]
NUMBERS = list(range(20_000))
TEXTS = [{"role": "user", "content": [f"text {number}" for number in range(20_000)]}]


@pytest.mark.parametrize("messages", [PLAIN, NUMBERS, TEXTS], ids=["plain", "numbers", "texts"])
async def test_thousands_of_tiny_messages_are_routed_by_their_prefix_and_sent_as_they_came(
    messages: list[Any],
) -> None:
    body: dict[str, Any] = {"model": "m", "messages": messages}
    async with running(ok_chat) as rig:
        first = await rig.ask(post(PATH, body))
        assert first.status == 200
        assert (first.header("x-gateway-prefix") or "").startswith("0/")

        body["messages"] = [*messages, {"role": "user", "content": "and one more"}]
        second = await rig.ask(post(PATH, body))
        hit, tokens = map(int, (second.header("x-gateway-prefix") or "").split("/"))
        assert hit > 0.99 * tokens
        assert orjson.loads(rig.backends[0].received[1].body) == body
