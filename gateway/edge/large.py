"""Work on large bodies, one at a time in a thread: the loop goes on between its C calls.

A parser holds the interpreter's lock, so what bounds the loop's wait is the cap on a body's values
(`core.request.MAX_WEIGHT`) and that only one body is worked on at once. Must never touch what the
loop's thread uses meanwhile.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 1024 * 1024
"""Bodies up to this are parsed in place if they are of few values: it takes a few ms."""

_MAY_BE_HEAVY = 128 * 1024
_MANY = 4_000  # messages, parts: 1 us of parsing each, and 1 us of writing
_SAMPLES, _SAMPLE = 8, 1024

T = TypeVar("T")

_worker = ThreadPoolExecutor(1, "large-bodies")


def is_large(body: bytes) -> bool:
    """Return whether parsing this would hold the loop up: by its size, or its many small objects.

    Those are told by samples: counting them all takes as long as parsing an ordinary body.
    """
    size = len(body)
    if size <= _MAY_BE_HEAVY or size > LARGE:
        return size > LARGE
    step = size // _SAMPLES
    seen = sum([body.count(b"{", at, at + _SAMPLE) for at in range(0, size - _SAMPLE, step)])
    return seen * step > _MANY * _SAMPLE


async def apart(work: Callable[[], T]) -> T:
    """Return what `work` returns or raises; a cancelled wait leaves it to end by itself."""
    done = await asyncio.get_running_loop().run_in_executor(_worker, _uncollected, work)
    await asyncio.sleep(0)  # who waited for the lock goes first: what follows may take long again
    return done


def _uncollected(work: Callable[[], T]) -> T:
    """Keep the collector from walking what is being built again and again: half the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return work()
    finally:
        if collecting:
            gc.enable()
