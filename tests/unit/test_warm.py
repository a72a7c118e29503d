from dataclasses import replace
from random import Random

import pytest

from gateway.core import warm
from gateway.core.dispatcher import Dispatcher
from gateway.core.policies import POLICIES
from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import ClassSpec, QueueSpec
from gateway.core.types import Outcome, Snapshot, Ticket
from tests.core_kit import account, admit, dispatcher, done, query, settings

RAMP_S = 10.0


def busy(core: Dispatcher, count: int, now: float, *, start: int = 0) -> list[Ticket]:
    """Requests that decode and stay."""
    tickets = []
    for i in range(start, start + count):
        ticket = admit(core, query((f"prompt{i}", 640)), now)
        core.first_token(ticket, now)
        tickets.append(ticket)
    return tickets


def in_flight(core: Dispatcher, name: str, now: float) -> int:
    return next(b.in_flight for b in core.backends(now) if b.name == name)


def warming(core: Dispatcher, now: float) -> list[str]:
    return [b.name for b in core.backends(now) if b.warming]


def returned(backends: int = 4, each: int = 40, **more: str) -> Dispatcher:
    """All but b0 have `each` requests in flight; b0 comes back at 100 s."""
    core = dispatcher(backends, **more)  # type: ignore[arg-type]
    core.set_up("b0", False, 0.0)
    busy(core, each * (backends - 1), 99.0)
    core.set_up("b0", True, 100.0)
    return core


def test_at_the_start_nobody_is_cold() -> None:
    core = dispatcher(4)
    busy(core, 400, 0.0)
    assert warming(core, 0.0) == []
    assert min(in_flight(core, f"b{i}", 0.0) for i in range(4)) > 50


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_backend_that_comes_back_is_not_flooded(policy: str) -> None:
    core = returned(policy=policy)
    busy(core, 60, 100.0, start=1000)
    assert in_flight(core, "b0", 100.0) <= warm.LEAST
    assert warming(core, 100.0) == ["b0"]


def test_it_gets_more_with_every_second_and_is_never_without_work() -> None:
    core = returned(policy="least_requests")
    had = []
    for second in range(12):
        now = 100.0 + second
        busy(core, 30, now, start=1000 * (second + 1))
        had.append(in_flight(core, "b0", now))
    assert had[0] == warm.LEAST
    assert had == sorted(had)
    assert len(set(had)) > 8
    peers = [in_flight(core, name, 111.0) for name in ("b1", "b2", "b3")]
    assert abs(had[-1] - max(peers)) <= 1  # warm: an equal among equals
    assert warming(core, 111.0) == []


def test_its_ramp_begins_when_it_may_first_be_chosen() -> None:
    core = returned(policy="least_requests")
    busy(core, 60, 500.0, start=1000)  # nobody asked for anything meanwhile
    assert in_flight(core, "b0", 500.0) == warm.LEAST


def test_without_a_warm_backend_nobody_is_held_back() -> None:
    core = dispatcher(2)
    for name in ("b0", "b1"):
        core.set_up(name, False, 0.0)
    for name in ("b0", "b1"):
        core.set_up(name, True, 1.0)
    busy(core, 100, 1.0)
    assert min(in_flight(core, name, 1.0) for name in ("b0", "b1")) > 3 * warm.LEAST


def test_one_that_is_full_takes_the_request_that_nobody_else_may() -> None:
    core = returned(backends=2, each=80)
    busy(core, 20, 100.0, start=1000)
    assert in_flight(core, "b0", 100.0) == warm.LEAST
    refused = admit(core, query(("retried", 640)), 100.0)
    assert refused.backend == "b1"
    core.attempt_failed(refused, 100.0)
    assert core.reassign(refused, 100.0)
    assert refused.backend == "b0"


