"""Who of those that wait may start on a backend now: the rules of the gateway's queue.

A request starts while its backend owes less than W seconds of prefill and its KV cache has room.
Among those that may, the class furthest under its guaranteed share of engine seconds goes first,
else one whose stated deadline is near, else the least uncached seconds minus aging (results.md,
"Queue"): stating deadlines gains nobody another class's share. Under overload each class has a KV
limit and reserve of its own. Must never touch a book: it only says who is next.
"""

from collections.abc import Iterable, Mapping
from math import exp, inf

from gateway.core.ledger import Account
from gateway.core.owed_limit import OwedLimit
from gateway.core.settings import ClassSpec, QueueSpec
from gateway.core.types import Ticket
from gateway.core.waiting import AGING, Held, Line

# Time constant of the engine seconds a class has had (results.md).
SHARE_WINDOW_S = 10.0
# A class this far under its share, as a part of all engine seconds, goes before shorter requests.
_LAGGING = 0.02
# A stated deadline takes precedence when its latest start is this near.
_URGENT_S = 0.5
# Signs of overload keep the switch on for this long, so that it does not flap between two of them.
OVERLOAD_HOLD_S = 10.0
# A request that has waited this part of its limit is a sign (results.md: "half the deadline").
_WAITED = 0.5
# A class that started nothing for so long has no use for its reserve.
_PRESENT_S = 60.0
# Weight of one more prompt in a class's mean length.
_LENGTH_WEIGHT = 0.05


class Shares:
    """Engine seconds each class had of late, averaged over `SHARE_WINDOW_S`; one per backend."""

    __slots__ = ("_at", "_guaranteed", "_used")

    def __init__(self, classes: Iterable[ClassSpec]) -> None:
        self._at = 0.0
        self._used: dict[str, float] = {}
        self.apply(classes)

    def apply(self, classes: Iterable[ClassSpec]) -> None:
        """Take new guarantees; classes that stay keep what they had."""
        specs = list(classes)
        total = max(1.0, sum(spec.share for spec in specs))
        self._guaranteed = {spec.name: spec.share / total for spec in specs}
        self._used = {name: self._used.get(name, 0.0) for name in self._guaranteed}

    def charge(self, cls: str, seconds: float, now: float) -> None:
        """Count engine seconds given to a class; negative ones take back what never ran."""
        if now > self._at:
            left = exp((self._at - now) / SHARE_WINDOW_S)
            for name in self._used:
                self._used[name] *= left
            self._at = now
        if cls in self._used:
            self._used[cls] = max(0.0, self._used[cls] + seconds)

    def lag(self, cls: str) -> float:
        """Return how far a class is under its guaranteed share, as a part of all engine seconds."""
        total = sum(self._used.values())
        if not total:
            return 0.0
        return self._guaranteed.get(cls, 0.0) - self._used.get(cls, 0.0) / total


class StartRate:
    """Requests a second that were let go to a backend of late."""

    __slots__ = ("_at", "_count", "_since")

    def __init__(self) -> None:
        self._count = 0.0
        self._at = self._since = -inf

    def note(self, now: float) -> None:
        """Count one start."""
        if self._since == -inf:
            self._since = self._at = now
        self._count = self._faded(now) + 1.0
        self._at = now

    def per_second(self, now: float) -> float:
        """Return the rate; 0 before the first start."""
        if self._since == -inf:
            return 0.0
        known = max(SHARE_WINDOW_S * (1.0 - exp((self._since - now) / SHARE_WINDOW_S)), 1e-3)
        return self._faded(now) / known

    def _faded(self, now: float) -> float:
        return self._count * exp((self._at - now) / SHARE_WINDOW_S)


