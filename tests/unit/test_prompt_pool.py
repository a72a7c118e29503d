"""Encoding in threads: bounded, given up on cancellation, and nothing is left behind."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator

import pytest

from gateway.prompt.engines import CannotEncode
from gateway.prompt.pool import MAX_JOBS, EncoderPool, PoolBehind
from gateway.tasks import stop


class Gated:
    """An encoder of 1,000 characters a second that stands still until it is let go."""

    chars_per_s = 1_000.0

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.encoded: list[str] = []
        self.threads: set[str] = set()

    def encode(self, text: str) -> "array[int]":
        self.begun.release()
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(20)
        if text == "bad":
            raise CannotEncode("bad")
        self.encoded.append(text)
        return array("I", map(ord, text))

    async def at_work(self, texts: int) -> None:
        """Wait until that many more texts are begun."""
        for _ in range(texts):
            assert await asyncio.to_thread(self.begun.acquire, timeout=20)


@pytest.fixture
async def pool() -> AsyncIterator[EncoderPool]:
    pool = EncoderPool(threads=1, max_wait_s=1.0)
    yield pool
    pool.close()


async def idle(pool: EncoderPool) -> None:
    while pool.jobs:  # noqa: ASYNC110 - threads lower it
        await asyncio.sleep(0.001)
    assert pool.owed_s == 0.0


def task(pool: EncoderPool, encoder: Gated, *texts: str) -> "asyncio.Task[list[array[int]]]":
    return asyncio.get_running_loop().create_task(pool.encode(encoder, texts))


async def test_every_text_comes_back_in_order_from_another_thread(pool: EncoderPool) -> None:
    encoder = Gated()
    encoder.go.set()

    ids = await pool.encode(encoder, ["ab", "", "c"])

    assert [one.tolist() for one in ids] == [[97, 98], [], [99]]
    assert encoder.threads.isdisjoint({threading.main_thread().name})
    await idle(pool)


async def test_the_loop_goes_on_while_a_text_is_encoded(pool: EncoderPool) -> None:
    encoder = Gated()
    waiting = task(pool, encoder, "ab")
    await encoder.at_work(1)

    assert not waiting.done()
    assert (pool.jobs, pool.owed_s) == (1, 0.002)
    encoder.go.set()
    assert len(await waiting) == 1


async def test_more_than_a_wait_is_worth_is_refused_at_once(pool: EncoderPool) -> None:
    encoder = Gated()
    waiting = [task(pool, encoder, "x" * 600), task(pool, encoder, "y" * 600)]
    await encoder.at_work(1)

    assert pool.behind()
    with pytest.raises(PoolBehind):
        await pool.encode(encoder, ["z"])
    encoder.go.set()
    await asyncio.gather(*waiting)
    await idle(pool)
    assert not pool.behind()


async def test_a_free_thread_takes_a_text_however_long_the_others_are() -> None:
    pool, encoder = EncoderPool(threads=2, max_wait_s=1.0), Gated()
    waiting = [task(pool, encoder, "x" * 50_000)]
    await encoder.at_work(1)

    assert not pool.behind()
    waiting.append(task(pool, encoder, "y"))
    await encoder.at_work(1)
    assert pool.behind()
    encoder.go.set()
    await asyncio.gather(*waiting)
    await idle(pool)
    pool.close()


async def test_the_number_of_jobs_has_a_cap(pool: EncoderPool) -> None:
    encoder = Gated()
    waiting = [task(pool, encoder, "") for _ in range(MAX_JOBS)]
    await encoder.at_work(1)

    with pytest.raises(PoolBehind):
        await pool.encode(encoder, [""])
    encoder.go.set()
    await asyncio.gather(*waiting)
    await idle(pool)


async def test_a_cancelled_wait_gives_up_what_was_not_begun(pool: EncoderPool) -> None:
    encoder = Gated()
    running, queued = task(pool, encoder, "a", "never"), task(pool, encoder, "b")
    await encoder.at_work(1)

    await stop(queued)
    assert pool.jobs == 1
    await stop(running)
    encoder.go.set()
    await idle(pool)

    assert encoder.encoded == ["a"]
    assert [one.tolist() for one in await pool.encode(encoder, ["c"])] == [[99]]


async def test_an_error_comes_back_and_the_pool_goes_on(pool: EncoderPool) -> None:
    encoder = Gated()
    encoder.go.set()

    with pytest.raises(CannotEncode):
        await pool.encode(encoder, ["a", "bad", "c"])
    await idle(pool)

    assert encoder.encoded == ["a"]
    assert len(await pool.encode(encoder, ["d"])) == 1


async def test_a_closed_pool_is_behind_for_good(pool: EncoderPool) -> None:
    pool.close()

    with pytest.raises(PoolBehind):
        await pool.encode(Gated(), ["a"])
    assert pool.jobs == 0
