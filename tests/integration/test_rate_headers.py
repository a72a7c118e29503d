"""What a client is told of its limits: OpenAI's headers on answers and refusals."""

import pytest

from gateway.core.key_limits import Level, Standing
from gateway.edge.answers import limit_lines
from tests.integration.rig import chat, ok_chat, post, running
from tests.integration.test_key_limits import AUTH, keyed
from tests.integration.test_queue import CHAT, ask


async def test_answers_of_a_limited_key_tell_what_is_left() -> None:
    limits = keyed("requests_per_minute: 60, tokens_per_minute: 6000")
    async with running(ok_chat, settings=limits) as rig:
        first = await rig.ask(ask("a", "hi", AUTH))
        second = await rig.ask(ask("b", "hi", AUTH))

        assert (first.status, second.status) == (200, 200)
        assert first.all("x-ratelimit-limit-requests") == ["60"]
        assert first.all("x-ratelimit-limit-tokens") == ["6000"]
        left = [int(a.header("x-ratelimit-remaining-requests") or -1) for a in (first, second)]
        assert left in ([59, 58], [59, 59])  # one comes back each second
        assert 0 < int(first.header("x-ratelimit-remaining-tokens") or -1) < 6000
        assert (first.header("x-ratelimit-reset-requests") or "").endswith("s")
        assert (first.header("x-ratelimit-reset-tokens") or "").endswith("s")


async def test_a_refusal_tells_them_too() -> None:
    async with running(ok_chat, settings=keyed("requests_per_minute: 1")) as rig:
        await rig.ask(ask("a", "hi", AUTH))
        refused = await rig.ask(ask("b", "hi", AUTH))

        assert (refused.status, refused.code) == (429, "rate_limited")
        assert refused.header("x-ratelimit-limit-requests") == "1"
        assert refused.header("x-ratelimit-remaining-requests") == "0"
        assert refused.header("x-ratelimit-limit-tokens") is None


async def test_whole_answers_have_them_on_a_known_connection_too() -> None:
    async with running(ok_chat, settings=keyed("requests_per_minute: 600")) as rig:
        client = await rig.connect()
        for _ in range(3):
            await client.send(post(CHAT, chat("hi"), AUTH))
            answer = await client.answer()
            assert answer.status == 200
            assert answer.all("x-ratelimit-limit-requests") == ["600"]


async def test_who_has_no_limit_is_told_of_none() -> None:
    async with running(ok_chat, settings=keyed("tokens_per_day: 100000")) as rig:
        answer = await rig.ask(ask("a", "hi", AUTH))
        assert not [name for name, _ in answer.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.0301, "31ms"),
        (1.0, "1s"),
        (1.25, "1.25s"),
        (59.9999, "1m0s"),
        (360.5, "6m0.5s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    lines = limit_lines(Standing(Level(5, 4, seconds), None)).decode()
    assert f"x-ratelimit-reset-requests: {text}\r\n" in lines
