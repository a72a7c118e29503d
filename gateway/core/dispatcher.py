"""The facade of the core: who gets a request, what it owes, and what its end teaches.

The live gateway and the simulator use it unchanged. Every call is one synchronous step that takes
`now`; between two calls the books are always right. Must never wait, read a clock, or let a
request leave the books more than once.
"""

from array import array

from gateway.core import explain
from gateway.core.belief import SLACK_TOKENS
from gateway.core.bucket import clamp_retry_after
from gateway.core.classes import ClassBooks, Reservable
from gateway.core.counted import expect, spoil
from gateway.core.event_feed import Feed
from gateway.core.exactness import EventSpec
from gateway.core.learn import learn_prefill, learn_tpot
from gateway.core.ledger import STALE, Account, LedgerError
from gateway.core.policies import policy_named
from gateway.core.pool import JITTER_S, Pool
from gateway.core.settings import CoreSettings
from gateway.core.types import (
    Finish,
    Outcome,
    Query,
    Refusal,
    RefusalKind,
    Snapshot,
    Ticket,
)
from gateway.core.views import Views

# What a refusal for want of a backend suggests: about when a health probe or a trial is due.
NO_BACKEND_RETRY_S = 1.0
# Learnt speeds become prices every so many finished requests of a pool.
_CALIBRATE_EVERY = 16
_OK = Outcome.OK
# A prompt whose blocks hold about as many tokens as usual resizes no index.
_LEAST_SAME, _MOST_SAME = 0.98, 1.02


