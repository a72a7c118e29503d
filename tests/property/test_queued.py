"""Whatever happens to waiting and sent requests, in any order.

Nothing is lost, started twice or left behind; no backend idles while a request it could run waits.
"""

from dataclasses import replace
from random import Random

from hypothesis import settings as tuned
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import BucketSpec, ClassSpec, CoreSettings, EngineProfile, QueueSpec
from gateway.core.types import (
    Finish,
    Outcome,
    Query,
    RefusalKind,
    Snapshot,
    Ticket,
    Usage,
)
from tests.core_kit import chain, settings

NAMES = ("b0", "b1", "b2", "b3")
CLASSES = (
    ClassSpec(
        "coding", bucket=BucketSpec(5000.0, 200_000.0), share=0.5, max_wait_s=30.0, max_waiting=6
    ),
    ClassSpec("chat", default=True, share=0.3, max_wait_s=5.0, max_waiting_bytes=4000),
)
PROFILE = EngineProfile(kv_tokens=40_000, max_sequences=6)

prompts = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from((0, 64, 640, 6400))), max_size=3
)
small = st.integers(0, 3)


def configured(names: list[str], *, enabled: bool = True) -> CoreSettings:
    made = settings(names, classes=CLASSES, profile=PROFILE)
    return replace(made, queue=QueueSpec(enabled=enabled, owed_s=0.05, steal_s=0.02))


