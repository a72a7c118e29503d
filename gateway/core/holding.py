"""The gateway's queue: late binding of requests that no backend should start now.

A request is assigned by price at once, held here while its backend owes too much or lacks room,
and bound when it starts: re-measured then, or taken over by a backend that ran idle. Everything is
woken by events of the books, nothing ticks but the time limits. Must never lose a request: one
that has entered either starts, or is told that its time is over, or is withdrawn by its owner.
"""

from collections.abc import Callable
from math import inf

from gateway.core import saturation
from gateway.core.chooser import Chooser
from gateway.core.classes import Classes
from gateway.core.fleet import Fleet
from gateway.core.ledger import STALE, Account
from gateway.core.pool import Pool
from gateway.core.release import KvRules, Releaser
from gateway.core.settings import ClassSpec, QueueSpec
from gateway.core.types import BackendId, Ticket
from gateway.core.waiting import NOWHERE, Held, Line, WaitingRoom

# Waiting requests that an idle backend looks at before it takes one over: about 5 us each.
_STEAL_LOOKS = 16
# Moves after which a request stays where it is: it is bound late, not passed around.
_MAX_MOVES = 4
# When to come back while no backend of a pool is up.
_NOBODY_UP_S = 1.0

Start = Callable[[Ticket, Account, float], None]


