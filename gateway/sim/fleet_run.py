"""A simulated fleet behind the live core: the facade is called as the gateway calls it.

Discrete events on virtual time. The core is the one that serves (`core.dispatcher`), learning on;
engines are `fast_engine`; snapshots come as late and as seldom as asked. What a decision knows is
what a gateway would know: nothing of an engine's inside passes but by first tokens, ends, usage and
snapshots. Never text, sockets or a clock.
"""

from dataclasses import replace
from math import inf
from random import Random

from gateway.core.classify import Features
from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import BackendSpec, CoreSettings
from gateway.core.types import Chain, Finish, Outcome, Query, Refusal, Snapshot, Ticket, Usage
from gateway.sim.engine import EngineFull
from gateway.sim.fast_batch import FastJob
from gateway.sim.fast_engine import FastEngine
from gateway.sim.faults_at import Fault, Happening
from gateway.sim.fleet_spec import (
    MODEL,
    FleetSpec,
    Flight,
    Replica,
    core_settings,
    grown,
    snapshot_of,
)
from gateway.sim.report import Record, Result
from gateway.sim.traffic import BLOCK_TOKENS, Dialogue, Workload, blocks_in
from gateway.sim.virtual import Agenda

__all__ = ["FleetRun", "FleetSpec", "core_settings"]

PATH = "/v1/chat/completions"
MAX_ATTEMPTS = 2  # as the gateway's default


