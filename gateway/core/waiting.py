"""The waiting room: requests held at the gateway, and in which order their backend may have them.

Every held request stands in the line of the backend it was assigned to. A line is one heap per
class, ordered by uncached seconds minus aging: the key is fixed at entry, because every request of
a heap ages alike. Leaving is immediate for the books (places, bytes, seconds); the heap's entry,
emptied of all it referred to, goes when it comes to the top or when such entries are the majority.
Must never decide who may start (`core/release.py` does), read a clock or grow beyond its limits.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from gateway.core.backlog import Backlog
from gateway.core.types import Ticket

# Seconds of uncached prefill that one second of waiting outweighs (results.md: pf - 0.05 * wait).
AGING = 0.05
# Below this many entries a heap is never worth cleaning.
_LEAST_CLEANED = 64

NOWHERE = -1
"""Line of the requests that no backend can take now: their pool is empty or down.

Lines below it belong to API keys: requests that wait for one of their key's streams to end.
"""


class Held(msgspec.Struct, gc=False, eq=False):
    """One waiting request. `ticket` is None once it has left.

    `pf_s` = its prefill seconds on the backend it is assigned to; `latest_s` = when it must start
    to keep the deadline its client stated (infinity: none was stated); `size` = body bytes kept.
    """

    ticket: Ticket | None
    slot: int
    cls: str
    pf_s: float
    since: float
    until: float
    latest_s: float = inf
    size: int = 0
    moved: int = 0


_Entry = tuple[float, int, Held]


class _Heap:
    """Held requests of one line and class; entries that have left are skipped."""

    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live = 0

    def push(self, key: float, order: int, held: Held) -> None:
        heappush(self.entries, (key, order, held))
        self.live += 1

    def head(self) -> Held | None:
        entries = self.entries
        while entries:
            held = entries[0][2]
            if held.ticket is not None:
                return held
            heappop(entries)
        return None

    def drop(self) -> None:
        """Note that one entry has left."""
        self.live -= 1
        entries = self.entries
        if len(entries) > _LEAST_CLEANED and 2 * self.live < len(entries):
            self.entries = [entry for entry in entries if entry[2].ticket is not None]
            heapify(self.entries)


class Line:
    """The held requests of one backend. `seconds` = the prefill they cost it, `backlog` = by size."""

    __slots__ = ("_ns", "backlog", "heaps", "urgent")

    def __init__(self) -> None:
        self.heaps: dict[str, _Heap] = {}
        self.urgent = _Heap()
        self.backlog = Backlog()
        self._ns = 0

    def __len__(self) -> int:
        return sum([heap.live for heap in self.heaps.values()])

    @property
    def seconds(self) -> float:
        """Prefill seconds of all that wait here."""
        return self._ns * 1e-9

    def add(self, held: Held, order: int) -> None:
        """Let `held` wait here; `order` is larger than that of all before it."""
        heap = self.heaps.get(held.cls)
        if heap is None:
            heap = self.heaps[held.cls] = _Heap()
        heap.push(held.pf_s + AGING * held.since, order, held)
        if held.latest_s != inf:
            self.urgent.push(held.latest_s, order, held)
        self._ns += int(held.pf_s * 1e9)
        self.backlog.add(held.pf_s)

    def remove(self, held: Held) -> None:
        """Take `held`, whose ticket is already None, off this line."""
        heap = self.heaps[held.cls]
        heap.drop()
        if held.latest_s != inf:
            self.urgent.drop()
        self._ns -= int(held.pf_s * 1e9)
        self.backlog.remove(held.pf_s)
        if not heap.live:
            del self.heaps[held.cls]

    def head(self, cls: str) -> Held | None:
        """Return the request of a class that is first by uncached seconds minus aging."""
        heap = self.heaps.get(cls)
        return None if heap is None else heap.head()

    def most_urgent(self) -> Held | None:
        """Return the request whose stated deadline comes first, if any was stated."""
        return self.urgent.head()

    def all(self) -> Iterator[Held]:
        """Yield every request of the line, in no order."""
        for heap in self.heaps.values():
            for _, _, held in heap.entries:
                if held.ticket is not None:
                    yield held

    def heads(self) -> Iterator[Held]:
        """Yield the first of each class."""
        for cls in list(self.heaps):
            held = self.head(cls)
            if held is not None:
                yield held

    def first(self, count: int) -> Iterator[Held]:
        """Yield up to about `count` requests that are among the first of each class."""
        for heap in self.heaps.values():
            for _, _, held in heap.entries[:count]:
                if held.ticket is not None:
                    yield held


class WaitingRoom:
    """Everything held, by ticket, by line and by class. `next_due` = the first time limit."""

    def __init__(self, changed: Callable[[int, float], None]) -> None:
        """`changed(slot, seconds)` is told whenever what waits for a backend has changed."""
        self._changed = changed
        self.lines: dict[int, Line] = {}
        self.next_due = inf
        self._held: dict[int, Held] = {}
        self._places: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._limits: list[tuple[float, int, Held]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._held)

    def waiting(self, cls: str) -> int:
        """Return how many requests of a class wait."""
        return self._places.get(cls, 0)

    def waiting_bytes(self, cls: str) -> int:
        """Return the body bytes that the waiting requests of a class keep."""
        return self._bytes.get(cls, 0)

    def seconds(self, slot: int) -> float:
        """Return the prefill seconds that wait for a backend."""
        line = self.lines.get(slot)
        return 0.0 if line is None else line.seconds

    def enter(self, held: Held) -> None:
        """Let a request wait in the line of `held.slot`."""
        ticket = held.ticket
        assert ticket is not None
        self._held[ticket.id] = held
        cls = held.cls
        self._places[cls] = self._places.get(cls, 0) + 1
        self._bytes[cls] = self._bytes.get(cls, 0) + held.size
        self._join(held)
        heappush(self._limits, (held.until, self._order, held))
        if held.until < self.next_due:  # noqa: PLR1730 - a third of the price of min
            self.next_due = held.until

    def leave(self, ticket_id: int) -> Ticket:
        """Give up a request's place, wherever it stands.

        Raises:
            KeyError: it does not wait.
        """
        held = self._held.pop(ticket_id)
        ticket = held.ticket
        assert ticket is not None
        held.ticket = None
        self._quit(held)
        cls = held.cls
        places = self._places[cls] - 1
        if places:
            self._places[cls] = places
            self._bytes[cls] -= held.size
        else:
            del self._places[cls], self._bytes[cls]
        self._clean_limits()
        return ticket

    def move(self, held: Held, slot: int, pf_s: float) -> Held:
        """Put a waiting request into another line; return what stands there for it now."""
        ticket = held.ticket
        assert ticket is not None
        held.ticket = None
        self._quit(held)
        moved = msgspec.structs.replace(
            held, ticket=ticket, slot=slot, pf_s=pf_s, moved=held.moved + 1
        )
        self._held[ticket.id] = moved
        self._join(moved)
        heappush(self._limits, (moved.until, self._order, moved))
        return moved

    def expired(self, now: float) -> list[Held]:
        """Return the requests whose time limit has passed; they still wait until they `leave`."""
        limits = self._limits
        over = []
        while limits and limits[0][0] <= now:
            held = heappop(limits)[2]
            if held.ticket is not None:
                over.append(held)
        while limits and limits[0][2].ticket is None:
            heappop(limits)
        self.next_due = limits[0][0] if limits else inf
        return over

    def longest_wait(self, now: float) -> float:
        """Return the largest part of its time limit that the request due next has waited."""
        limits = self._limits
        while limits and limits[0][2].ticket is None:
            heappop(limits)
        if not limits:
            return 0.0
        held = limits[0][2]
        return (now - held.since) / max(1e-9, held.until - held.since)

    def _join(self, held: Held) -> None:
        line = self.lines.get(held.slot)
        if line is None:
            line = self.lines[held.slot] = Line()
        self._order += 1
        line.add(held, self._order)
        self._changed(held.slot, line.seconds)

    def _quit(self, held: Held) -> None:
        line = self.lines[held.slot]
        line.remove(held)
        self._changed(held.slot, line.seconds)
        if not line.heaps:
            del self.lines[held.slot]

    def _clean_limits(self) -> None:
        limits = self._limits
        if len(limits) > _LEAST_CLEANED and 2 * len(self._held) < len(limits):
            self._limits = [entry for entry in limits if entry[2].ticket is not None]
            heapify(self._limits)