class Queue:
    """What waits, and the rules that let it go. `start` enters a ticket on its backend's books.

    `started` collects the tickets that were let go, for the shell to send; it takes and clears it.
    """

    def __init__(self, spec: QueueSpec, fleet: Fleet, chooser: Chooser, classes: Classes) -> None:
        specs = classes.specs
        self.room = WaitingRoom(self._changed)
        self.started: list[Ticket] = []
        self._spec = spec
        self._fleet = fleet
        self._chooser = chooser
        self._classes = classes
        self._kv = KvRules(spec, specs)
        self._rules: dict[int, Releaser] = {}

    def apply(self, spec: QueueSpec) -> None:
        """Take new rules, and the classes' new ones; what waits keeps its place and time limit."""
        classes = self._classes.specs
        self._spec = spec
        self._kv.apply(spec, classes)
        slots = self._fleet.by_slot
        self._rules = {slot: rules for slot, rules in self._rules.items() if slot in slots}
        for rules in self._rules.values():
            rules.apply(spec, classes)

    @property
    def adaptive(self) -> bool:
        """Whether W follows what first tokens show."""
        return self._spec.adaptive

    @property
    def enabled(self) -> bool:
        """Whether requests may be held at all."""
        return self._spec.enabled

    def rules(self, row: Account) -> Releaser:
        """Return the rules of one backend."""
        rules = self._rules.get(row.slot)
        if rules is None:
            rules = self._rules[row.slot] = Releaser(self._spec, self._classes.specs, self._kv)
        return rules

    # -- entering ---------------------------------------------------------------------------

    def passes(self, ticket: Ticket, row: Account, now: float) -> bool:
        """Return whether a ticket just assigned to `row` may start at once."""
        if row.slot in self.room.lines:
            return False
        rules = self.rules(row)
        return rules.open(row) and rules.fits(row, ticket, now)

    def full(self, cls: ClassSpec, size: int) -> bool:
        """Return whether a class has no place, or no room for `size` more bytes."""
        room = self.room
        return (
            room.waiting(cls.name) >= cls.max_waiting
            or room.waiting_bytes(cls.name) + size > cls.max_waiting_bytes
        )

    def hold(self, ticket: Ticket, slot: int, cls: ClassSpec, now: float) -> None:
        """Let a ticket wait in the line of `slot`, at most its class's or its client's limit."""
        query = ticket.query
        wait = cls.max_wait_s
        latest = inf
        if query.patience_s is not None:
            wait = min(wait, query.patience_s)
            latest = now + query.patience_s - ticket.prefill_s
        ticket.held = True
        self.room.enter(
            Held(
                ticket,
                slot,
                cls.name,
                ticket.prefill_s,
                now,
                now + wait,
                latest,
                query.body_bytes,
            )
        )
        self._seen(slot, now)

    def refused(self, pool: Pool, now: float) -> None:
        """Note that a request found no place: every backend of its pool has more than it can do."""
        for row in pool.rows:
            self.rules(row).overload.sign(now)

    def backlog_s(self, pool: Pool, now: float) -> float:
        """Return the seconds until the least loaded backend has worked off what is before it.

        By the prefill seconds owed and waiting, or by the pace at which requests were let go of
        late where that says longer: memory or sequences may be what they wait for. With no backend
        up, what waits says nothing: about when a health check may find one.
        """
        waits = []
        for row in pool.rows:
            if not row.up or row.draining:
                continue
            seconds = row.owed_s + row.other_owed_s + self.room.seconds(row.slot)
            line = self.room.lines.get(row.slot)
            pace = self.rules(row).starts.per_second(now)
            if line is not None and pace:
                seconds = max(seconds, len(line) / pace)
            waits.append(seconds)
        return min(waits, default=_NOBODY_UP_S)

    # -- how full ----------------------------------------------------------------------------

    def saturation(self, row: Account) -> float:
        """Return how full a backend is; 1 = the next request waits."""
        return saturation.of_backend(row, self.rules(row).limit.seconds, self._spec.kv_share)

    def pool_saturation(self, pool: Pool) -> float:
        """Return the mean of the pool's backends that may be chosen; infinity for none."""
        return saturation.of_pool(pool.rows, self.saturation)

    def first_token(self, ticket: Ticket, row: Account, now: float) -> None:
        """Learn W from a ticket's first token, which is on the books already."""
        if not ticket.query.stream or not ticket.query.prefills:
            return
        limit = self.rules(row).limit
        held = row.slot in self.room.lines
        waited = now - ticket.dispatched_at - ticket.prefill_s
        target = self._classes.named(ticket.query.cls).spec.slo.ttft_s
        limit.first_token(waited, target, now, held=held)

    # -- leaving ----------------------------------------------------------------------------

    def withdraw(self, ticket: Ticket) -> None:
        """Give up a waiting ticket's place."""
        ticket.held = False
        self.room.leave(ticket.id)

    def due(self, now: float) -> list[Ticket]:
        """Return the tickets whose time limit passed; each has left and awaits its `finish`."""
        if now < self.room.next_due:
            return []
        over = []
        for held in self.room.expired(now):
            ticket = held.ticket
            assert ticket is not None
            row = self._fleet.by_slot.get(held.slot)
            if row is not None:
                self.rules(row).overload.sign(now)
            self.withdraw(ticket)
            over.append(ticket)
        return over

    # -- starting ---------------------------------------------------------------------------

    def count_started(self, ticket: Ticket, row: Account, now: float) -> None:
        """Charge a ticket that is sent to `row` to its class's share and memory."""
        ticket.counted = True
        rules = self.rules(row)
        rules.shares.charge(ticket.query.cls, _engine_seconds(ticket, row), now)
        if row.slot in self.room.lines:  # the pace matters where somebody waits
            rules.starts.note(now)
        self._kv.started(ticket, row.new_tokens, now)

    def count_ended(self, ticket: Ticket, row: Account | None, now: float, *, ran: bool) -> None:
        """Take a counted ticket out of its class's memory; its share too if it never ran.

        `row` None = its backend has been removed meanwhile.
        """
        ticket.counted = False
        self._kv.ended(ticket)
        if not ran and row is not None:
            self.rules(row).shares.charge(ticket.query.cls, -_engine_seconds(ticket, row), now)

    def refill(self, row: Account, start: Start, now: float) -> None:
        """Let go of whatever may start on `row` now; call after anything that may have freed it."""
        room = self.room
        if not room.lines or row.retired or not row.up or row.draining:
            return
        rules = self.rules(row)
        while True:
            line = room.lines.get(row.slot)
            if line is not None:
                held = rules.next(line, row, now)
            else:
                held = self._take_over(row, rules, now) if room.lines else None
            if held is None or held.ticket is None:
                return
            ticket = held.ticket
            self.withdraw(ticket)
            self._chooser.measure([row], ticket.query, now)
            _rebind(ticket, row)  # again: others have started since
            self._start(ticket, row, start, now)

    def place(self, held: Held, start: Start, now: float) -> None:
        """Start a waiting request where it is cheapest now, or let it wait there."""
        ticket = held.ticket
        assert ticket is not None
        winner = self._winner(ticket, now)
        if winner is None:
            ticket.slot = BackendId(NOWHERE)
            self.room.move(held, NOWHERE, ticket.prefill_s)
            return
        _rebind(ticket, winner)
        if ticket.query.prefills and self.enabled and not self.passes(ticket, winner, now):
            self.room.move(held, winner.slot, winner.prefill_s)
            return
        self.withdraw(ticket)
        self._start(ticket, winner, start, now)

    def _start(self, ticket: Ticket, row: Account, start: Start, now: float) -> None:
        ticket.dispatched_at = now
        start(ticket, row, now)
        self.count_started(ticket, row, now)
        self.started.append(ticket)

    def _winner(self, ticket: Ticket, now: float) -> Account | None:
        query = ticket.query
        pool = self._fleet.pools.get(query.model)
        if pool is None:
            return None
        slo = self._classes.named(query.cls).spec.slo
        return self._chooser.choose(pool, query, slo, now, ticket.tried)

    def disperse(self, slot: int, now: float) -> None:
        """Give what waits for a backend that may not be chosen any more to the others."""
        line = self.room.lines.get(slot)
        if line is None:
            return
        for held in list(line.all()):
            ticket = held.ticket
            assert ticket is not None
            winner = self._winner(ticket, now)
            if winner is None:
                ticket.slot = BackendId(NOWHERE)
                self.room.move(held, NOWHERE, ticket.prefill_s)
            elif winner.slot != slot:
                _rebind(ticket, winner)
                self.room.move(held, winner.slot, winner.prefill_s)

    def _seen(self, slot: int, now: float) -> None:
        row = self._fleet.by_slot.get(slot)
        if row is not None:
            self.rules(row).overload.look(self.room.longest_wait(now), now)

    def _take_over(self, row: Account, rules: Releaser, now: float) -> Held | None:
        """Return the waiting request of another line that gains most by starting on `row`."""
        if row.owed_s + row.other_owed_s >= self._spec.steal_s or not rules.open(row):
            return None
        if row.warm_from is not None and self._fleet.spares(row, now):
            return None
        best, most = None, 0.0
        looks = _STEAL_LOOKS
        for line_slot, line in self._longest_first():
            for held in line.first(max(1, looks // 2)):
                gain = self._gain(held, line_slot, row, rules, now)
                if gain > most:
                    best, most = held, gain
                looks -= 1
                if not looks:
                    return best
        return best

    def _longest_first(self) -> list[tuple[int, Line]]:
        lines = [item for item in self.room.lines.items() if item[0] >= NOWHERE]
        return sorted(lines, key=lambda item: (item[0] != NOWHERE, -item[1].seconds))

    def _gain(self, held: Held, slot: int, row: Account, rules: Releaser, now: float) -> float:
        """Return the seconds a waiting request gains by starting on `row`; <= 0 = it stays."""
        ticket = held.ticket
        if ticket is None or row.slot in ticket.tried or not self._serves(row, ticket):
            return 0.0
        if slot != NOWHERE and held.moved >= _MAX_MOVES:
            return 0.0
        self._chooser.measure([row], ticket.query, now)
        if not _room_for(row, ticket, rules, now):
            return 0.0
        home = self._fleet.by_slot.get(slot)
        pool = self._fleet.pools[ticket.query.model]
        if home is None:
            return inf
        slo = self._classes.named(held.cls).spec.slo
        self._chooser.price([home, row], pool, ticket.query, slo, now)
        return home.cost - row.cost

    def _changed(self, slot: int, seconds: float) -> None:
        row = self._fleet.by_slot.get(slot)
        if row is not None:
            row.held_s = seconds
            backlog = self.room.lines[slot].backlog
            row.backlog = backlog if backlog.count else None
            row.fresh_until = STALE

    def _serves(self, row: Account, ticket: Ticket) -> bool:
        pool = self._fleet.pools.get(ticket.query.model)
        return pool is not None and row in pool.rows


def _room_for(row: Account, ticket: Ticket, rules: Releaser, now: float) -> bool:
    uncached = ticket.uncached_tokens
    ticket.uncached_tokens = row.uncached_tokens
    fits = rules.fits(row, ticket, now)
    ticket.uncached_tokens = uncached
    return fits


def _rebind(ticket: Ticket, row: Account) -> None:
    """Write to `ticket` what `row`, just measured for it, is and holds."""
    ticket.slot = row.slot
    ticket.backend = row.name
    ticket.hit_tokens = row.hit_tokens
    ticket.uncached_tokens = row.uncached_tokens
    ticket.prefill_s = row.prefill_s
    ticket.known_blocks = row.depth


def _engine_seconds(ticket: Ticket, row: Account) -> float:
    """Return the engine time a ticket is charged for: its prefill and its share of decode steps."""
    query = ticket.query
    engine = row.engine
    per_token = engine.sequence_s + engine.context_token_s * query.chain.tokens
    return ticket.prefill_s + query.expected_output_tokens * per_token
