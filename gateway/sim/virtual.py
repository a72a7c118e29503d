"""Virtual time: what happens next, in order, as fast as the CPU allows. Never reads a clock."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[float, Any], None]


class Agenda:
    """Things to do at a time; those of one time are done in the order they were entered."""

    __slots__ = ("_entered", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._entered = 0

    def at(self, when: float, action: Action, what: Any = None) -> None:
        """Call `action(when, what)` at `when`, which is not in the past."""
        self._entered += 1
        heappush(self._heap, (when, self._entered, action, what))

    def run(self, going: Callable[[], bool]) -> None:
        """Do everything in order while `going` says so and there is anything."""
        heap = self._heap
        while heap and going():
            when, _, action, what = heappop(heap)
            self.now = when
            action(when, what)
