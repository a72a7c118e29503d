"""The dispatcher with a queue: what no backend should start now waits at the gateway.

The facade of the live gateway and of the simulator. `admit` may return a ticket that is `held`: its
owner parks it until `take_started` hands it over, `due` says that its time is over, or the owner
withdraws it by `finish`. After any call, what it let go is in `take_started`; `wake` is called once
something is. Must never leave a
backend idle while a request it could serve waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from random import Random

from gateway.core.bucket import clamp_retry_after
from gateway.core.classes import ClassBooks
from gateway.core.dispatcher import Dispatcher
from gateway.core.explain import NOBODY
from gateway.core.export import export
from gateway.core.holding import Queue
from gateway.core.key_limits import KeyBooks, Standing
from gateway.core.ledger import Account, LedgerError
from gateway.core.pool import Pool
from gateway.core.restore import Restoration, Saved
from gateway.core.saved import Way
from gateway.core.settings import CoreSettings
from gateway.core.types import (
    BackendId,
    BackendStatus,
    ClassStatus,
    Finish,
    Query,
    Refusal,
    RefusalKind,
    Snapshot,
    Ticket,
)
from gateway.core.waiting import NOWHERE

# Candidates of its decision that a waiting request keeps: all of eight would be half its memory.
_TRAIL_ROWS = 2
_price = itemgetter(5)


class QueuedDispatcher(Dispatcher):
    """Admission, queue, choice, books and learning over one fleet of backends."""

    def __init__(self, settings: CoreSettings, rng: Random, now: float) -> None:
        super().__init__(settings, rng, now)
        self.wake: Callable[[], None] = _nobody_waits
        self._queue = Queue(settings.queue, self._fleet, self._chooser, self._classes)

    def apply(self, settings: CoreSettings, now: float) -> None:
        """Take new settings whole, or raise ValueError and keep the old.

        Live tickets survive; those that wait for a backend that is gone wait for another.
        """
        super().apply(settings, now)
        queue = self._queue
        queue.apply(settings.queue)
        present = {row.slot for row in self._fleet.by_name.values()}
        gone = [s for s in queue.room.lines if s >= NOWHERE and s not in present]
        for slot in gone:
            queue.disperse(slot, now)
        self._refill_all(now)
        for key in self._keys.all():
            self._admit_streams(key, now)

    def admit(self, query: Query, now: float) -> Ticket | Refusal:
        """Assign a request a backend, a place in the queue, or say why not; all or nothing."""
        key = self._keys.get(query.key)
        if key is not None and (wait := key.begin(now)):
            return self._too_many(query, key, wait, now)
        answer = super().admit(query, now)
        if key is not None and isinstance(answer, Refusal):
            key.withdraw(now)
        return answer

    def _too_many(self, query: Query, key: KeyBooks, wait: float, now: float) -> Refusal:
        """Refuse for a key's requests a minute, until its tokens and the class's suffice too."""
        books = self._classes.named(query.cls)
        books.rejected += 1
        if query.prefills:  # at most so many: what is cached is not known here
            tokens = float(query.chain.tokens + query.expected_output_tokens)
            wait = max(wait, key.wait_s(tokens, now))
            if books.bucket is not None:
                wait = max(wait, books.bucket.wait_s(tokens, now))
        return Refusal(RefusalKind.RATE, clamp_retry_after(wait), f"key `{query.key}`")

    def finish(self, ticket: Ticket, finish: Finish, now: float) -> None:
        """End a ticket, waiting or sent: everything it holds is given back.

        Raises:
            LedgerError: it was finished before.
        """
        if ticket.held:
            self._queue.withdraw(ticket)
        counted = ticket.counted
        super().finish(ticket, finish, now)
        row = self._fleet.by_slot.get(ticket.slot)
        if counted:
            ran = finish.prefilled or ticket.first_token_at is not None
            self._queue.count_ended(ticket, row, now, ran=ran)
        if row is not None:
            self._refill(row, now)
        if ticket.stream_of is not None:
            self._end_stream(ticket, now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Note the first content byte: the prefill is paid, and another may start."""
        seen = ticket.first_token_at
        super().first_token(ticket, now)
        row = self._fleet.by_slot.get(ticket.slot)
        if row is not None:
            if self._queue.adaptive and seen is None and ticket.first_token_at is not None:
                self._queue.first_token(ticket, row, now)
            self._refill(row, now)

    def reassign(self, ticket: Ticket, now: float) -> bool:
        """Move a ticket whose attempt surely did not run to a backend not tried yet; it waits not.

        False = none is left: only `finish` may follow.
        """
        if ticket.held:
            raise LedgerError(f"ticket {ticket.id} waits")
        before = self._fleet.by_slot.get(ticket.slot)
        if ticket.counted:
            self._queue.count_ended(ticket, before, now, ran=False)
        moved = super().reassign(ticket, now)
        after = self._fleet.by_slot.get(ticket.slot)
        if moved and after is not None and ticket.query.prefills:
            self._queue.count_started(ticket, after, now)
        if before is not None:
            self._refill(before, now)
        return moved

    def observe(self, backend: str, snapshot: Snapshot, now: float) -> None:
        """Take in one scrape; others' load may have gone."""
        super().observe(backend, snapshot, now)
        self._refill_named(backend, now)

    def set_up(self, backend: str, up: bool, now: float) -> None:
        """Note whether the backend answers its health checks."""
        super().set_up(backend, up, now)
        self._refill_named(backend, now)

    def drain(self, backend: str, now: float = 0.0) -> bool:
        """Send nothing new to the backend; what waits for it waits for others."""
        known = super().drain(backend)
        self._refill_named(backend, now)
        return known

    def undrain(self, backend: str, now: float = 0.0) -> bool:
        """Let the backend be chosen again, and start what waits."""
        known = super().undrain(backend)
        self._refill_named(backend, now)
        return known

    # -- over a restart ---------------------------------------------------------------------

    def export(self, way: Way, now: float) -> Iterator[bytes]:
        """Yield what the next process may know, in slices (`core/export.py`)."""
        return export(self._fleet, self._outputs, way, now)

    def restoration(self, saved: Saved, way: Way, shift: float) -> Restoration:
        """Return what takes in what `export` yielded in an earlier process."""
        return Restoration(saved, self._fleet, self._outputs, way, shift)

    # -- the queue --------------------------------------------------------------------------

    def take_started(self) -> list[Ticket]:
        """Return the tickets that may be sent now, each once, and forget them."""
        started = self._queue.started
        if started:
            self._queue.started = []
        return started

    def due(self, now: float) -> list[Ticket]:
        """Return the waiting tickets whose time is over: refuse each, then `finish` it."""
        return self._queue.due(now)

    @property
    def next_due(self) -> float:
        """When `due` has something to say: infinity for never."""
        return self._queue.room.next_due

    def refusal_of(self, ticket: Ticket, now: float) -> Refusal:
        """Return what to tell the client of a ticket that waited too long."""
        pool = self._fleet.pools.get(ticket.query.model)
        if ticket.slot == NOWHERE or pool is None:
            kind, detail = RefusalKind.NO_BACKEND, ticket.query.model
        else:
            kind, detail = RefusalKind.EXPIRED, ticket.query.cls
        return Refusal(kind, self.retry_after_s(pool, now), detail)

    def retry_after_s(self, pool: Pool | None, now: float) -> float:
        """Return the seconds after which the backlog of a pool should be worked off."""
        return clamp_retry_after(1.0 if pool is None else self._queue.backlog_s(pool, now))

    def backends(self, now: float, model: str | None = None) -> list[BackendStatus]:
        """Return the figures of all backends, or of one model's."""
        queue, by_name = self._queue, self._fleet.by_name
        shown = []
        for one in super().backends(now, model):
            row = by_name[one.name]
            limit = queue.rules(row).limit
            line = queue.room.lines.get(row.slot)
            shown.append(
                replace(
                    one,
                    saturation=queue.saturation(row),
                    waiting=0 if line is None else len(line),
                    owed_limit_s=limit.seconds,
                    owed_limit_reason=limit.reason,
                )
            )
        return shown

    def pools(self) -> list[tuple[str, float]]:
        """Return each model with how full its backends are; 1 = the next request waits."""
        pools = self._fleet.pools
        return [(name, self._queue.pool_saturation(pool)) for name, pool in pools.items()]

    def standing(self, key: str, now: float) -> Standing | None:
        """Return what a key has left of its minute; None for one without limits."""
        books = self._keys.get(key)
        return None if books is None else books.standing(now)

    def classes(self, now: float) -> list[ClassStatus]:
        """Return the figures of all classes."""
        room = self._queue.room
        return [
            replace(one, waiting=room.waiting(one.name), waiting_bytes=room.waiting_bytes(one.name))
            for one in super().classes(now)
        ]

    def _enter(
        self, ticket: Ticket, row: Account, pool: Pool, books: ClassBooks, now: float
    ) -> Ticket | Refusal:
        queue = self._queue
        key = self._keys.get(ticket.query.key)
        if key is not None and key.spec.streams is not None:
            if key.full:
                return self._hold(ticket, key.line, pool, books, now)
            self._begin_stream(ticket, key)
        if not ticket.query.prefills or not queue.enabled:
            return super()._enter(ticket, row, pool, books, now)
        if not queue.passes(ticket, row, now):
            return self._hold(ticket, row.slot, pool, books, now)
        super()._enter(ticket, row, pool, books, now)
        queue.count_started(ticket, row, now)
        return ticket

    def _hold(
        self, ticket: Ticket, slot: int, pool: Pool, books: ClassBooks, now: float
    ) -> Ticket | Refusal:
        queue = self._queue
        if queue.full(books.spec, ticket.query.body_bytes):
            queue.refused(pool, now)
            books.rejected += 1
            self._classes.give_back(ticket, now)
            return Refusal(RefusalKind.FULL, self.retry_after_s(pool, now), books.spec.name)
        books.admitted += 1
        if len(ticket.trail) > _TRAIL_ROWS:
            ticket.trail = sorted(ticket.trail, key=_price)[:_TRAIL_ROWS]
        queue.hold(ticket, slot, books.spec, now)
        for row in pool.rows:
            if not row.unprefilled and row.slot not in queue.room.lines:
                self._refill(row, now)
        return ticket

    def _nobody(self, pool: Pool, query: Query, books: ClassBooks, now: float) -> Ticket | Refusal:
        if not query.prefills or not self._queue.enabled:
            return super()._nobody(pool, query, books, now)
        self._last_id += 1
        policy = self._chooser.used.name
        ticket = Ticket(
            self._last_id,
            query,
            BackendId(NOWHERE),
            "",
            policy,
            0,
            query.chain.tokens,
            0.0,
            now,
            now,
            NOBODY,
        )
        return self._hold(ticket, NOWHERE, pool, books, now)

    # -- streams of keys that may have only so many -----------------------------------------

    def _begin_stream(self, ticket: Ticket, key: KeyBooks) -> None:
        ticket.stream_of = ticket.query.key
        key.streams += 1

    def _end_stream(self, ticket: Ticket, now: float) -> None:
        """Give up a key's stream, and let the next that waits for it go on."""
        key = self._keys.get(ticket.stream_of)
        ticket.stream_of = None
        if key is not None:
            key.streams -= 1
            self._admit_streams(key, now)

    def _admit_streams(self, key: KeyBooks, now: float) -> None:
        """Let as many of a key's waiting requests go on as it may have streams, oldest first."""
        room = self._queue.room
        while not key.full and (line := room.lines.get(key.line)) is not None:
            held = min(line.heads(), key=lambda held: held.since)
            ticket = held.ticket
            assert ticket is not None
            self._begin_stream(ticket, key)
            self._queue.place(held, self._place, now)
        if self._queue.started:
            self.wake()

    def _refill_named(self, backend: str, now: float) -> None:
        row = self._fleet.by_name.get(backend)
        if row is None:
            return
        if row.up and not row.draining:
            self._refill(row, now)
        elif row.slot in self._queue.room.lines:
            self._queue.disperse(row.slot, now)
            self._refill_all(now)

    def _refill_all(self, now: float) -> None:
        for row in list(self._fleet.by_name.values()):
            self._refill(row, now)

    def _refill(self, row: Account, now: float) -> None:
        queue = self._queue
        if queue.room.lines:
            queue.refill(row, self._place, now)
            if queue.started:
                self.wake()


def _nobody_waits() -> None:
    """Stand in for the shell's wake-up call until it gives one."""