class Dispatcher(Views):
    """Admission, choice, books and learning over one fleet of backends."""

    # -- configuration ----------------------------------------------------------------------

    def apply(self, settings: CoreSettings, now: float) -> None:
        """Take new settings whole, or raise ValueError and keep the old. Live tickets survive."""
        routing = settings.routing
        policy = policy_named(routing.policy)
        if routing.shadow is not None:
            policy_named(routing.shadow)
        if not settings.classes:
            raise ValueError("at least one class is needed")
        self._fleet.apply(settings)
        self._refresh_all()
        self._chooser.configure(policy)
        self._cast_shadow(settings)
        self._classes.apply(settings.classes, now)
        self._keys.apply(settings.keys, now)
        self._outputs.keep(set(self._fleet.pools), {spec.name for spec in settings.classes})

    # -- the life of a request --------------------------------------------------------------

    def admit(self, query: Query, now: float) -> Ticket | Refusal:
        """Choose a backend and enter the request in all books, or say why not; all or nothing."""
        pool = self._fleet.pools.get(query.model)
        if pool is None:
            return Refusal(RefusalKind.UNKNOWN_MODEL, NO_BACKEND_RETRY_S, query.model)
        books = self._classes.named(query.cls)
        if now >= self._fleet.fresh_until or now >= self._silent.next_due:
            self._catch_up(now)
        chooser = self._chooser
        winner = self._choose(pool, query, books.spec.slo, now)
        if winner is None:
            return self._nobody(pool, query, books, now)
        reserved = 0.0
        taken: tuple[Reservable, ...] = ()
        if query.prefills and (books.bucket is not None or query.key is not None):
            reserved = float(winner.uncached_tokens + query.expected_output_tokens)
            answer = self._reserve(query, books, reserved, now)
            if isinstance(answer, Refusal):
                books.rejected += 1
                return answer
            taken = answer
        self._last_id += 1
        ticket = Ticket(  # positional: half the price of keywords
            self._last_id,
            query,
            winner.slot,
            winner.name,
            chooser.used.name,
            winner.hit_tokens,
            winner.uncached_tokens,
            winner.prefill_s,
            now,  # admitted
            now,  # dispatched
            chooser.reason,
            reserved,
            winner.depth,
        )
        if taken:
            self._classes.hold(ticket, taken)
        self._decided(ticket, pool, winner.hit_tokens)
        return self._enter(ticket, winner, pool, books, now)

    def reassign(self, ticket: Ticket, now: float) -> bool:
        """Move a ticket whose attempt the backend surely did not run to one not tried yet.

        False = none is left: the ticket is on no backend's books and only `finish` may follow.
        """
        if ticket.finished:
            raise _finished(ticket)
        if ticket.first_token_at is not None:
            raise LedgerError(f"ticket {ticket.id} has an answer already")
        row = self._fleet.by_slot.get(ticket.slot)
        if row is not None and row.release(ticket):
            self._undo(row, ticket, now)
        if ticket.slot not in ticket.tried:
            ticket.tried += (ticket.slot,)
        pool = self._fleet.pools.get(ticket.query.model)
        if pool is None:
            return False
        slo = self._classes.named(ticket.query.cls).spec.slo
        winner = self._choose(pool, ticket.query, slo, now, ticket.tried)
        if winner is None:
            return False
        ticket.attempts += 1
        ticket.slot = winner.slot
        ticket.backend = winner.name
        ticket.policy = self._chooser.used.name
        ticket.hit_tokens = winner.hit_tokens
        ticket.uncached_tokens = winner.uncached_tokens
        ticket.prefill_s = winner.prefill_s
        ticket.known_blocks = winner.depth
        ticket.last_use = None
        ticket.dispatched_at = now
        ticket.reason = self._chooser.reason
        self._decided(ticket, pool, winner.hit_tokens)
        self._place(ticket, winner, now)
        return True

    def attempt_failed(self, ticket: Ticket, now: float, why: str = "") -> None:
        """Count a failure that is the fault of the ticket's backend; before `reassign`/`finish`.

        `why` is for whoever hears of the breaker (`tell_breakers`).
        """
        if ticket.finished:
            raise _finished(ticket)
        row = self._placed(ticket)
        if row is not None and ticket.slot not in ticket.tried:
            ticket.tried += (ticket.slot,)
            self._bump(row.breaker.failed(ticket.id, now, why))

    def excuse(self, ticket: Ticket) -> None:
        """Note that however the ticket ends now is not its backend's fault."""
        if ticket.slot not in ticket.tried:
            ticket.tried += (ticket.slot,)

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Note the first content byte: the prefill is paid. Later calls change nothing."""
        if ticket.finished:
            raise _finished(ticket)
        row = self._fleet.by_slot.get(ticket.slot)
        if row is None or ticket.first_token_at is not None or ticket.id not in row.live:
            return
        ticket.first_token_at = now
        if row.prefilled(ticket) and ticket.query.stream:
            learn_prefill(row, ticket, now)
        if not row.breaker.calm:
            self._bump(row.breaker.succeeded(ticket.dispatched_at))

    def finish(self, ticket: Ticket, finish: Finish, now: float) -> None:
        """End a ticket: everything it holds is given back, and what it showed is learnt.

        Raises:
            LedgerError: it was finished before.
        """
        if ticket.finished:
            raise _finished(ticket)
        ticket.finished = True
        row = self._fleet.by_slot.get(ticket.slot)
        if row is not None and row.release(ticket):
            if finish.outcome is not _OK or not row.breaker.calm:
                self._bump(row.breaker.judge(ticket, finish.outcome, now))
            if finish.prefilled or ticket.first_token_at is not None:
                if ticket.query.prefills:
                    self._learn(row, ticket, finish, now)
                row.jitter = self._rng.random() * JITTER_S
                if row.retired:
                    self._fleet.settle(row)
            else:
                self._undo(row, ticket, now)
        if ticket.reserved_tokens:
            self._classes.settle(ticket, finish, now)
        ticket.visit = None
        ticket.trail = ()

    def sweep(self) -> bool:
        """Give back a slice of what the index no longer needs; True = call again soon.

        Takes a millisecond at the most. Call it off the request's path, a few times a second.
        """
        fleet = self._fleet
        return fleet.trie.sweep() or fleet.exactness.sweep()

    def follow(self, backend: str, spec: EventSpec) -> Feed | None:
        """Return the feed that makes the index of a backend exact; None = no such backend.

        The same one as before for the same backend and `spec`; every call counts, also after `apply`.
        """
        row = self._fleet.by_name.get(backend)
        return None if row is None else self._fleet.exactness.follow(row, spec)

    def unfollow(self, backend: str) -> None:
        """Go back to what was sent to a backend; nothing when it is not followed."""
        row = self._fleet.by_name.get(backend)
        if row is not None:
            self._fleet.exactness.leave(row)

    def grow(self, ticket: Ticket, hashes: "array[int]", now: float) -> None:
        """Note that the backend of a finished ticket holds its prompt and the answer after it.

        `hashes` is the chain of both, as the next turn will send them (`core/answer.py`).
        """
        row = self._fleet.by_slot.get(ticket.slot)
        if row is None or row.retired or row.name != ticket.backend:
            return
        trie = self._fleet.trie
        trie.insert(row.slot, hashes, now)
        trie.settle(row.slot)
        row.oldest_use = trie.oldest_use(row.slot, row.full_blocks)

    def forget_prefixes(self, model: str) -> None:
        """Forget what a model's backends hold: its prompts are chained in another way now."""
        pool = self._fleet.pools.get(model)
        for row in [] if pool is None else pool.rows:
            self._fleet.trie.drop(row.slot)
            row.oldest_use = None

    # -- what the backends report -----------------------------------------------------------

    def observe(self, backend: str, snapshot: Snapshot, now: float) -> None:
        """Take in one scrape; one that is stale, older than the last, or of nobody is ignored."""
        row = self._fleet.by_name.get(backend)
        if row is None or now - snapshot.at >= self._fleet.settings.stale_after_s:
            return
        if row.snapshot is None or snapshot.at >= row.snapshot.at:
            self._fleet.observe(row, snapshot)
            row.fresh_until = STALE

    def set_up(self, backend: str, up: bool, now: float) -> None:  # noqa: ARG002 - every call takes now
        """Note whether the backend answers its health checks. Unknown names are ignored."""
        row = self._fleet.by_name.get(backend)
        if row is not None:
            self._fleet.set_up(row, up=up)

    def drain(self, backend: str, now: float = 0.0) -> bool:  # noqa: ARG002 - the queue needs it
        """Send nothing new to the backend; False = no such backend."""
        return self._fleet.drain(backend, draining=True)

    def undrain(self, backend: str, now: float = 0.0) -> bool:  # noqa: ARG002
        """Let the backend be chosen again; False = no such backend."""
        return self._fleet.drain(backend, draining=False)

    # -- inside: entering -------------------------------------------------------------------

    def _reserve(
        self, query: Query, books: ClassBooks, tokens: float, now: float
    ) -> tuple[Reservable, ...] | Refusal:
        """Take `tokens` from all that limits the request, or from none."""
        key = self._keys.get(query.key)
        bucket = books.bucket
        limits: list[tuple[Reservable | None, RefusalKind, str]] = [
            (bucket, RefusalKind.RATE, f"class `{books.spec.name}`")
        ]
        if key is not None:
            name = f"key `{query.key}`"
            limits.append((key.quota, RefusalKind.QUOTA, name))
            limits.append((key.tokens, RefusalKind.RATE, name))
        taken: list[Reservable] = []
        for limit, kind, detail in limits:
            if limit is None:
                continue
            if limit.reserve(tokens, now):
                for other in taken:
                    other.settle(tokens, 0.0, now)
                wait = max(one.wait_s(tokens, now) for one, _, _ in limits if one is not None)
                return Refusal(kind, clamp_retry_after(wait), detail)
            taken.append(limit)
        return tuple(taken)

    def _nobody(
        self,
        pool: Pool,  # noqa: ARG002 - for those that let a request wait
        query: Query,
        books: ClassBooks,
        now: float,  # noqa: ARG002
    ) -> Ticket | Refusal:
        """Answer a request that no backend is eligible for."""
        books.rejected += 1
        return Refusal(RefusalKind.NO_BACKEND, NO_BACKEND_RETRY_S, query.model)

    def _decided(self, ticket: Ticket, pool: Pool, hit_tokens: int) -> None:
        """Keep what the decision just made saw and teaches."""
        chooser = self._chooser
        query = ticket.query
        ticket.trail = explain.trail_of(chooser.rows)
        if query.prefills:
            pool.cursor += 1
            pool.note_hit(hit_tokens, query.chain.tokens)
            pool.hot.note(chooser.known, chooser.where, float(query.chain.tokens))

    def _enter(
        self,
        ticket: Ticket,
        row: Account,
        pool: Pool,  # noqa: ARG002
        books: ClassBooks,
        now: float,
    ) -> Ticket | Refusal:
        """Take an assigned ticket in: here at once."""
        books.admitted += 1
        self._place(ticket, row, now)
        return ticket

    def _place(self, ticket: Ticket, row: Account, now: float) -> None:
        """Enter `ticket` on `row`'s books and index."""
        query = ticket.query
        chain = query.chain
        row.place(ticket, now)
        if not row.breaker.calm:
            self._bump(row.breaker.sent(ticket.id, now))
        if not query.prefills:
            return
        hashes = chain.hashes
        if hashes:
            fleet = self._fleet
            size, known = chain.tokens_per_block, row.tokens_per_block
            if not _LEAST_SAME * known < size < _MOST_SAME * known:
                fleet.note_block_size(row, size)
            if row.hit_tokens > SLACK_TOKENS:
                ticket.last_use = fleet.trie.last_use(row.slot, hashes, row.depth)
            ticket.visit = fleet.trie.insert(row.slot, hashes, now)
            row.oldest_use = fleet.trie.oldest_use(row.slot, row.full_blocks)
        expect(row, ticket, now)
        if not query.stream:
            self._silent.add(row, ticket, now)

    # -- inside: ending and learning --------------------------------------------------------

    def _placed(self, ticket: Ticket) -> Account | None:
        """Return the account the ticket is on; None after a `reassign` that found nobody."""
        row = self._fleet.by_slot.get(ticket.slot)
        return row if row is not None and ticket.id in row.live else None

    def _undo(self, row: Account, ticket: Ticket, now: float) -> None:
        """Take back what a released ticket that never ran made us believe."""
        row.forget_rate(ticket, now)
        if ticket.query.prefills:
            spoil(row, ticket)
        if ticket.visit is not None and not row.retired:
            hashes = ticket.query.chain.hashes
            self._fleet.trie.trim(row.slot, hashes, ticket.known_blocks, ticket.visit)
            row.oldest_use = self._fleet.trie.oldest_use(row.slot, row.full_blocks)
        ticket.visit = None
        self._bump(row.breaker.withdrawn(ticket.id, now))
        row.jitter = self._rng.random() * JITTER_S
        self._fleet.settle(row)

    def _learn(self, row: Account, ticket: Ticket, finish: Finish, now: float) -> None:
        query = ticket.query
        usage = finish.usage
        if not row.retired:
            self._fleet.learn(row, ticket, usage.cached_tokens, now)
            cached = ticket.hit_tokens if usage.cached_tokens is None else usage.cached_tokens
            if cached:
                row.saved_s += row.engine.prefill_s(cached, cached)
        pool = self._fleet.pools.get(query.model)
        if finish.outcome is not _OK or pool is None:
            return
        tokens = finish.chunks if usage.completion_tokens is None else usage.completion_tokens
        if tokens:
            self._outputs.learn(query.model, query.cls, tokens)
        if query.stream:
            rho = min(row.constants.max_congestion, row.congestion(now))
            learn_tpot(row, ticket, finish, 1.0 / (1.0 - rho))
        pool.since_calibration += 1
        if pool.since_calibration >= _CALIBRATE_EVERY:
            pool.since_calibration = 0
            pool.calibrate(self._rng)

    def _bump(self, changed: bool) -> None:
        if changed:
            self._fleet.epoch += 1


def _finished(ticket: Ticket) -> LedgerError:
    return LedgerError(f"ticket {ticket.id} is finished")
