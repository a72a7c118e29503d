"""Whatever happens to requests, in any order.

Books and gauges end at zero, and no ineligible backend is ever chosen.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings as tuned
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gateway.core.breaker import State
from gateway.core.dispatcher import Dispatcher
from gateway.core.ledger import Account
from gateway.core.policies import POLICIES
from gateway.core.settings import BucketSpec, ClassSpec, CoreSettings
from gateway.core.types import (
    BackendId,
    Finish,
    Outcome,
    Query,
    RefusalKind,
    Snapshot,
    Ticket,
    Usage,
)
from tests.core_kit import chain, settings

NAMES = ("b0", "b1", "b2", "b3", "b4")
CLASSES = (
    ClassSpec("coding", bucket=BucketSpec(2000.0, 60_000.0)),
    ClassSpec("chat", default=True),
)

small = st.integers(0, 3)
counts = st.none() | st.integers(0, 20_000)
usages = st.builds(Usage, counts, counts, counts)
prompts = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from((0, 64, 640, 6400))), max_size=3
)


def configured(names: list[str], policy: str) -> CoreSettings:
    return settings(names, policy=policy, classes=CLASSES)


class Life(RuleBasedStateMachine):
    """Random lives of requests against a changing fleet."""

    core: Dispatcher
    now: float
    live: list[Ticket]

    @initialize(seed=st.integers(0, 1000), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, seed: int, policy: str) -> None:
        self.names = list(NAMES[:3])
        self.core = Dispatcher(configured(self.names, policy), Random(seed), 0.0)
        self.now = 0.0
        self.live = []

    def _rows(self) -> list[Account]:
        return list(self.core._fleet.by_slot.values())

    def _may_get_traffic(self, tried: list[BackendId]) -> set[str]:
        """Names a decision may choose, worked out afresh from first principles."""
        fleet = self.core._fleet
        usable = [
            row
            for row in (fleet.by_name[name] for name in fleet.pools["m"].spec.backends)
            if row.up and not row.draining
        ]

        def closed(row: Account) -> bool:
            breaker = row.breaker
            waited = breaker.state is State.OPEN and self.now >= breaker.retry_at
            return breaker.state is State.CLOSED or waited

        chosen = [row for row in usable if closed(row)] or usable
        return {row.name for row in chosen if row.slot not in tried}

    @rule(
        parts=prompts,
        cls=st.sampled_from(("coding", "chat", "gone")),
        stream=st.booleans(),
        prefills=st.booleans(),
    )
    def admit(
        self, parts: list[tuple[str, int]], cls: str, *, stream: bool, prefills: bool
    ) -> None:
        allowed = self._may_get_traffic([])
        asked = Query("m", cls, chain(*parts, tail=7), 50, stream=stream, prefills=prefills)
        answer = self.core.admit(asked, self.now)
        if isinstance(answer, Ticket):
            assert answer.backend in allowed
            self.live.append(answer)
        else:
            assert 0 < answer.retry_after_s <= 60
            assert (answer.kind is RefusalKind.NO_BACKEND) is (not allowed)

    @rule(parts=prompts)
    def explain(self, parts: list[tuple[str, int]]) -> None:
        allowed = self._may_get_traffic([])
        told = self.core.explain(Query("m", "chat", chain(*parts), 50), self.now)
        assert (told.winner in allowed) if allowed else told.winner is None

    @precondition(lambda self: self.live)
    @rule(which=small, failed=st.booleans())
    def reassign(self, which: int, *, failed: bool) -> None:
        ticket = self.live[which % len(self.live)]
        if ticket.first_token_at is not None:
            return
        if failed:
            self.core.attempt_failed(ticket, self.now)
        tried = [*ticket.tried, ticket.slot]
        allowed = self._may_get_traffic(tried) if "m" in self.core._fleet.pools else set()
        if self.core.reassign(ticket, self.now):
            assert ticket.slot not in tried
            assert ticket.backend in allowed

    @precondition(lambda self: self.live)
    @rule(which=small)
    def first_token(self, which: int) -> None:
        self.core.first_token(self.live[which % len(self.live)], self.now)

    @precondition(lambda self: self.live)
    @rule(
        which=small,
        outcome=st.sampled_from(Outcome),
        prefilled=st.booleans(),
        usage=usages,
        chunks=st.integers(0, 500),
    )
    def finish(
        self, which: int, outcome: Outcome, *, prefilled: bool, usage: Usage, chunks: int
    ) -> None:
        ticket = self.live.pop(which % len(self.live))
        self.core.finish(ticket, Finish(outcome, prefilled, usage, chunks, self.now), self.now)

    @rule(
        name=st.sampled_from(NAMES),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        kv=st.none() | st.floats(0, 1),
        capacity=st.sampled_from((None, 640, 64_000)),
        start=st.sampled_from((None, 1.0, 500.0)),
        age=st.sampled_from((0.0, 0.5, 5.0)),
    )
    def observe(  # noqa: PLR0917 - a scrape has that many figures
        self,
        name: str,
        running: int,
        waiting: int,
        kv: float | None,
        capacity: int | None,
        start: float | None,
        age: float,
    ) -> None:
        snapshot = Snapshot(
            at=self.now - age,
            running=running,
            waiting=waiting,
            kv_utilization=kv,
            kv_capacity_tokens=capacity,
            start_time=start,
        )
        self.core.observe(name, snapshot, self.now)

    @rule(name=st.sampled_from(NAMES), up=st.booleans())
    def set_up(self, name: str, *, up: bool) -> None:
        self.core.set_up(name, up, self.now)

    @rule(name=st.sampled_from(NAMES), draining=st.booleans())
    def drain(self, name: str, *, draining: bool) -> None:
        (self.core.drain if draining else self.core.undrain)(name)

    @rule(
        names=st.sets(st.sampled_from(NAMES), min_size=1), policy=st.sampled_from(sorted(POLICIES))
    )
    def reload(self, names: set[str], policy: str) -> None:
        self.core.apply(configured(sorted(names), policy), self.now)

    @rule(limited=st.booleans())
    def reload_classes(self, *, limited: bool) -> None:
        classes = CLASSES if limited else (replace(CLASSES[1]),)
        self.core.apply(replace(self.core.settings, classes=classes), self.now)

    @rule(seconds=st.sampled_from((0.0, 0.01, 1.0, 100.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_ever_negative(self) -> None:
        for row in self._rows():
            assert min(row.in_flight, row.unprefilled, row.owed_ns, row.owed_tokens) >= 0
            assert min(row.context_tokens, row.kv_tokens) >= 0
            assert row.rate >= 0.0
            assert row.in_flight == len(row.live)
            assert row.unprefilled == sum(ticket.owes for ticket in row.live.values())

    @invariant()
    def every_live_ticket_is_on_at_most_one_backend(self) -> None:
        on_books = [ident for row in self._rows() for ident in row.live]
        assert len(on_books) == len(set(on_books))
        assert set(on_books) <= {ticket.id for ticket in self.live}

    @invariant()
    def no_bucket_is_above_its_burst(self) -> None:
        for shown in self.core.classes(self.now):
            assert shown.bucket_tokens is None or shown.bucket_tokens <= 60_000.0

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for ticket in self.live:
            self.core.finish(ticket, Finish(Outcome.OK, True), self.now)
        for row in self._rows():
            assert (row.in_flight, row.unprefilled, row.owed_ns, row.owed_tokens) == (0, 0, 0, 0)
            assert (row.context_tokens, row.kv_tokens, row.live, row.pinned) == (0, 0, {}, {})
        assert self.core._classes.reserved() == 0
        assert set(self.core._fleet.by_slot) == {
            row.slot for row in self.core._fleet.by_name.values()
        }
        for shown in self.core.backends(self.now):
            assert (shown.in_flight, shown.owed_prefill_s, shown.context_tokens) == (0, 0.0, 0)


TestLife = Life.TestCase
TestLife.settings = tuned(max_examples=60, stateful_step_count=60, deadline=None)


class Walk:
    """A long random life of a fleet, one weighted step after another."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.rng = Random(policy)
        self.core = Dispatcher(configured(list(NAMES), policy), Random(1), 0.0)
        self.live: list[Ticket] = []
        self.now = 0.0

    def step(self) -> None:
        self.now += self.rng.expovariate(20.0)
        moves = (self.arrive, self.fail, self.answer, self.end, self.turn, self.reload)
        self.rng.choices(moves, (40, 10, 20, 25, 3, 2))[0]()

    def arrive(self) -> None:
        rng = self.rng
        parts = [(rng.choice("abcdef"), 64 * rng.randrange(60)) for _ in range(rng.randrange(4))]
        streams, prefills = rng.random() < 0.8, rng.random() < 0.9
        made = chain(*parts, tail=3)
        asked = Query("m", "chat", made, 50, stream=streams, prefills=prefills)
        answer = self.core.admit(asked, self.now)
        if isinstance(answer, Ticket):
            self.live.append(answer)

    def fail(self) -> None:
        waiting = [ticket for ticket in self.live if ticket.first_token_at is None]
        if waiting:
            ticket = self.rng.choice(waiting)
            self.core.attempt_failed(ticket, self.now)
            self.core.reassign(ticket, self.now)

    def answer(self) -> None:
        if self.live:
            self.core.first_token(self.rng.choice(self.live), self.now)

    def end(self) -> None:
        rng = self.rng
        for _ in range(min(len(self.live), 1 + len(self.live) // 200)):
            ticket = self.live.pop(rng.randrange(len(self.live)))
            usage = Usage(ticket.query.chain.tokens, rng.randrange(80), rng.randrange(2000))
            ended = Finish(rng.choice(list(Outcome)), rng.random() < 0.7, usage, 5, self.now)
            self.core.finish(ticket, ended, self.now)

    def turn(self) -> None:
        self.core.set_up(self.rng.choice(NAMES), self.rng.random() < 0.8, self.now)

    def reload(self) -> None:
        self.core.apply(configured(sorted(self.rng.sample(NAMES, 3)), self.policy), self.now)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_five_thousand_random_steps_end_with_empty_books(policy: str) -> None:
    walk = Walk(policy)
    for _ in range(5000):
        walk.step()
    for ticket in walk.live:
        walk.core.finish(ticket, Finish(Outcome.CLIENT_CLOSED, False), walk.now)
    for row in walk.core._fleet.by_slot.values():
        assert (row.in_flight, row.owed_ns, row.owed_tokens) == (0, 0, 0)
        assert (row.context_tokens, row.kv_tokens, row.pinned) == (0, 0, {})
