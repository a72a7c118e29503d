"""What a key may use: requests and tokens a minute, tokens a day, streams at once, until its last day."""

import asyncio
import hashlib
from dataclasses import replace

from gateway.core.key_limits import KeyBooks
from tests.integration.rig import Rig, eventually, ok_chat, post, running
from tests.integration.test_queue import CHAT, Held, ask, begin, waiting

SECRET = "sk-team"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
AUTH = f"authorization: Bearer {SECRET}"


def keyed(limits: str, *more: str) -> tuple[str, ...]:
    return (f"keys=[{{name: team, sha256: {DIGEST}, {limits}}}]", *more)


def team(rig: Rig) -> KeyBooks:
    books: KeyBooks | None = rig.handler.dispatcher._keys.get("team")
    assert books is not None
    return books


def spent(rig: Rig) -> float:
    tokens = team(rig).tokens
    assert tokens is not None
    return tokens.spec.burst_tokens - tokens.available(rig.handler.clock())


async def test_requests_beyond_the_minutes_limit_are_refused_with_when_to_return() -> None:
    async with running(ok_chat, settings=keyed("requests_per_minute: 2")) as rig:
        answers = [await rig.ask(ask(f"r{i}", "hi", AUTH)) for i in range(3)]

        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[2].code == "rate_limited"
        assert 20 <= int(answers[2].header("retry-after") or -1) <= 60
        assert "`team`" in answers[2].json["error"]["message"]


async def test_d51_tokens_are_reserved_before_and_settled_after_with_what_was_used() -> None:
    """The scripted backend reports 10 prompt tokens, none cached, and 2 of answer."""
    backend = Held()
    async with running(backend, settings=keyed("tokens_per_minute: 600")) as rig:
        tasks = await begin(rig, ask("a", "hi", AUTH))
        await eventually(lambda: backend.came == ["a"])
        assert spent(rig) > 200  # the prompt and the answer it is expected to get
        backend.go.release()
        await asyncio.gather(*tasks)
        await rig.settled()

        assert 0 <= spent(rig) <= 12


async def test_d50_a_used_up_quota_is_said_not_to_be_worth_a_retry() -> None:
    async with running(ok_chat, settings=keyed("tokens_per_day: 12")) as rig:
        first = await rig.ask(ask("a", "hi", AUTH))
        await rig.settled()
        second = await rig.ask(ask("b", "hi", AUTH))

        assert (first.status, second.status) == (200, 429)
        assert second.code == "insufficient_quota"
        assert second.header("x-should-retry") == "false"


async def test_r32_with_one_stream_allowed_the_second_starts_when_the_first_ends() -> None:
    backend = Held()
    async with running(backend, settings=keyed("streams: 1")) as rig:
        tasks = await begin(rig, *[ask(name, "hi", AUTH) for name in "abc"])
        await eventually(lambda: backend.came == ["a"])
        assert waiting(rig) == 2

        for count in (2, 3):
            backend.go.release()
            await backend.saw(count)
            assert len(backend.came) == count
        backend.go.release()
        answers = await asyncio.gather(*tasks)

        assert {answer.status for answer in answers} == {200}
        assert team(rig).streams == 0
        await rig.at_rest()


async def test_r32_a_client_that_leaves_frees_its_stream_at_once() -> None:
    backend = Held()
    async with running(backend, settings=keyed("streams: 1")) as rig:
        client = await rig.connect()
        await client.send(ask("a", "hi", AUTH))
        await eventually(lambda: backend.came == ["a"])
        tasks = await begin(rig, ask("b", "hi", AUTH))
        client.reset()
        await eventually(lambda: backend.came == ["a", "b"])
        for _ in range(2):
            backend.go.release()
        await asyncio.gather(*tasks)
        await rig.at_rest()


async def test_a_key_is_refused_after_its_last_day_on_an_open_connection_too() -> None:
    async with running(ok_chat, settings=keyed("expires: '2030-01-31'")) as rig:
        days = {"today": "2030-01-31"}
        rig.handler._today = lambda: days["today"]
        rig.handler.turn_day()
        client = await rig.connect()
        await client.send(post(CHAT, {"model": "m", "messages": []}, AUTH))
        assert (await client.answer()).status == 200

        days["today"] = "2030-02-01"
        rig.handler.turn_day()
        await client.send(post(CHAT, {"model": "m", "messages": []}, AUTH))
        answer = await client.answer()
        assert (answer.status, answer.code) == (401, "invalid_api_key")


async def test_lifting_a_limit_by_reload_lets_those_go_that_wait_for_it() -> None:
    backend = Held()
    async with running(backend, settings=keyed("streams: 1")) as rig:
        tasks = await begin(rig, *[ask(name, "hi", AUTH) for name in "abc"])
        await eventually(lambda: waiting(rig) == 2)
        dispatcher = rig.handler.dispatcher
        dispatcher.apply(replace(dispatcher.settings, keys=()), rig.handler.clock())
        await eventually(lambda: len(backend.came) == 3)
        for _ in range(3):
            backend.go.release()
        answers = await asyncio.gather(*tasks)
        assert {answer.status for answer in answers} == {200}
        await rig.at_rest()