class Life(RuleBasedStateMachine):
    """Random lives of requests before a fleet that is too small for them."""

    core: QueuedDispatcher

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.names = list(NAMES[:2])
        self.core = QueuedDispatcher(configured(self.names), Random(seed), 0.0)
        self.now = 0.0
        self.waiting: dict[int, Ticket] = {}
        self.sent: dict[int, Ticket] = {}

    def collect(self) -> None:
        """Do as the shell does after every call: send what was let go."""
        for ticket in self.core.take_started():
            assert not ticket.held
            assert ticket.backend in self.names
            del self.waiting[ticket.id]
            self.sent[ticket.id] = ticket

    @rule(
        parts=prompts,
        cls=st.sampled_from(("coding", "chat")),
        patience=st.none() | st.sampled_from((0.1, 1.0, 10.0)),
        size=st.sampled_from((0, 1500)),
        prefills=st.booleans(),
    )
    def admit(
        self,
        parts: list[tuple[str, int]],
        cls: str,
        patience: float | None,
        size: int,
        *,
        prefills: bool,
    ) -> None:
        asked = Query(
            "m",
            cls,
            chain(*parts, tail=7),
            50,
            body_bytes=size,
            patience_s=patience,
            prefills=prefills,
        )
        room = self.core._queue.room
        before = room.waiting(cls), room.waiting_bytes(cls)
        answer = self.core.admit(asked, self.now)
        if isinstance(answer, Ticket):
            if answer.held or answer.id in {t.id for t in self.core._queue.started}:
                self.waiting[answer.id] = answer
            else:
                self.sent[answer.id] = answer
        else:
            assert 0 < answer.retry_after_s <= 60
            if answer.kind is RefusalKind.FULL:
                spec = next(spec for spec in CLASSES if spec.name == cls)
                assert before[0] == spec.max_waiting or before[1] + size > spec.max_waiting_bytes
        self.collect()

    @rule(count=st.integers(3, 9), cls=st.sampled_from(("coding", "chat")))
    def burst(self, count: int, cls: str) -> None:
        for i in range(count):
            parts = [("abc"[i % 3], 6400)]
            self.admit(parts, cls, patience=None, size=100, prefills=True)

    @precondition(lambda self: self.sent)
    @rule(which=small)
    def first_token(self, which: int) -> None:
        self.core.first_token(list(self.sent.values())[which % len(self.sent)], self.now)
        self.collect()

    @precondition(lambda self: self.sent)
    @rule(which=small, outcome=st.sampled_from(Outcome), prefilled=st.booleans())
    def finish(self, which: int, outcome: Outcome, *, prefilled: bool) -> None:
        ticket = self.sent.pop(list(self.sent)[which % len(self.sent)])
        self.core.finish(ticket, Finish(outcome, prefilled, Usage()), self.now)
        self.collect()

    @precondition(lambda self: self.sent)
    @rule(which=small)
    def reassign(self, which: int) -> None:
        ticket = list(self.sent.values())[which % len(self.sent)]
        if ticket.first_token_at is None:
            self.core.attempt_failed(ticket, self.now)
            self.core.reassign(ticket, self.now)
            self.collect()

    @precondition(lambda self: self.waiting)
    @rule(which=small)
    def withdraw(self, which: int) -> None:
        ticket = self.waiting.pop(list(self.waiting)[which % len(self.waiting)])
        cls = ticket.query.cls
        places = self.core._queue.room.waiting(cls)
        self.core.finish(ticket, Finish(Outcome.CLIENT_CLOSED, False, sent=False), self.now)
        # one that did not fit stood before others: its leaving may let them start
        followed = sum(other.query.cls == cls for other in self.core._queue.started)
        assert self.core._queue.room.waiting(cls) == places - 1 - followed
        self.collect()

    @rule(seconds=st.sampled_from((0.01, 0.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for ticket in self.core.due(self.now):
            del self.waiting[ticket.id]
            patience = ticket.query.patience_s
            spec = next(spec for spec in CLASSES if spec.name == ticket.query.cls)
            limit = spec.max_wait_s if patience is None else min(spec.max_wait_s, patience)
            assert self.now >= ticket.admitted_at + limit
            refusal = self.core.refusal_of(ticket, self.now)
            assert refusal.kind in (RefusalKind.EXPIRED, RefusalKind.NO_BACKEND)
            self.core.finish(ticket, Finish(Outcome.EXPIRED, False, sent=False), self.now)
        self.collect()

    @rule(which=small, up=st.booleans())
    def health(self, which: int, *, up: bool) -> None:
        self.core.set_up(NAMES[which], up, self.now)
        self.collect()

    @rule(which=small, drained=st.booleans())
    def drain(self, which: int, *, drained: bool) -> None:
        if drained:
            self.core.drain(NAMES[which], self.now)
        else:
            self.core.undrain(NAMES[which], self.now)
        self.collect()

    @rule(which=small, running=st.integers(0, 9), utilization=st.floats(0, 1))
    def scrape(self, which: int, running: int, utilization: float) -> None:
        snapshot = Snapshot(at=self.now, running=running, kv_utilization=utilization)
        self.core.observe(NAMES[which], snapshot, self.now)
        self.collect()

    @rule(count=st.integers(1, 4), enabled=st.booleans())
    def reload(self, count: int, *, enabled: bool) -> None:
        self.names = list(NAMES[:count])
        self.core.apply(configured(self.names, enabled=enabled), self.now)
        self.collect()

    @invariant()
    def the_room_holds_exactly_what_waits(self) -> None:
        room = self.core._queue.room
        assert len(room) == len(self.waiting)
        assert all(ticket.held for ticket in self.waiting.values())
        for cls in ("coding", "chat"):
            mine = [t for t in self.waiting.values() if t.query.cls == cls]
            assert room.waiting(cls) == len(mine)
            assert room.waiting_bytes(cls) == sum(t.query.body_bytes for t in mine)

    @invariant()
    def no_backend_idles_before_its_line(self) -> None:
        queue = self.core._queue
        for row in self.core._fleet.by_name.values():
            if row.up and not row.draining and not row.in_flight and not row.other_in_flight:
                assert row.slot not in queue.room.lines

    @invariant()
    def lines_know_their_seconds(self) -> None:
        for line in self.core._queue.room.lines.values():
            expected = sum(int(held.pf_s * 1e9) for held in line.all())
            assert line._ns == expected

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.waiting:
            _, ticket = self.waiting.popitem()
            self.core.finish(ticket, Finish(Outcome.CLIENT_CLOSED, False, sent=False), self.now)
            self.collect()
        for ticket in self.sent.values():
            self.core.finish(ticket, Finish(Outcome.OK, True), self.now)
        queue = self.core._queue
        assert len(queue.room) == 0
        assert not queue.room.lines
        assert not queue._kv._used
        assert not self.core._classes.reserved()
        assert all(not row.in_flight for row in self.core._fleet.by_slot.values())


TestLife = Life.TestCase
TestLife.settings = tuned(max_examples=60, stateful_step_count=40, deadline=None)