class Overload:
    """Whether more comes in than a backend can serve in time; one per backend.

    Signs: a request refused for want of a place, one whose time limit passed, one that has waited
    half its limit.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = -inf

    def sign(self, now: float) -> None:
        """Take note of one sign."""
        self.until = now + OVERLOAD_HOLD_S

    def look(self, longest_wait: float, now: float) -> bool:
        """Return whether the switch is on. `longest_wait`: part of its limit the oldest waited."""
        if longest_wait >= _WAITED:
            self.sign(now)
        return now < self.until


class KvRules:
    """How much of a backend's KV cache each class may fill."""

    __slots__ = ("_asked", "_classes", "_lengths", "_spec", "_used")

    def __init__(self, spec: QueueSpec, classes: Iterable[ClassSpec]) -> None:
        self._lengths: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # when a class last had a request started
        self._used: dict[tuple[int, str], int] = {}
        self.apply(spec, classes)

    def apply(self, spec: QueueSpec, classes: Iterable[ClassSpec]) -> None:
        """Take new limits; what classes hold now stays counted."""
        self._spec = spec
        self._classes: Mapping[str, ClassSpec] = {cls.name: cls for cls in classes}
        self._lengths = {k: v for k, v in self._lengths.items() if k in self._classes}

    def started(self, ticket: Ticket, own_tokens: int, now: float) -> None:
        """Count the KV tokens of a request that was sent to its backend.

        `own_tokens` of its prompt are shared with nothing else that runs there.
        """
        query = ticket.query
        key = (ticket.slot, query.cls)
        self._used[key] = self._used.get(key, 0) + _tokens(ticket)
        known = self._lengths.get(query.cls)
        length = float(own_tokens)
        self._asked[query.cls] = now
        self._lengths[query.cls] = (
            length if known is None else known + _LENGTH_WEIGHT * (length - known)
        )

    def ended(self, ticket: Ticket) -> None:
        """Take them back; call once for each `started`, while the ticket still names its slot."""
        key = (ticket.slot, ticket.query.cls)
        left = self._used.get(key, 0) - _tokens(ticket)
        if left > 0:
            self._used[key] = left
        else:
            self._used.pop(key, None)

    def held(self, slot: int, cls: str) -> int:
        """Return the KV tokens a class has on a backend, its shared prefixes counted per request."""
        return self._used.get((slot, cls), 0)

    def long(self, cls: str) -> bool:
        """Return whether a class's prompts are long, but for what they share while they run.

        Conversations in think time are what memory is kept for; a document that many ask about at
        once is kept by those who do.
        """
        return self._lengths.get(cls, 0.0) >= self._spec.long_prompt_tokens

    def room(self, row: Account, cls: str, now: float, *, overloaded: bool) -> float:
        """Return the KV tokens that one more request of `cls` may add to a backend."""
        spec, capacity = self._spec, row.engine.kv_tokens
        limit = spec.kv_share
        if overloaded and self.long(cls):
            limit = spec.overload_kv_share
        free = limit * capacity - row.kv_tokens - row.other_context_tokens
        if overloaded:
            free -= self._kept_for_others(row, cls, now)
        return free

    def _kept_for_others(self, row: Account, cls: str, now: float) -> float:
        """Return what other classes that send anything may yet fill of their reserves."""
        kept = 0.0
        for other in self._classes.values():
            if other.name != cls and now - self._asked.get(other.name, -inf) < _PRESENT_S:
                reserve = other.kv_reserve * row.engine.kv_tokens
                kept += max(0.0, reserve - self.held(row.slot, other.name))
        return kept


class Releaser:
    """The rules of one backend: its shares, its overload switch, and who is next.

    `kv` is shared by all backends. Shares are counted per backend, so that each of them keeps its
    part of the guarantee whatever the others are flooded with.
    """

    __slots__ = ("kv", "limit", "overload", "shares", "spec", "starts")

    def __init__(self, spec: QueueSpec, classes: Iterable[ClassSpec], kv: KvRules) -> None:
        self.spec = spec
        self.shares = Shares(classes)
        self.overload = Overload()
        self.limit = OwedLimit(spec)
        self.starts = StartRate()
        self.kv = kv

    def apply(self, spec: QueueSpec, classes: Iterable[ClassSpec]) -> None:
        """Take new rules; what was counted stays."""
        if spec != self.spec:
            self.limit.apply(spec)
        self.spec = spec
        self.shares.apply(classes)

    def open(self, row: Account) -> bool:
        """Return whether a backend owes little enough to be given another prefill.

        Nothing of ours without a first token there waives the limit: it would wait for nothing.
        """
        if row.in_flight >= row.engine.max_sequences and _queues(row):
            return False
        return not row.unprefilled or row.owed_ns * 1e-9 + row.other_owed_s < self.limit.seconds

    def fits(self, row: Account, ticket: Ticket, now: float) -> bool:
        """Return whether a backend's KV cache has room; an idle backend always has."""
        if not row.in_flight:
            return True
        query = ticket.query
        needed = ticket.uncached_tokens + query.expected_output_tokens
        overloaded = now < self.overload.until
        return needed <= self.kv.room(row, query.cls, now, overloaded=overloaded)

    def next(self, line: Line, row: Account, now: float) -> Held | None:
        """Return who of a line starts on its backend now; None = nobody may."""
        if not self.open(row):
            return None
        heads = []
        for cls in line.heaps:
            held = line.head(cls)
            if held is not None and held.ticket is not None and self.fits(row, held.ticket, now):
                heads.append(held)
        urgent = self._urgent(line, row, now)
        if len(heads) < 2:
            return urgent or (heads[0] if heads else None)
        self.shares.charge("", 0.0, now)
        lagging = max(heads, key=lambda held: self.shares.lag(held.cls))
        if self.shares.lag(lagging.cls) > _LAGGING:
            return urgent if urgent is not None and urgent.cls == lagging.cls else lagging
        if urgent is not None:
            return urgent
        return min(heads, key=lambda held: held.pf_s + AGING * held.since)

    def _urgent(self, line: Line, row: Account, now: float) -> Held | None:
        """Return who must start now to keep the deadline its client stated."""
        held = line.most_urgent()
        if held is None or held.ticket is None or not now <= held.latest_s <= now + _URGENT_S:
            return None
        return held if self.fits(row, held.ticket, now) else None


def _queues(row: Account) -> bool:
    """Return whether the engine itself has requests waiting, as far as we heard.

    How many sequences it takes is only believed; this shows that it takes no more.
    """
    return row.snapshot is not None and row.snapshot.waiting > 0


def _tokens(ticket: Ticket) -> int:
    return ticket.query.chain.tokens + ticket.query.expected_output_tokens
