"""Work on large bodies, one at a time in a thread: the loop goes on between its C calls.

A parser holds the interpreter's lock, so what bounds the loop's wait is the cap on a body's values
(`core.request.MAX_WEIGHT`) and that only one body is worked on at once. Must never touch what the
loop's thread uses meanwhile.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import randrange
from typing import Any, TypeVar

from gateway.core.request import ParsedRequest
from gateway.core.types import Api

LARGE = 1024 * 1024
"""Bodies up to this are parsed in place if they are of few values: it takes a few ms."""

_MAY_BE_HEAVY = 128 * 1024
_MANY = 4_000  # messages, parts: 1 us of parsing each, and 1 us of writing
_MAY_HAVE_MANY = 32 * 1024
_IDS_EACH = 64  # token ids are written in the time of one part
_SAMPLES, _SAMPLE = 8, 1024
_IDS = frozenset({"prompt", "input", "tokens"})

T = TypeVar("T")

_worker = ThreadPoolExecutor(1, "large-bodies")


def is_large(body: bytes) -> bool:
    """Return whether parsing this would hold the loop up: by its size, or its many small objects.

    Those are told by samples: counting them all takes as long as parsing an ordinary body. Where
    they are taken, no client can know.
    """
    size = len(body)
    if size <= _MAY_BE_HEAVY or size > LARGE:
        return size > LARGE
    step = size // _SAMPLES
    first = randrange(step - _SAMPLE)  # noqa: S311 - to be missed by luck is no gain
    places = range(first, size - _SAMPLE, step)
    seen = sum([body.count(b"{", at, at + _SAMPLE) for at in places])
    seen += sum([body.count(b"[", at, at + _SAMPLE) for at in places])
    return seen * step > _MANY * _SAMPLE


def has_many(parsed: ParsedRequest) -> bool:
    """Return whether writing this prompt would hold the loop up, as cheap as it was to parse.

    Three bytes may be a message, and each message or part is some work in Python.
    """
    if parsed.body_len <= _MAY_HAVE_MANY:
        return False
    left = _MANY
    for name, value in parsed.data.items():
        if isinstance(value, list) and value:
            ids = name in _IDS and isinstance(value[0], int) and parsed.api is not Api.RESPONSES
            left -= len(value) // _IDS_EACH if ids else len(value)
            if left >= 0 and not ids:
                left = _less_parts(value, left)
    return left < 0


def _less_parts(messages: list[Any], left: int) -> int:
    """Take what messages consist of from `left`; below 0 it is no exact number."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        parts = message.get("content")
        if isinstance(parts, str) and len(message) == 2:  # nearly all
            continue
        left -= len(message) >> 2
        if not isinstance(parts, list):
            parts = message.get("output")
        if isinstance(parts, list):
            left -= len(parts)
            if left >= 0:
                for part in parts:
                    if isinstance(part, dict) and ("content" in part or "output" in part):
                        left -= _parts_of(part)
        if left < 0:
            break
    return left


def _parts_of(part: dict[str, Any]) -> int:
    """Return how many parts a tool's answer has."""
    return sum(len(part[key]) for key in ("content", "output") if isinstance(part.get(key), list))


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