class FleetRun:
    """One workload through one configuration. `records` has every request that was sent."""

    def __init__(
        self, workload: Workload, fleet: FleetSpec, settings: CoreSettings, *, seed: int = 1
    ) -> None:
        self.core = QueuedDispatcher(settings, Random(seed), 0.0)  # noqa: S311 - spreads ties
        self.core.wake = self._wake
        self._parked: dict[int, Flight] = {}
        self._woken = False
        self._limit_at = inf
        self.records: list[Record] = []
        self.replicas: dict[str, Replica] = {}
        self._workload = workload
        self._fleet = fleet
        self._settings = settings
        self._agenda = Agenda()
        self._open = 0  # requests in flight or to come
        self._misses_left = inf
        self._next = 0
        for name in settings.models[0].backends:
            self._add(name)

    def run(self, *, most_missed: int | None = None) -> list[Record]:
        """Send everything, let every answer end; return the records in order of their ends.

        Ends early when more than `most_missed` requests that count have missed their targets.
        """
        self._misses_left = inf if most_missed is None else most_missed
        agenda = self._agenda
        self._schedule_next()
        if self._fleet.poll_s:
            for number, name in enumerate(self.replicas):
                agenda.at(self._fleet.poll_s * number / len(self.replicas), self._poll, name)
        for fault in self._fleet.faults:
            agenda.at(fault.at_s, self._happen, fault)
        agenda.run(self._going)
        return self.records

    def _going(self) -> bool:
        return self._open > 0 and self._misses_left >= 0

    # -- requests -----------------------------------------------------------------------------

    def _schedule_next(self) -> None:
        """Enter the next dialogue; the agenda has one that has not begun at a time."""
        dialogues = self._workload.dialogues
        if self._next < len(dialogues):
            dialogue = dialogues[self._next]
            self._next += 1
            self._open += 1
            self._agenda.at(dialogue.start_s, self._begin, dialogue)

    def _begin(self, now: float, dialogue: Dialogue) -> None:
        self._schedule_next()
        self._send(now, Flight(dialogue, 0, now))

    def _send(self, now: float, flight: Flight) -> None:
        """Do with one request what the gateway does: classify, admit, pass on."""
        dialogue = flight.dialogue
        ask = dialogue.asks[flight.index]
        core = self.core
        tokens = ask.prompt_tokens
        flight.sent_at = now
        features = Features(PATH, False, tokens, "", None, MODEL, dialogue.cls)
        cls, rule = core.classify(features)
        chain = Chain(dialogue.hashes[: blocks_in(tokens)], float(BLOCK_TOKENS), tokens, True)
        output = core.expected_output(MODEL, cls, None)
        admitted = core.admit(Query(MODEL, cls, chain, output, None, rule), now)
        if isinstance(admitted, Refusal):
            self._end(flight, cls, Result.REFUSED, now)
            return
        flight.ticket = admitted
        if admitted.held:
            self._parked[admitted.id] = flight
            self._watch_limits()
        else:
            self._attempt(flight, admitted, now)

    # -- the queue ------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._agenda.at(self._agenda.now, self._release)

    def _release(self, now: float, _: object) -> None:
        """Pass on what the core let go of."""
        self._woken = False
        for ticket in self.core.take_started():
            flight = self._parked.pop(ticket.id, None)
            if flight is not None:
                self._attempt(flight, ticket, now)

    def _watch_limits(self) -> None:
        due = self.core.next_due
        if due < self._limit_at:
            self._limit_at = due
            self._agenda.at(due, self._expire)

    def _expire(self, now: float, _: object) -> None:
        """Refuse what has waited as long as it may."""
        self._limit_at = inf
        for ticket in self.core.due(now):
            flight = self._parked.pop(ticket.id)
            self.core.finish(ticket, Finish(Outcome.EXPIRED, False, sent=False), now)
            self._end(flight, ticket.query.cls, Result.REFUSED, now)
        self._watch_limits()

    def _attempt(self, flight: Flight, ticket: Ticket, now: float) -> None:
        """Pass a request on to its backend, and to another one while that does not take it."""
        ask = flight.dialogue.asks[flight.index]
        while True:
            replica = self.replicas[ticket.backend]
            if replica.alive:
                job = FastJob(ask.prompt_tokens, ask.output_tokens, flight.dialogue.hashes, flight)
                flight.job = job
                flight.replica = replica
                try:
                    replica.engine.submit(job, now)
                except (EngineFull, ValueError):
                    self._fail(flight, ticket, Outcome.UPSTREAM_5XX, now)
                self._watch(replica)
                return
            self.core.attempt_failed(ticket, now)
            if ticket.attempts >= MAX_ATTEMPTS or not self.core.reassign(ticket, now):
                self._fail(flight, ticket, Outcome.UPSTREAM_ERROR, now)
                return

    def _first(self, job: FastJob, at: float) -> None:
        flight = job.owner
        assert isinstance(flight, Flight)
        assert flight.ticket is not None
        self.core.first_token(flight.ticket, at)

    def _finished(self, job: FastJob, at: float) -> None:
        flight = job.owner
        assert isinstance(flight, Flight)
        ticket = flight.ticket
        assert ticket is not None
        usage = Usage(job.prompt_tokens, job.output_tokens, job.cached_tokens)
        self.core.finish(ticket, Finish(Outcome.OK, True, usage, job.output_tokens, at), at)
        hashes = grown(job) if self._fleet.answers_known else None
        if hashes is not None:
            self.core.grow(ticket, hashes, at)
        self._end(flight, ticket.query.cls, Result.OK, at)

    def _fail(self, flight: Flight, ticket: Ticket, outcome: Outcome, now: float) -> None:
        began = ticket.first_token_at is not None
        self.core.finish(ticket, Finish(outcome, began, Usage(), 0, None), now)
        self._end(flight, ticket.query.cls, Result.FAILED, now)

    def _end(self, flight: Flight, cls: str, result: Result, now: float) -> None:
        """Record a request, and let its client think about the next."""
        dialogue = flight.dialogue
        ask = dialogue.asks[flight.index]
        record = Record(cls, flight.sent_at, result)
        ticket, job = flight.ticket, flight.job
        if result is Result.OK and job is not None and ticket is not None:
            first = job.first_token_at
            assert first is not None
            record.ttft_s = first - flight.sent_at
            if ask.output_tokens > 1:
                record.tpot_s = (now - first) / (ask.output_tokens - 1)
            record.total_s = now - flight.sent_at
            record.prompt_tokens = ask.prompt_tokens
            record.cached_tokens = job.cached_tokens
            record.completion_tokens = ask.output_tokens
            record.backend = ticket.backend
        self.records.append(record)
        workload = self._workload
        if record.sent_at >= workload.warm_s and not record.within(workload.slos[cls]):
            self._misses_left -= 1
        following = flight.index + 1
        if following < len(dialogue.asks):
            when = now + dialogue.asks[following].think_s
            if when < workload.seconds:
                self._agenda.at(when, self._send, Flight(dialogue, following, when))
                return
        self._open -= 1

    # -- engines --------------------------------------------------------------------------------

    def _add(self, name: str) -> Replica:
        engine = FastEngine(self._fleet.profile, self._first, self._finished)
        self.replicas[name] = replica = Replica(name, engine)
        return replica

    def _watch(self, replica: Replica) -> None:
        """See that the agenda has the engine's next change."""
        due = replica.engine.due
        if due < replica.wanted:
            replica.wanted = due
            self._agenda.at(due, self._advance, replica)

    def _advance(self, now: float, replica: Replica) -> None:
        if now >= replica.wanted:
            replica.wanted = inf
        engine = replica.engine
        if engine.due <= now:
            engine.run(now)
        due = engine.due  # as _watch, inlined: half of all events
        if due < replica.wanted:
            replica.wanted = due
            self._agenda.at(due, self._advance, replica)

    # -- what the gateway hears of them ---------------------------------------------------------

    def _poll(self, now: float, name: str) -> None:
        replica = self.replicas[name]
        if replica.alive:
            replica.engine.settle(now)
            self._watch(replica)
            seen = snapshot_of(replica, now)
            if self._fleet.age_s:
                self._agenda.at(now + self._fleet.age_s, self._heard, (name, seen))
            else:
                self.core.observe(name, seen, now)
        self._agenda.at(now + self._fleet.poll_s, self._poll, name)

    def _heard(self, now: float, news: tuple[str, Snapshot]) -> None:
        self.core.observe(news[0], news[1], now)

    def _told(self, now: float, news: tuple[str, bool]) -> None:
        self.core.set_up(news[0], news[1], now)

    # -- faults ---------------------------------------------------------------------------------

    def _happen(self, now: float, fault: Fault) -> None:
        name = f"b{fault.replica}"
        if fault.what is Happening.JOINS:
            self._join(name, now)
            return
        replica = self.replicas[name]
        if fault.what is Happening.SLOWS:
            replica.engine.slow = fault.factor
        else:
            self._die(replica, now)
        if fault.what is Happening.RESTARTS:
            self._agenda.at(now + fault.down_s, self._return, replica)

    def _die(self, replica: Replica, now: float) -> None:
        replica.alive = False
        lost = replica.engine.kill()
        self._agenda.at(now + self._fleet.probe_s, self._told, (replica.name, False))
        for job in lost:
            flight = job.owner
            assert isinstance(flight, Flight)
            ticket = flight.ticket
            assert ticket is not None
            if ticket.first_token_at is not None:
                self._fail(flight, ticket, Outcome.UPSTREAM_TRUNCATED, now)
            else:
                self._retry(flight, ticket, now)

    def _retry(self, flight: Flight, ticket: Ticket, now: float) -> None:
        self.core.attempt_failed(ticket, now)
        if ticket.attempts < MAX_ATTEMPTS and self.core.reassign(ticket, now):
            self._attempt(flight, ticket, now)
        else:
            self._fail(flight, ticket, Outcome.UPSTREAM_ERROR, now)

    def _return(self, now: float, replica: Replica) -> None:
        replica.alive = True
        replica.started_at = now
        self._agenda.at(now + self._fleet.probe_s, self._told, (replica.name, True))

    def _join(self, name: str, now: float) -> None:
        """Add one backend to the fleet and to the gateway's configuration."""
        self._add(name)
        old = self._settings
        model = old.models[0]
        self._settings = replace(
            old,
            models=(replace(model, backends=(*model.backends, name)),),
            backends=(*old.backends, BackendSpec(name)),
        )
        self.core.apply(self._settings, now)
        if self._fleet.poll_s:
            self._poll(now, name)
