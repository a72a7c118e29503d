"""Keeps Python's cycle collector from ever walking the whole index, and times what it does.

Left alone, the collector walks every node of a large index again and again: 0.3 s with ten million
blocks, in the middle of a request. Here the young generations are small, the old one is collected
only while little of it is there, and what has become old beyond that is set aside (`gc.freeze`).
What is set aside is still freed when nobody refers to it, only never searched for cycles: requests
leave none behind and the index none at all (both tested), and a rare deep look, after a minute
without any request, finds what formed nevertheless. Must never be called from a request's path.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

# New objects before the youngest are looked at, and how often before the next are. 0.1 to 0.3 us an
# object, in a large process, so 1 ms and 4 ms at the most.
YOUNG: Final = 3_000
MIDDLE: Final = 2
NEVER: Final = 1 << 30
# Old objects beyond which they are set aside instead of collected: 5 ms.
MOST_OLD: Final = 16_000

_TIDY_S: Final = 0.25
# Between two slices of a sweep, which take some 0.7 ms each: a tenth of the loop's time.
_SWEEP_PAUSE_S: Final = 0.006
_COUNT_EVERY: Final = 4  # tidies: a second
_OLD_EVERY: Final = 40  # ten seconds
_DEEP_AFTER: Final = 240  # idle in a row: a minute
_DEEP_EVERY: Final = 14_400  # an hour


class Collector:
    """Settings and times of this process's collector from `start` until `close`.

    `worst_s` and `total_s` are CPU seconds of single collections and of all; `note` is told each.
    """

    def __init__(self, note: Callable[[float], None] | None = None) -> None:
        self._told = note
        self.collections = 0
        self.worst_s = 0.0
        self.total_s = 0.0
        self._began = 0.0
        self._tidied = self._deep_at = self._idle = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Take over, with all there is set aside."""
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)
        gc.callbacks.append(self._note)

    def close(self) -> None:
        """Leave the collector as it was found. A second call does nothing."""
        if self._note not in gc.callbacks:
            return
        gc.callbacks.remove(self._note)
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def tidy(self, *, idle: bool) -> None:
        """Collect what is young; now and then what is old, or set it aside.

        To be called four times a second; `idle` = no request is open.
        """
        self._tidied += 1
        self._idle = self._idle + 1 if idle else 0
        gc.collect(1)
        if self._idle >= _DEEP_AFTER and self._tidied - self._deep_at >= _DEEP_EVERY:
            self._deep_at = self._tidied
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif self._tidied % _COUNT_EVERY == 0:
            self._tidy_old(self._tidied % _OLD_EVERY == 0)

    def _tidy_old(self, due: bool) -> None:
        old = len(gc.get_objects(generation=2))
        if old > MOST_OLD:
            gc.freeze()
        elif due and old:
            gc.collect()

    def _note(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
            return
        took = time.thread_time() - self._began
        self.collections += 1
        self.total_s += took
        self.worst_s = max(self.worst_s, took)
        if self._told is not None:
            self._told(took)


async def keep_tidy(
    collector: Collector, *, idle: Callable[[], bool], sweep: Callable[[], bool]
) -> None:
    """Tidy up until cancelled; first `sweep` in slices for as long as it says that there is more."""
    while True:
        more = sweep()
        await asyncio.sleep(_SWEEP_PAUSE_S if more else _TIDY_S)
        if not more:
            collector.tidy(idle=idle())
