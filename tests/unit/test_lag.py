import asyncio

from gateway import tasks
from gateway.telemetry.lag import watch_lag


async def test_late_timer_is_measured() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # the timer was set at 0.5 for 0.501, and it ran at 1.0
        return now

    task = tasks.spawn(watch_lag(seen.put_nowait, clock, interval_s=0.001), name="lag")
    try:
        assert round(await seen.get(), 3) == 0.499
    finally:
        await tasks.stop(task)


async def test_punctual_timer_has_no_lag() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()
    task = tasks.spawn(watch_lag(seen.put_nowait, lambda: 1.0, interval_s=0.001), name="lag")
    try:
        assert await seen.get() == 0.0
    finally:
        await tasks.stop(task)
