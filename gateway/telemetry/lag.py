"""How late the event loop runs its timers: the first sign that something blocks it."""

import asyncio
from collections.abc import Callable

_WINDOW_S = 15.0  # Prometheus scrapes every 15 s by default: each lag is seen at least once
_INTERVAL_S = 0.1


class LagWindow:
    """The worst lag of the last 15 to 30 seconds: a peak outlives the scrape that would miss it."""

    __slots__ = ("_before", "_clock", "_current", "_since")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._current = 0.0
        self._before = 0.0

    def note(self, seconds: float) -> None:
        """Take one measured lag."""
        self._turn()
        self._current = max(self._current, seconds)

    @property
    def worst_s(self) -> float:
        """Return the worst lag in the window."""
        self._turn()
        return max(self._current, self._before)

    def _turn(self) -> None:
        passed = self._clock() - self._since
        if passed < _WINDOW_S:
            return
        self._before = self._current if passed < 2 * _WINDOW_S else 0.0
        self._current = 0.0
        self._since += passed


async def watch_lag(
    note: Callable[[float], None], clock: Callable[[], float], *, interval_s: float = _INTERVAL_S
) -> None:
    """Measure until cancelled: run it with `tasks.spawn(watch_lag(telemetry.loop_lag, clock), ...)`."""
    while True:
        due = clock() + interval_s
        await asyncio.sleep(interval_s)
        note(max(0.0, clock() - due))
