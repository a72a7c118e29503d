"""What the signals of `radixgate serve` do to the gateway."""

import asyncio
from typing import cast

from gateway.app import App
from gateway.cli.serve import _Signals


class Reloads:
    """A gateway that reloads when it is let."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Semaphore(0)

    async def reload(self) -> None:
        self.begun += 1
        await self.may_end.acquire()


def running(signals: _Signals) -> asyncio.Task[None]:
    assert signals._reloading is not None
    return signals._reloading


async def test_a_storm_of_hangups_is_one_more_reload_and_not_a_queue_of_them() -> None:
    app = Reloads()
    signals = _Signals(cast("App", app))
    signals.reload()  # not started: the file is fresh
    signals.started = True
    for _ in range(50):
        signals.reload()
    first = running(signals)
    await asyncio.sleep(0)
    assert app.begun == 1
    for _ in range(50):
        signals.reload()
    app.may_end.release()
    app.may_end.release()
    await first
    assert app.begun == 2  # the second reads what was written during the first

    app.may_end.release()
    signals.reload()
    await running(signals)
    assert app.begun == 3
