"""The deciding core over simulated engines in virtual time, one request after the other or many.

Engines may hold more or less than they claim, lose what they hold, or be replaced. What was
predicted and what was reported is kept per request, in the order of the answers.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, ModelSpec, RoutingSpec
from gateway.core.types import Chain, Finish, Outcome, Query, Snapshot, Ticket, Usage
from gateway.sim.engine import Engine, Job
from gateway.sim.profiles import H100_8B, Profile

BLOCK = 16
POLL_S = 0.25


class Ask(NamedTuple):
    """One request: `prompt` and `answer` are block hashes, chained on in the next turn."""

    prompt: list[int]
    answer: list[int]
    at: float


class Seen(NamedTuple):
    """What one answer showed, in tokens."""

    backend: str
    prompt: int
    predicted: int
    reported: int


@dataclass
class Replica:
    """An engine, and what it says about itself; `claimed` None = it says nothing of its size."""

    engine: Engine
    claimed: int | None
    started_at: float = 0.0


def sized(tokens: int) -> Profile:
    """Return an H100-like profile with room for `tokens`."""
    return replace(H100_8B, engine=replace(H100_8B.engine, kv_tokens=tokens))


def blocks(seed: str, tokens: int) -> list[int]:
    """Return the hashes of a text of `tokens` tokens; equal seeds are equal texts."""
    rng = Random(seed)
    return [rng.getrandbits(64) for _ in range(tokens // BLOCK)]


class Bench:
    """Replicas behind one dispatcher. `told` = answers carry usage with `cached_tokens`."""

    policy = "cost"

    def __init__(self, replicas: Iterable[Replica], *, told: bool = True, seed: int = 1) -> None:
        self.replicas = {f"b{i}": replica for i, replica in enumerate(replicas)}
        names = tuple(self.replicas)
        settings = CoreSettings(
            models=(ModelSpec("m", names),),
            backends=tuple(BackendSpec(name) for name in names),
            classes=(ClassSpec("chat", default=True),),
            routing=RoutingSpec(self.policy),
        )
        self.core = Dispatcher(settings, Random(seed), 0.0)
        self.seen: list[Seen] = []
        self.now = 0.0
        self._told = told
        self._polled = -1.0
        self._asked = 0
        self._live: dict[str, tuple[Ticket, Ask]] = {}
        self._events: list[tuple[float, str]] = []

    def serve(self, asks: Iterable[Ask]) -> None:
        """Send every request at its time (or as soon as time has come that far) and let it end."""
        for ask in asks:
            self.until(ask.at)
            self._send(ask)
        while self._live:
            self.until(self._events[0][0])

    def one_by_one(self, asks: Iterable[tuple[list[int], list[int]]], think_s: float = 1.0) -> None:
        """Send each request when the answer before has ended, `think_s` later."""
        for prompt, answer in asks:
            self.serve([Ask(prompt, answer, self.now + think_s)])
            self.until(self.now + POLL_S)

    def until(self, at: float) -> None:
        """Let time pass."""
        while True:
            scrape = self._polled + POLL_S
            event = self._events[0][0] if self._events else at + 1.0
            due = min(scrape, event)
            if due > at:
                break
            self.now = max(self.now, due)
            if event <= scrape:
                self._collect(heappop(self._events)[1])
            else:
                self._scrape()
        self.now = max(self.now, at)

    def restart(self, name: str) -> None:
        """Put a new process in the place of an idle engine."""
        old = self.replicas[name]
        self.replicas[name] = Replica(Engine(old.engine.profile), old.claimed, self.now)

    def error(self, count: int) -> float:
        """Return how far the sum of the last `count` predictions is off, as a share of the hits."""
        last = self.seen[-count:]
        predicted = sum(seen.predicted for seen in last)
        reported = sum(seen.reported for seen in last)
        return abs(predicted - reported) / max(predicted, reported, 1)

    def _send(self, ask: Ask) -> None:
        self._asked += 1
        ident = str(self._asked)
        tokens = len(ask.prompt) * BLOCK + 5
        chain = Chain(array("Q", ask.prompt), float(BLOCK), tokens, True)
        output = len(ask.answer) * BLOCK or 8
        ticket = self.core.admit(Query("m", "chat", chain, output), self.now)
        assert isinstance(ticket, Ticket)
        self._live[ident] = ticket, ask
        name = ticket.backend
        engine = self.replicas[name].engine
        self._collect(name)
        engine.submit(Job(ident, tokens, output, ask.prompt + ask.answer), self.now)
        self._expect(name)

    def _expect(self, name: str) -> None:
        at = self.replicas[name].engine.next_change_at()
        if at is not None and (at, name) not in self._events:
            heappush(self._events, (at, name))

    def _collect(self, name: str) -> None:
        for progress in self.replicas[name].engine.advance(self.now):
            job = progress.job
            held = self._live.get(job.id)
            if held is None:
                continue  # somebody else's
            ticket, ask = held
            if ticket.first_token_at is None:
                self.core.first_token(ticket, self.now)
            if progress.finished:
                del self._live[job.id]
                self._end(ticket, ask, job)
        self._expect(name)

    def _end(self, ticket: Ticket, ask: Ask, job: Job) -> None:
        self.seen.append(
            Seen(ticket.backend, job.prompt_tokens, ticket.hit_tokens, job.cached_tokens)
        )
        cached = job.cached_tokens if self._told else None
        usage = Usage(job.prompt_tokens, job.output_tokens, cached)
        # as the engine: full blocks only, and the last token's KV is never computed
        full = (job.prompt_tokens + job.output_tokens - 1) // BLOCK
        finish = Finish(Outcome.OK, True, usage, job.output_tokens, self.now)
        self.core.finish(ticket, finish, self.now)
        if ask.answer:
            self.core.grow(ticket, array("Q", (ask.prompt + ask.answer)[:full]), self.now)

    def _scrape(self) -> None:
        self._polled += POLL_S
        for name, replica in self.replicas.items():
            self._collect(name)
            engine = replica.engine
            seen = Snapshot(
                at=self.now,
                running=engine.running,
                waiting=engine.waiting,
                kv_utilization=engine.kv_utilization,
                kv_capacity_tokens=replica.claimed,
                prefix_queries=float(engine.prefix_queries),
                prefix_hits=float(engine.prefix_hits),
                start_time=replica.started_at,
            )
            self.core.observe(name, seen, self.now)


def cycle(
    items: list[list[int]], count: int, tail: Callable[[int], list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield `count` requests that go round `items`, each with a tail of its own."""
    for index in range(count):
        yield items[index % len(items)] + tail(index), []
