"""The fast engine is the step-by-step engine: same times, hits, preemptions and memory, any traffic."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.settings import EngineProfile
from gateway.sim.engine import Engine, Job
from gateway.sim.fast_batch import FastJob
from gateway.sim.fast_engine import FastEngine
from gateway.sim.kvcache import BlockPool
from gateway.sim.profiles import Profile
from gateway.sim.runpool import Holding, RunPool

BLOCK = 4


def small(blocks: int, budget: int, sequences: int) -> Profile:
    return Profile(
        "any",
        EngineProfile(kv_tokens=blocks * BLOCK, max_sequences=sequences),
        max_model_len=blocks * BLOCK,
        source="test",
        block_tokens=BLOCK,
        step_tokens=budget,
    )


def chained(text: Sequence[int]) -> list[int]:
    hashes, previous = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        previous = hash((previous, tuple(text[end - BLOCK : end])))
        hashes.append(previous)
    return hashes


class Twins:
    """The same jobs on both engines."""

    def __init__(self, profile: Profile) -> None:
        self.slow = Engine(profile)
        self.fast = FastEngine(
            profile,
            lambda job, at: self.first.append((job.owner, at)),
            lambda job, at: self.ended.append((job.owner, at)),
        )
        self.first: list[tuple[object, float]] = []
        self.ended: list[tuple[object, float]] = []
        self.pairs: list[tuple[Job, FastJob]] = []

    def submit(self, prompt: int, output: int, hashes: list[int], now: float) -> None:
        number = len(self.pairs)
        pair = Job(str(number), prompt, output, hashes), FastJob(prompt, output, hashes, number)
        self.pairs.append(pair)
        self.slow.submit(pair[0], now)
        self.fast.submit(pair[1], now)

    def abort(self, number: int, now: float) -> None:
        slow, fast = self.pairs[number]
        assert self.slow.abort(slow, now) == self.fast.abort(fast, now)

    def known(self, number: int, texts: list[list[int]]) -> list[int]:
        """What a later prompt can contain of a job's text: its answer only once it has ended."""
        job = self.pairs[number][0]
        text = texts[number]
        return text[: job.prompt_tokens] if job.live else text

    def advance(self, now: float) -> None:
        while (at := self.slow.next_event_at()) is not None and at <= now:
            self.slow.advance(at)
        self.slow.advance(now)
        self.fast.settle(now)

    def compare(self) -> None:
        slow, fast = self.slow, self.fast
        assert (fast.running, fast.waiting) == (slow.running, slow.waiting)
        assert fast.preemptions == slow.preemptions
        assert fast.generation_tokens == slow.generation_tokens
        assert fast.prompt_tokens == slow.prompt_tokens
        assert (fast.prefix_queries, fast.prefix_hits) == (slow.prefix_queries, slow.prefix_hits)
        assert fast.pool.free == slow.pool.free
        pool = fast.pool
        assert pool.blank + pool.idle + pool.shared + pool.private == pool.total

    def compare_jobs(self) -> None:
        first = dict(self.first)
        ended = dict(self.ended)
        for number, (slow, fast) in enumerate(self.pairs):
            assert fast.cached_tokens == slow.cached_tokens
            assert fast.preemptions == slow.preemptions
            assert first.get(number) == fast.first_token_at
            assert ended.get(number) == fast.finished_at
            assert fast.first_token_at == pytest.approx(slow.first_token_at, abs=1e-9)
            assert fast.finished_at == pytest.approx(slow.finished_at, abs=1e-9)
            assert fast.started_at == pytest.approx(slow.started_at, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(12, 60),
    budget=st.integers(3, 40),
    sequences=st.integers(1, 8),
)
def test_jumping_from_change_to_change_equals_following_every_step(
    seed: int, blocks: int, budget: int, sequences: int
) -> None:
    rng = Random(seed)
    twins = Twins(small(blocks, budget, sequences))
    texts: list[list[int]] = []
    now = 0.0
    for number in range(60):
        action = rng.random()
        if action < 0.5:
            base = twins.known(rng.randrange(len(texts)), texts) if texts else []
            room = blocks * BLOCK
            shared = base[: rng.randint(0, min(len(base), room - 8))]
            more = rng.randint(4, max(4, min(60, room - len(shared))))
            # answers never repeat one another (see FastJob)
            text = [*shared, *(1000 * (number + 1) + i for i in range(more))]
            output = rng.randint(1, more - 1)
            twins.submit(len(text) - output, output, chained(text), now)
            texts.append(text)
        elif action < 0.58 and twins.pairs:
            twins.abort(rng.randrange(len(twins.pairs)), now)
        else:
            now += rng.random() * rng.choice((0.02, 0.2))
        twins.advance(now)
        twins.compare()
    twins.advance(now + 1e6)
    twins.compare()
    twins.compare_jobs()
    assert twins.fast.pool.free == twins.fast.pool.total


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), total=st.integers(6, 40))
def test_a_cache_of_runs_is_a_cache_of_blocks(seed: int, total: int) -> None:
    rng = Random(seed)
    runs, blocks = RunPool(total), BlockPool(total)
    texts: list[list[int]] = []
    live: list[tuple[list[int], Holding, list[int], list[int]]] = []  # hashes, both books, end
    for number in range(150):
        if rng.random() < 0.4 and live:
            hashes, book, held, own = live.pop(rng.randrange(len(live)))
            runs.release(hashes, book)
            blocks.release(held, own[0])
        elif rng.random() < 0.5 and live:
            hashes, book, held, own = rng.choice(live)  # caches some more of its own
            upto = rng.randint(book.published, len(hashes))
            for block in hashes[book.published : upto]:
                if blocks.publish(block):
                    held.append(block)
                    own[0] -= 1
            runs.publish(hashes, book, upto)
        else:
            base = rng.choice(texts) if texts and rng.random() < 0.8 else []
            text = [*base[: rng.randint(0, len(base))], *(100 * number + i for i in range(8))]
            text = text[: rng.randint(1, total)]
            texts.append(text)
            hashes = [hash(tuple(text[: end + 1])) for end in range(len(text))]
            limit = rng.randint(0, len(hashes))
            depth, idle = blocks.match(hashes, limit)
            found = runs.match(hashes, limit)
            assert (found.depth, found.idle) == (depth, idle)
            need = len(hashes) - depth
            if need + idle > blocks.free:
                continue
            blocks.hold(hashes[:depth])
            blocks.take(need)
            runs.hold(found)
            runs.take(need)
            book = Holding()
            book.private, book.published = need, depth
            if depth:
                book.spans.append((0, depth))
            live.append((hashes, book, hashes[:depth], [need]))
        assert (runs.blank, runs.idle, runs.shared, runs.private) == (
            blocks.blank,
            blocks.idle,
            blocks.shared,
            blocks.private,
        )
