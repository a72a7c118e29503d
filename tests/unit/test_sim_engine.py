"""The scheduler model: published figures, batching, chunking, caching, preemption, limits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.core.settings import EngineProfile
from gateway.sim.engine import Engine, EngineFull, Job, Progress
from gateway.sim.profiles import H100_8B, PROFILES, Profile

SMALL = Profile(
    name="small",
    engine=EngineProfile(kv_tokens=16 * 64, max_sequences=4),
    max_model_len=512,
    source="test",
    step_tokens=64,
)


def job(name: str, prompt: int, output: int, first: int = 0) -> Job:
    """Make a job whose block hashes count up from `first`: equal `first` = equal text."""
    return Job(name, prompt, output, range(first + 1, first + 1 + (prompt + output) // 16))


def run(engine: Engine, until: float = 1e9) -> list[Progress]:
    """Step until idle."""
    events: list[Progress] = []
    while (at := engine.next_event_at()) is not None and at <= until:
        events += engine.advance(at)
    return events


def of(events: Sequence[Progress], one: Job) -> list[Progress]:
    return [event for event in events if event.job is one]


def test_an_8k_prompt_alone_has_the_published_ttft_and_itl() -> None:
    engine = Engine(H100_8B)
    only = job("a", 8000, 50)
    engine.submit(only, 3.0)

    times = [event.at for event in run(engine)]

    assert times[0] - 3.0 == pytest.approx(0.290, rel=0.02)
    assert times[1] - times[0] == pytest.approx(0.00698, rel=0.02)
    assert len(times) == 50
    assert only.finished_at == times[-1]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=str)
def test_every_profile_holds_its_longest_prompt(profile: Profile) -> None:
    engine = Engine(profile)
    longest = job("a", profile.max_model_len - 1, 1)
    engine.submit(longest, 0.0)

    run(engine)

    assert longest.produced == 1


def test_second_identical_prompt_hits_all_but_its_last_token() -> None:
    engine = Engine(H100_8B)
    first, second = job("a", 160, 1), job("b", 160, 1)
    engine.submit(first, 0.0)
    run(engine)
    engine.submit(second, 1.0)
    run(engine)

    assert (first.cached_tokens, second.cached_tokens) == (0, 144)
    assert (engine.prefix_queries, engine.prefix_hits) == (320, 144)


def test_the_next_turn_hits_prompt_and_answer() -> None:
    engine = Engine(H100_8B)
    engine.submit(job("a", 160, 64), 0.0)
    run(engine)
    turn = job("b", 400, 1)
    engine.submit(turn, 9.0)
    run(engine)

    # All full blocks of the 224 tokens but the last token of the answer, which was never computed.
    assert turn.cached_tokens == 208


def test_decodes_go_before_prefill_and_a_long_prompt_is_chunked() -> None:
    engine = Engine(SMALL)
    decoding = job("a", 16, 40)
    engine.submit(decoding, 0.0)
    first = engine.advance(engine.next_event_at() or 0.0)[0].at
    long = job("b", 200, 1, first=1000)
    engine.submit(long, first)

    events = run(engine)

    # 64 tokens a step, one of them the decode's: 200 tokens take four steps of at most 63.
    before = [e for e in of(events, decoding) if e.at <= of(events, long)[0].at]
    assert len(before) == 5  # the step already begun, then the four chunks
    assert all(event.tokens == 1 for event in before)


def test_one_advance_gives_the_same_times_as_single_steps() -> None:
    def load(engine: Engine) -> list[Job]:
        jobs = [job(str(i), 30 + 7 * i, 5 + 11 * i, first=100 * i) for i in range(6)]
        for one in jobs:
            engine.submit(one, 0.0)
        return jobs

    stepped, jumped = Engine(SMALL), Engine(SMALL)
    a, b = load(stepped), load(jumped)
    run(stepped)
    jumped.advance(1e6)

    assert [one.first_token_at for one in b] == [one.first_token_at for one in a]
    assert [one.finished_at for one in b] == pytest.approx([one.finished_at for one in a])


def test_next_change_is_where_the_batch_changes() -> None:
    engine = Engine(H100_8B)
    engine.submit(job("a", 16, 10), 0.0)
    first = engine.next_change_at()
    assert first is not None
    assert [e.tokens for e in engine.advance(first)] == [1]

    finish = engine.next_change_at()
    assert finish is not None
    assert [(e.tokens, e.finished) for e in engine.advance(finish)] == [(9, True)]
    assert engine.next_change_at() is None


def test_several_steps_ahead_are_asked_for_in_one_call() -> None:
    engine = Engine(H100_8B)
    engine.submit(job("a", 16, 10), 0.0)
    engine.advance(engine.next_event_at() or 0.0)

    assert [e.tokens for e in engine.advance(engine.next_event_at(4) or 0.0)] == [4]
    assert [e.tokens for e in engine.advance(engine.next_event_at(40) or 0.0)] == [5]


def test_a_full_cache_preempts_the_youngest_and_recomputes_it() -> None:
    profile = replace(SMALL, engine=EngineProfile(kv_tokens=16 * 8, max_sequences=4))
    engine = Engine(profile)
    old, young = job("a", 32, 64), job("b", 32, 64, first=1000)
    engine.submit(old, 0.0)
    engine.submit(young, 0.0)

    events = run(engine)

    assert engine.preemptions == young.preemptions > 0
    assert old.preemptions == 0
    assert sum(e.tokens for e in of(events, young)) == 64
    assert engine.pool.free == engine.pool.total


def test_prompts_wait_in_order_for_slots() -> None:
    engine = Engine(SMALL)
    jobs = [job(str(i), 8, 4 + i, first=100 * i) for i in range(6)]
    for one in jobs:
        engine.submit(one, 0.0)
    engine.advance(engine.next_event_at() or 0.0)

    assert (engine.running, engine.waiting) == (4, 2)
    run(engine)
    starts = [one.started_at for one in jobs]
    assert starts == sorted(s for s in starts if s is not None)


def test_progress_met_by_submit_or_abort_is_due_at_once() -> None:
    engine = Engine(SMALL)
    only, gone = job("a", 16, 1), job("b", 16, 1, first=1000)
    engine.submit(only, 0.0)
    engine.submit(gone, 0.0)
    engine.abort(gone, 5.0)

    due = engine.next_event_at()

    assert due == engine.next_change_at() == only.finished_at
    assert next(event.job for event in engine.advance(5.0)) is only
    assert engine.next_event_at() is None


def test_abort_frees_everything_at_once_wherever_the_job_is() -> None:
    engine = Engine(SMALL)
    running, waiting = job("a", 512, 100), job("b", 512, 100, first=1000)
    engine.submit(running, 0.0)
    engine.submit(waiting, 0.0)

    assert engine.abort(waiting, 0.001)
    assert engine.abort(running, 0.001)
    assert not engine.abort(running, 0.001)
    assert engine.pool.free == engine.pool.total
    assert (engine.running, engine.waiting, engine.aborted) == (0, 0, 2)
    assert run(engine) == []


def test_idle_prefix_blocks_are_evicted_tail_first() -> None:
    profile = replace(SMALL, engine=EngineProfile(kv_tokens=16 * 10, max_sequences=4))
    engine = Engine(profile)
    engine.submit(job("a", 96, 1), 0.0)  # leaves six idle blocks and four blank ones
    run(engine)
    engine.submit(job("b", 112, 1, first=1000), 1.0)  # needs seven: evicts three tails
    run(engine)
    again = job("c", 96, 1)
    engine.submit(again, 2.0)
    run(engine)

    assert again.cached_tokens == 3 * 16


def test_reset_forgets_what_nobody_holds() -> None:
    engine = Engine(SMALL)
    engine.submit(job("a", 64, 1), 0.0)
    run(engine)
    engine.reset_prefix_cache()
    again = job("b", 64, 1)
    engine.submit(again, 1.0)
    run(engine)

    assert again.cached_tokens == 0


def test_a_full_waiting_queue_refuses() -> None:
    engine = Engine(SMALL, max_waiting=1)
    engine.submit(job("a", 16, 100), 0.0)
    engine.submit(job("b", 16, 100), 0.0)

    with pytest.raises(EngineFull):
        engine.submit(job("c", 16, 1), 0.0)


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (16 * 64, 1)])
def test_impossible_jobs_are_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="job"):
        Engine(SMALL).submit(job("a", prompt, output), 0.0)
