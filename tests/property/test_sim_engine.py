"""The engine under any order of arrivals, aborts and steps: memory adds up, hits are honest."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.settings import EngineProfile
from gateway.sim.engine import Engine, Job
from gateway.sim.profiles import Profile

BLOCK = 4


def check_memory(engine: Engine) -> None:
    pool = engine.pool
    counts = pool.counts()
    assert pool.blank + pool.idle + pool.shared + pool.private == pool.total
    assert min(pool.blank, pool.private) >= 0
    assert all(count >= 0 for count in counts.values())
    assert sum(1 for count in counts.values() if not count) == pool.idle


def text_hashes(text: list[int]) -> list[int]:
    """Chain the blocks of a token list."""
    hashes, previous = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        previous = hash((previous, tuple(text[end - BLOCK : end])))
        hashes.append(previous)
    return hashes


def common(a: list[int], b: list[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(12, 40), budget=st.integers(3, 40))
def test_memory_adds_up_and_hits_never_exceed_the_true_common_prefix(
    seed: int, blocks: int, budget: int
) -> None:
    rng = Random(seed)
    profile = Profile(
        "any",
        EngineProfile(kv_tokens=blocks * BLOCK, max_sequences=rng.randint(1, 6)),
        max_model_len=blocks * BLOCK,
        source="test",
        block_tokens=BLOCK,
        step_tokens=budget,
    )
    engine = Engine(profile)
    now = 0.0
    jobs: list[Job] = []
    texts: dict[str, list[int]] = {}
    progress: dict[str, int] = {}
    for number in range(40):
        action = rng.random()
        if action < 0.5:
            base = rng.choice(list(texts.values())) if texts and rng.random() < 0.7 else []
            prefix = base[: rng.randint(0, len(base))]
            text = [*prefix, *(rng.randint(0, 3) for _ in range(rng.randint(2, 20)))]
            text = text[: blocks * BLOCK]
            output = rng.randint(1, max(1, len(text) // 2))
            job = Job(str(number), len(text) - output, output, text_hashes(text))
            if job.prompt_tokens < 1:
                continue
            engine.submit(job, now)
            jobs.append(job)
            texts[job.id] = text
        elif action < 0.6 and jobs:
            engine.abort(rng.choice(jobs), now)
        else:
            now += rng.random() * 0.05
        for event in engine.advance(now):
            assert event.at <= now
            progress[event.job.id] = progress.get(event.job.id, 0) + event.tokens
        check_memory(engine)
    for event in engine.advance(now + 1e6):
        progress[event.job.id] = progress.get(event.job.id, 0) + event.tokens
    check_memory(engine)

    assert (engine.running, engine.waiting) == (0, 0)
    assert engine.pool.free == engine.pool.total
    for job in jobs:
        assert not job.live
        assert job.produced == progress.get(job.id, 0)
        others = [texts[other.id] for other in jobs if other is not job]
        mine = texts[job.id][: job.prompt_tokens]
        assert job.cached_tokens <= max((common(mine, other) for other in others), default=0)
        assert job.cached_tokens < job.prompt_tokens
        if job.finished_at is not None:
            assert job.produced == job.output_tokens


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(20, 60))
def test_jumping_between_arrivals_equals_following_every_step(seed: int, blocks: int) -> None:
    def play(*, stepping: bool) -> list[tuple[float, float, int, int]]:
        rng = Random(seed)
        engine = Engine(
            Profile(
                "any",
                EngineProfile(kv_tokens=blocks * BLOCK, max_sequences=4),
                max_model_len=blocks * BLOCK,
                source="test",
                block_tokens=BLOCK,
                step_tokens=16,
            )
        )
        jobs: list[Job] = []
        now = 0.0
        for number in range(12):
            # Prompts share prefixes, answers never repeat one another: which of two sequences
            # owns a block both generate in one stretch is the one thing left to the order.
            length = rng.randint(4, blocks * BLOCK - 8)
            output = rng.randint(1, length - 1)
            shared = rng.randint(0, length - output)
            text = [*range(shared), *(1000 * (number + 1) + i for i in range(length - shared))]
            jobs.append(Job(str(number), len(text) - output, output, text_hashes(text)))
            engine.submit(jobs[-1], now)
            now += rng.random() * 0.3
            while stepping and (at := engine.next_event_at()) is not None and at <= now:
                engine.advance(at)
            engine.advance(now)
        engine.advance(now + 1e6)
        return [
            (job.first_token_at or 0.0, job.finished_at or 0.0, job.cached_tokens, job.preemptions)
            for job in jobs
        ]

    for jumped, stepped in zip(play(stepping=False), play(stepping=True), strict=True):
        assert abs(jumped[0] - stepped[0]) < 1e-6
        assert abs(jumped[1] - stepped[1]) < 1e-6
        assert jumped[2:] == stepped[2:]
