"""A refusal is true: who comes back after the time it told is served. On virtual time, in the core."""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from random import Random

import pytest

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import (
    BucketSpec,
    ClassSpec,
    CoreSettings,
    EngineProfile,
    KeySpec,
    QueueSpec,
)
from gateway.core.types import (
    Finish,
    Outcome,
    Query,
    Refusal,
    RefusalKind,
    Snapshot,
    Ticket,
    Usage,
)
from tests.core_kit import chain, settings

LIMITED = ClassSpec("chat", default=True, bucket=BucketSpec(100.0, 5_000.0))


def asked(name: str, tokens: int = 1_000, key: str | None = None, cls: str = "chat") -> Query:
    return Query("m", cls, chain((name, tokens)), 100, key=key)


def core(made: CoreSettings) -> QueuedDispatcher:
    return QueuedDispatcher(made, Random(1), 0.0)


def until_refused(books: QueuedDispatcher, query: Callable[[int], Query]) -> tuple[Query, Refusal]:
    for number in range(1000):
        one = query(number)
        answer = books.admit(one, 0.0)
        if isinstance(answer, Refusal):
            return one, answer
    raise AssertionError("nobody was refused")


KEYS = [
    KeySpec("k", requests_per_minute=3),
    KeySpec("k", tokens_per_minute=4_000),
    KeySpec("k", requests_per_minute=3, tokens_per_minute=3_400),
    KeySpec("k", requests_per_minute=3, tokens_per_minute=60_000),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("cls", [LIMITED, ClassSpec("chat", default=True)])
def test_after_the_told_time_the_limits_of_key_and_class_let_the_same_request_pass(
    key: KeySpec, cls: ClassSpec
) -> None:
    books = core(replace(settings(4, classes=(cls,)), keys=(key,)))
    query, refusal = until_refused(books, lambda number: asked(f"p{number}", key="k"))
    assert refusal.kind is RefusalKind.RATE
    assert 0 < refusal.retry_after_s < 60

    assert isinstance(books.admit(query, refusal.retry_after_s * 0.9), Refusal)
    assert isinstance(books.admit(query, refusal.retry_after_s), Ticket)


def test_d51_a_huge_prompt_is_reserved_before_it_runs_and_leaves_a_debt() -> None:
    books = core(settings(4, classes=(LIMITED,)))
    huge = books.admit(asked("huge", 9_000), 0.0)
    assert isinstance(huge, Ticket)  # the bucket was full: never refused for ever
    assert isinstance(books.admit(asked("next", 100), 0.0), Refusal)
    assert (books.classes(0.0)[0].bucket_tokens or 0.0) < -3_500


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("finish", "used"),
    [
        (Finish(Outcome.OK, True, Usage(1_000, 50, 0)), 1_050),
        (Finish(Outcome.OK, True, Usage(1_000, 50, 800)), 250),  # what was cached is not charged
        (Finish(Outcome.OK, True, Usage(), 40), 1_000 + 40),  # no usage: our count, and the chunks
        (Finish(Outcome.CLIENT_CLOSED, True, Usage(), 7), 1_007),
        (Finish(Outcome.CLIENT_CLOSED, False), 1_000),  # left early: the prefill ran all the same
        (Finish(Outcome.CLIENT_CLOSED, False, sent=False), 0),
        (Finish(Outcome.UPSTREAM_ERROR, False), 0),
    ],
)
def test_d51_prompt_and_answer_are_counted_whatever_the_end(
    finish: Finish, used: int, *, stream: bool
) -> None:
    books = core(settings(1, classes=(LIMITED,)))
    query = Query("m", "chat", chain(("p", 1_000)), 100, stream=stream)
    ticket = books.admit(query, 0.0)
    assert isinstance(ticket, Ticket)
    books.finish(ticket, finish, 0.0)
    prompt = query.chain.tokens
    expected = used if used < 1_000 or finish.usage.prompt_tokens else used - 1_000 + prompt
    left = books.classes(0.0)[0].bucket_tokens
    assert left == pytest.approx(5_000 - expected, abs=1)