def test_a_pool_that_is_priced_by_a_shortlist_of_cold_backends_uses_the_warm_ones() -> None:
    core = dispatcher(40)
    back = [f"b{i}" for i in range(39)]
    for name in back:
        core.set_up(name, False, 0.0)
    busy(core, 60, 99.0)
    for name in back:
        core.set_up(name, True, 100.0)
    busy(core, 40 * warm.LEAST + 100, 100.0, start=1000)
    assert max(in_flight(core, name, 100.0) for name in back) == warm.LEAST
    assert in_flight(core, "b39", 100.0) > 60


def test_a_closed_breaker_and_a_new_process_are_let_in_slowly_too() -> None:
    core = dispatcher(3)
    core.observe("b1", Snapshot(at=0.0, start_time=1.0), 0.0)
    core.observe("b1", Snapshot(at=1.0, start_time=50.0), 1.0)
    for i in range(3):
        ticket = admit(core, query((f"p{i}", 64)), 1.0)
        while ticket.backend != "b0":
            core.attempt_failed(ticket, 1.0)
            assert core.reassign(ticket, 1.0)
        core.finish(ticket, done(Outcome.UPSTREAM_5XX), 1.0)
        for name in ("b1", "b2"):
            core._fleet.by_name[name].breaker.reset()
    assert warming(core, 1.0) == ["b1"]
    trials = busy(core, 6, 30.0, start=100)
    assert "b0" in {ticket.backend for ticket in trials}
    assert "b0" in warming(core, 30.0)


def test_an_added_backend_is_let_in_slowly_and_those_there_are_not_disturbed() -> None:
    core = dispatcher(["a", "b"], policy="least_requests")
    busy(core, 80, 0.0)
    core.apply(settings(["a", "b", "c"], policy="least_requests"), 1.0)
    busy(core, 60, 1.0, start=1000)
    assert in_flight(core, "c", 1.0) == warm.LEAST
    assert warming(core, 1.0) == ["c"]


def test_without_a_ramp_a_backend_gets_all_at_once() -> None:
    core = dispatcher(["a", "b"], policy="least_requests")
    core.apply(replace(settings(["a", "b"], policy="least_requests"), warm_up_s=0.0), 0.0)
    core.set_up("a", False, 0.0)
    busy(core, 80, 0.0)
    core.set_up("a", True, 1.0)
    busy(core, 60, 1.0, start=1000)
    assert in_flight(core, "a", 1.0) == 60


def test_an_explanation_says_why_it_gets_nothing() -> None:
    core = returned()
    busy(core, 60, 100.0, start=1000)
    told = core.explain(query(("x", 640)), 100.0)
    row = next(row for row in told.backends if row.name == "b0")
    assert (row.eligible, row.why_not) == (False, "warming up: it has enough for now")


def test_a_cold_backend_takes_over_only_so_much_of_what_waits() -> None:
    spec = replace(
        settings(2),
        queue=QueueSpec(owed_s=0.05),
        classes=(ClassSpec("chat", default=True, max_wait_s=1000.0),),
    )
    core = QueuedDispatcher(spec, Random(1), 0.0)
    core.set_up("b0", False, 0.0)
    held = [admit(core, query((f"p{i}", 6400)), 0.0) for i in range(60)]
    assert sum(ticket.held for ticket in held) > 50
    core.set_up("b0", True, 1.0)
    for _ in range(40):  # each answers its prefill at once and goes on decoding
        for ticket in core.take_started():
            if ticket.backend == "b0":
                core.first_token(ticket, 1.0)
    assert in_flight(core, "b0", 1.0) == warm.LEAST


def test_ramps_of_a_pool_end_one_by_one() -> None:
    rows = [account(slot) for slot in range(3)]
    warm.begin(rows[0])
    assert warm.enter(rows, 5.0, RAMP_S) == [rows[0]]
    warm.begin(rows[1])
    letting_in = warm.enter(rows, 8.0, RAMP_S)
    assert letting_in == rows[:2]
    assert warm.ends(letting_in, RAMP_S) == 15.0
    assert warm.enter(rows, 15.0, RAMP_S) == [rows[1]]
    assert warm.enter(rows, 18.0, RAMP_S) == []
    assert [row.warm_from for row in rows] == [None] * 3
