"""What the property test of the fast engine leaves out: the published check, faults, live answers."""

import pytest

from gateway.sim.engine import EngineFull
from gateway.sim.fast_batch import FastJob
from gateway.sim.fast_engine import FastEngine
from gateway.sim.profiles import H100_8B


def engine(**limits: int) -> tuple[FastEngine, list[tuple[object, float]]]:
    ended: list[tuple[object, float]] = []
    made = FastEngine(
        H100_8B, lambda *_: None, lambda job, at: ended.append((job.owner, at)), **limits
    )
    return made, ended


def test_an_8k_prompt_alone_takes_what_was_published() -> None:
    alone, ended = engine()
    job = FastJob(8000, 101, list(range(1, 600)))
    alone.submit(job, 0.0)
    alone.run(1e6)
    assert job.first_token_at == pytest.approx(0.290, abs=0.002)
    ((_, at),) = ended
    assert (at - (job.first_token_at or 0.0)) / 100 == pytest.approx(6.98e-3, abs=0.01e-3)


def test_what_an_answer_has_written_so_far_is_found_by_another() -> None:
    busy, _ = engine()
    hashes = list(range(1, 200))
    first = FastJob(160, 2000, hashes)
    busy.submit(first, 0.0)
    busy.settle(3.0)
    second = FastJob(480, 4, hashes)  # begins with the prompt and part of the answer
    busy.submit(second, 3.0)
    busy.run(3.1)
    assert first.live
    assert second.cached_tokens == 464  # all but the block of its last token


def test_a_dead_engine_loses_all_and_a_new_one_is_empty() -> None:
    dying, ended = engine()
    jobs = [FastJob(1000, 50, list(range(n, n + 70)), n) for n in (1, 1000)]
    for job in jobs:
        dying.submit(job, 0.0)
    dying.settle(0.2)
    assert dying.kill() == jobs
    assert (dying.running, dying.waiting, dying.kv_utilization) == (0, 0, 0.0)
    again = FastJob(1000, 50, list(range(1, 71)), "again")
    dying.submit(again, 1.0)
    dying.run(1e6)
    assert again.cached_tokens == 0
    assert [owner for owner, _ in ended] == ["again"]


def test_a_slow_engine_takes_as_much_longer() -> None:
    times = []
    for slow in (1.0, 3.0):
        one, ended = engine()
        one.slow = slow
        one.submit(FastJob(4000, 50, []), 0.0)
        one.run(1e6)
        times.append(ended[0][1])
    assert times[1] == pytest.approx(3 * times[0])


def test_what_cannot_be_served_is_refused() -> None:
    one, _ = engine(max_waiting=1)
    with pytest.raises(ValueError, match="at least one"):
        one.submit(FastJob(0, 5, []), 0.0)
    with pytest.raises(ValueError, match="larger than the KV cache"):
        one.submit(FastJob(H100_8B.engine.kv_tokens, 5, []), 0.0)
    for number in range(3):
        one.submit(FastJob(9000, 5, [], number), 0.0)  # the budget of a step admits one
        if one.waiting:
            break
    with pytest.raises(EngineFull):
        one.submit(FastJob(9000, 5, []), 0.0)
