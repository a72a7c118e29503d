"""The request lists of the simulator's check, and both ways of playing them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.core.settings import EngineProfile
from gateway.sim.profiles import Profile
from loadtest import sim_play
from loadtest.sim_play import Lane, Refused, Turn

PROFILE = Profile(
    name="small",
    engine=EngineProfile(
        step_s=0.01,
        prefill_token_s=1e-4,
        attention_s=0.0,
        sequence_s=0.0,
        context_token_s=0.0,
        kv_tokens=8160,
        max_sequences=8,
    ),
    max_model_len=4096,
    source="made up",
    block_tokens=32,
    step_tokens=512,
)


def blank(lanes: Sequence[Lane]) -> dict[tuple[int, int], list[int]]:
    """Answers of the lengths asked for, all different."""
    rng = Random(3)
    return {
        (number, index): list(sim_play.random_ids(rng, turn.output_tokens))
        for number, lane in enumerate(lanes)
        for index, turn in enumerate(lane.turns)
    }


def simulated(lanes: Sequence[Lane], profile: Profile = PROFILE) -> sim_play.Run:
    return sim_play.simulate(lanes, profile, 0.002, blank(lanes))


def lists() -> dict[str, list[Lane]]:
    return {
        "one by one": sim_play.one_by_one(Random(1), 70),
        "arrivals": sim_play.stretched(sim_play.arrivals(Random(1), 70, 14), 0.3),
        "sessions": sim_play.sessions(Random(1), 12, 6, 0.2),
    }


def test_a_request_alone_takes_the_overhead_a_step_and_its_prefill() -> None:
    run = simulated([Lane((Turn(0, (7,) * 100, 3),), 1.0)])

    (outcome,) = run.outcomes
    assert outcome.sent_s == 1.0
    assert outcome.ttft_s == pytest.approx(0.002 + 0.01 + 100 * 1e-4)
    assert outcome.last_s - outcome.first_s == pytest.approx(2 * 0.01)


def test_a_conversations_next_turn_hits_its_prompt_and_its_answer() -> None:
    turns = (Turn(0, (7,) * 100, 30), Turn(0, (8,) * 40, 3, delay_s=0.5))

    first, second = simulated([Lane(turns)]).ordered()

    assert second.prompt == first.prompt + first.answer + [8] * 40
    assert second.sent_s == pytest.approx(first.last_s + 0.5)
    # the answer's last token was never read back: 129 tokens are computed, four blocks full
    assert (first.cached_tokens, second.cached_tokens) == (0, 128)


@pytest.mark.parametrize("name", ["one by one", "arrivals", "sessions"])
def test_each_list_hits_evicts_and_ends(name: str) -> None:
    lanes = lists()[name]
    free = replace(PROFILE, engine=replace(PROFILE.engine, kv_tokens=1 << 24))

    run, never = simulated(lanes), simulated(lanes, free)

    assert len(run.outcomes) == sum(len(lane.turns) for lane in lanes)
    assert 0 < run.hit_tokens < never.hit_tokens
    longest = max(len(outcome.prompt) + len(outcome.answer) for outcome in run.outcomes)
    assert longest <= PROFILE.max_model_len


def test_long_answers_outgrow_the_cache_and_are_preempted() -> None:
    lanes = sim_play.long_answers(Random(1), 12)

    run = simulated(lanes)

    assert len(run.outcomes) == 12
    assert run.preemptions > 0
    assert run.queued_s > 0


def test_requests_of_one_lane_never_meet() -> None:
    ordered = simulated(lists()["one by one"]).ordered()

    assert all(a.last_s <= b.sent_s for a, b in pairwise(ordered))
    assert {outcome.queued_s for outcome in ordered} == {0.0}


def test_a_burst_waits_for_slots_and_a_list_twice_as_slow_waits_less() -> None:
    lanes = sim_play.arrivals(Random(1), 70, 14)

    fast = simulated(sim_play.stretched(lanes, 0.1))
    slow = simulated(sim_play.stretched(lanes, 2.0))

    assert fast.queued_s > slow.queued_s > 0


def test_the_same_list_simulates_the_same() -> None:
    lanes = lists()["sessions"]

    assert simulated(lanes).ordered() == simulated(lanes).ordered()


async def fake_vllm(request: web.Request) -> web.StreamResponse:
    """Answer as vLLM streams token ids: two in the first chunk, then one each, then the usage."""
    body = orjson.loads(await request.read())
    if len(body["prompt"]) == 13:
        return web.Response(status=400, text="no thirteen")
    response = web.StreamResponse()
    await response.prepare(request)
    ids = list(range(body["max_tokens"] if len(body["prompt"]) != 14 else 1))
    parts = (ids[:2], *([i] for i in ids[2:]))
    events: list[dict[str, Any]] = [{"choices": [{"token_ids": part}]} for part in parts]
    details = {"cached_tokens": len(body["prompt"]) // 32 * 32}
    events.append({"choices": [], "usage": {"prompt_tokens_details": details}})
    for event in events:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", fake_vllm)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_a_lane_is_played_turn_by_turn_with_the_engines_own_answers(url: str) -> None:
    lane = Lane((Turn(0, (7,) * 40, 4), Turn(1, (9,) * 8, 2), Turn(0, (8,) * 30, 3)))

    async with sim_play.client() as session:
        run = await sim_play.play(session, url, [lane, Lane((Turn(0, (5,) * 64, 2),))])

    first, other, second, alone = run.ordered()
    assert second.prompt == [7] * 40 + [0, 1, 2, 3] + [8] * 30
    assert (len(other.prompt), len(alone.prompt)) == (8, 64)
    assert [outcome.cached_tokens for outcome in run.ordered()] == [32, 0, 64, 64]
    assert first.sent_s <= first.first_s <= first.last_s <= other.sent_s <= second.sent_s
    assert run.answers[0, 2] == [0, 1, 2]


@pytest.mark.parametrize(("length", "told"), [(13, "400 b'no thirteen'"), (14, "1 tokens inste")])
async def test_an_answer_that_is_not_what_was_asked_for_ends_the_check(
    url: str, length: int, told: str
) -> None:
    async with sim_play.client() as session:
        with pytest.raises(Refused, match=told):
            await sim_play.ask(session, url, [7] * length, 4)