class Engines:
    """Backends that prefill one after the other at the modelled speed, and answer for a while."""

    def __init__(self, books: QueuedDispatcher, answer_s: float) -> None:
        self.books = books
        self.answer_s = answer_s
        self.now = 0.0
        self._free: dict[str, float] = {}
        self._events: list[tuple[float, int, str, Ticket]] = []
        self._count = 0

    def start(self, ticket: Ticket) -> None:
        first = max(self.now, self._free.get(ticket.backend, 0.0)) + ticket.prefill_s
        self._free[ticket.backend] = first
        self._push(first, "first", ticket)
        self._push(first + self.answer_s, "end", ticket)

    def until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self.now, _, kind, ticket = heappop(self._events)
            if kind == "first":
                self.books.first_token(ticket, self.now)
            else:
                usage = Usage(ticket.query.chain.tokens, 100, 0)
                self.books.finish(ticket, Finish(Outcome.OK, True, usage), self.now)
            for started in self.books.take_started():
                self.start(started)
        self.now = now

    def _push(self, at: float, kind: str, ticket: Ticket) -> None:
        self._count += 1
        heappush(self._events, (at, self._count, kind, ticket))


ROOM = 30
WAITING = (ClassSpec("chat", default=True, max_waiting=ROOM, max_wait_s=600.0),)


@pytest.mark.parametrize(
    ("profile", "answer_s"),
    [
        (EngineProfile(), 1.0),  # prefill is what they wait for
        (EngineProfile(kv_tokens=20_000), 1.0),  # memory is
        (EngineProfile(max_sequences=3), 0.5),  # sequences are
    ],
)
@pytest.mark.parametrize("arrived_s", [0.0, 8.0])
def test_after_the_told_time_a_full_queue_has_a_place(
    profile: EngineProfile, answer_s: float, arrived_s: float
) -> None:
    made = settings(2, classes=WAITING, profile=profile)
    books = core(replace(made, queue=QueueSpec()))
    engines = Engines(books, answer_s)
    refused, number = None, 0
    while refused is None or engines.now < arrived_s:
        number += 1
        query = asked(f"p{number}", 3_000)
        answer = books.admit(query, engines.now)
        if isinstance(answer, Refusal):
            refused = query, answer
            engines.until(engines.now + 0.1)
        elif not answer.held:
            engines.start(answer)
    query, refusal = refused
    assert refusal.kind is RefusalKind.FULL
    engines.until(engines.now + refusal.retry_after_s)
    assert isinstance(books.admit(query, engines.now), Ticket)


def test_with_no_backend_up_nobody_is_told_to_come_back_at_once() -> None:
    books = core(replace(settings(2, classes=WAITING), queue=QueueSpec()))
    for name in ("b0", "b1"):
        books.set_up(name, up=False, now=0.0)
    tickets = [books.admit(asked(f"p{number}"), 0.0) for number in range(ROOM)]
    full = books.admit(asked("full"), 0.0)
    assert isinstance(full, Refusal)
    assert full.retry_after_s == 1.0
    (over, *_) = tickets
    assert isinstance(over, Ticket)
    assert books.refusal_of(over, 0.0).retry_after_s == 1.0


def test_r38_a_hundred_freed_places_are_refilled_in_the_same_call_each() -> None:
    """Nothing ticks: what an end frees is let go before the call returns."""
    profile = EngineProfile(max_sequences=100)
    classes = (ClassSpec("chat", default=True, max_wait_s=60.0),)
    made = replace(settings(1, classes=classes, profile=profile), queue=QueueSpec(owed_s=60.0))
    books = core(replace(made, stale_after_s=60.0))
    books.observe("b0", Snapshot(0.0, running=100, waiting=1), 0.0)  # it takes no more than that
    tickets = [books.admit(asked(f"p{number}", 64), 0.0) for number in range(250)]
    running = [t for t in tickets if isinstance(t, Ticket) and not t.held]
    assert len(running) == 100

    woken: list[float] = []
    books.wake = lambda: woken.append(1.0)
    for count, ticket in enumerate(running, 1):
        books.first_token(ticket, 1.0)
        books.finish(ticket, Finish(Outcome.OK, True, Usage(64, 5, 0)), 1.0)
        assert len(books._queue.started) == count
    assert len(books.take_started()) == 100
    assert woken
