"""A job calls `finish` or `give_up`, once, or neither when the wait for it is cancelled."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Sequence

import pytest

from gateway.core.types import Chain
from gateway.prompt.engines import CannotEncode
from gateway.prompt.jobs import BUSY, FAILED, EncodeJob
from gateway.prompt.pool import EncoderPool
from gateway.tasks import spawn, stop


class Letters:
    """One id per letter; waits where it is told to."""

    chars_per_s = 1_000.0

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def encode(self, text: str) -> "array[int]":
        self.begun.set()
        assert self.go.wait(20)
        if "?" in text:
            raise CannotEncode(text)
        return array("I", map(ord, text))


class Calls:
    """A prompter's two ends of a job, and what came of them."""

    def __init__(self) -> None:
        self.finished: list[list[list[int]]] = []
        self.gave_up: list[str] = []

    def finish(self, ids: Sequence["array[int]"]) -> Chain:
        self.finished.append([one.tolist() for one in ids])
        return Chain(array("Q"), 16, sum(map(len, ids)), exact=True)

    def give_up(self, reason: str) -> Chain:
        self.gave_up.append(reason)
        return Chain(array("Q"), 50.0, 7)


@pytest.fixture
async def pool() -> AsyncIterator[EncoderPool]:
    pool = EncoderPool(threads=1, max_wait_s=0.0)
    yield pool
    pool.close()


async def test_a_job_finishes_with_the_ids_of_its_texts(pool: EncoderPool) -> None:
    calls = Calls()
    chain = await EncodeJob(pool, Letters(), ["ab", "c"], calls.finish, calls.give_up).wait()

    assert (chain.exact, chain.tokens) == (True, 3)
    assert (calls.finished, calls.gave_up) == ([[[97, 98], [99]]], [])


async def test_a_busy_pool_makes_it_bytes(pool: EncoderPool) -> None:
    encoder, calls = Letters(), Calls()
    encoder.go.clear()
    first = spawn(EncodeJob(pool, encoder, ["a"], calls.finish, calls.give_up).wait(), name="first")
    assert await asyncio.to_thread(encoder.begun.wait, 20)

    chain = await EncodeJob(pool, encoder, ["b"], calls.finish, calls.give_up).wait()

    assert not chain.exact
    assert (calls.finished, calls.gave_up) == ([], [BUSY])
    encoder.go.set()
    await first
    assert calls.finished == [[[97]]]


async def test_text_that_has_no_encoding_makes_it_bytes(pool: EncoderPool) -> None:
    calls = Calls()
    chain = await EncodeJob(pool, Letters(), ["a", "?"], calls.finish, calls.give_up).wait()

    assert not chain.exact
    assert (calls.finished, calls.gave_up) == ([], [FAILED])


async def test_a_cancelled_wait_calls_neither(pool: EncoderPool) -> None:
    encoder, calls = Letters(), Calls()
    encoder.go.clear()
    job = EncodeJob(pool, encoder, ["a"], calls.finish, calls.give_up)
    waiting = spawn(job.wait(), name="job")
    assert await asyncio.to_thread(encoder.begun.wait, 20)

    await stop(waiting)
    encoder.go.set()
    while pool.jobs:  # noqa: ASYNC110 - a thread lowers it
        await asyncio.sleep(0.001)

    assert waiting.cancelled()
    assert (calls.finished, calls.gave_up) == ([], [])


async def test_a_dropped_job_leaves_nothing(pool: EncoderPool) -> None:
    calls = Calls()
    EncodeJob(pool, Letters(), ["a"], calls.finish, calls.give_up)
    await asyncio.sleep(0)

    assert (pool.jobs, calls.finished, calls.gave_up) == (0, [], [])
