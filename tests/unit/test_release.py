"""Who may start: seconds owed, room in the KV cache, shares of engine time, overload."""

from random import Random

import pytest

from gateway.core.ledger import Account
from gateway.core.release import OVERLOAD_HOLD_S, KvRules, Overload, Releaser, Shares, StartRate
from gateway.core.settings import ClassSpec, EngineProfile, QueueSpec
from gateway.core.types import Snapshot, Ticket
from gateway.core.waiting import Held, Line
from tests.core_kit import account, query, ticket_for

CLASSES = (
    ClassSpec("coding", share=0.5, kv_reserve=0.25),
    ClassSpec("chat", default=True, share=0.5, kv_reserve=0.15),
)
SPEC = QueueSpec(owed_s=0.5)
PROFILE = EngineProfile(kv_tokens=100_000)


def releaser(spec: QueueSpec = SPEC, classes: tuple[ClassSpec, ...] = CLASSES) -> Releaser:
    return Releaser(spec, classes, KvRules(spec, classes))


def waiting(line: Line, ident: int, pf_s: float, cls: str = "chat", tokens: int = 640) -> Ticket:
    ticket = ticket_for(query((f"p{ident}", tokens), cls=cls), account(), ident)
    line.add(Held(ticket, 0, cls, pf_s, 0.0, 30.0), ident)
    return ticket


def busy(row: Account, owed_s: float, tokens: int = 640) -> None:
    """Put a prefill of so many seconds on the backend's books."""
    ticket = ticket_for(query((f"busy{row.in_flight}", tokens)), row, 1000 + row.in_flight)
    ticket.prefill_s = owed_s
    row.place(ticket, 0.0)


def test_a_backend_is_open_while_it_owes_less_than_w() -> None:
    rules, row = releaser(), account()
    assert rules.open(row)
    busy(row, 0.4)
    assert rules.open(row)
    busy(row, 0.2)
    assert not rules.open(row)


def test_with_nothing_of_ours_to_prefill_others_load_does_not_close_it() -> None:
    rules, row = releaser(), account()
    row.other_owed_s = 9.0
    assert rules.open(row)


def test_a_backend_whose_sequences_are_taken_is_closed_once_it_queues_itself() -> None:
    row = account(profile=EngineProfile(max_sequences=2))
    busy(row, 0.0)
    busy(row, 0.0)
    assert releaser().open(row)  # two are all it takes, we believe: it may take more
    row.snapshot = Snapshot(0.0, running=2, waiting=0)
    assert releaser().open(row)
    row.snapshot = Snapshot(0.0, running=2, waiting=1)
    assert not releaser().open(row)


def test_a_request_fits_into_the_kv_share_and_anything_fits_an_idle_backend() -> None:
    rules, row = releaser(), account(profile=PROFILE)
    small = ticket_for(query(("s", 640), output=50), row, 1)
    huge = ticket_for(query(("h", 200_000)), row, 2)
    assert rules.fits(row, huge, 0.0)
    busy(row, 0.1, tokens=96_000)
    assert not rules.fits(row, huge, 0.0)
    assert rules.fits(row, small, 0.0)
    busy(row, 0.1, tokens=6_400)
    assert not rules.fits(row, small, 0.0)


def test_the_shortest_of_all_classes_is_next_while_shares_are_kept() -> None:
    rules, line = releaser(), Line()
    waiting(line, 1, 0.3, "coding")
    waiting(line, 2, 0.1, "chat")

    held = rules.next(line, account(), 0.0)
    assert held is not None
    assert held.cls == "chat"


def test_r34_the_class_under_its_share_goes_first_whatever_it_costs() -> None:
    rules, line = releaser(), Line()
    rules.shares.charge("chat", 10.0, 0.0)
    waiting(line, 1, 3.0, "coding")
    waiting(line, 2, 0.01, "chat")

    held = rules.next(line, account(), 0.0)
    assert held is not None
    assert held.cls == "coding"


def test_r34_under_a_flood_of_chat_coding_gets_its_share_of_engine_time() -> None:
    rules = releaser()
    rng = Random(3)
    given = {"coding": 0.0, "chat": 0.0}
    now = 0.0
    for number in range(2000):
        line = Line()
        waiting(line, 2 * number, 0.5 + rng.random(), "coding")
        waiting(line, 2 * number + 1, 0.02, "chat")
        held = rules.next(line, account(), now)
        assert held is not None
        rules.shares.charge(held.cls, held.pf_s, now)
        given[held.cls] += held.pf_s
        now += held.pf_s
    assert given["coding"] / sum(given.values()) == pytest.approx(0.5, abs=0.05)


def test_a_head_that_does_not_fit_holds_nobody_of_another_class() -> None:
    rules, line, row = releaser(), Line(), account(profile=PROFILE)
    busy(row, 0.1, tokens=64_000)
    waiting(line, 1, 0.01, "coding", tokens=64_000)
    waiting(line, 2, 0.3, "chat")

    held = rules.next(line, row, 0.0)
    assert held is not None
    assert held.cls == "chat"


def test_a_stated_deadline_that_is_near_goes_first_and_a_lost_one_does_not() -> None:
    rules, line = releaser(), Line()
    waiting(line, 1, 0.1)
    due = ticket_for(query(("due", 640)), account(), 2)
    line.add(Held(due, 0, "chat", 0.9, 0.0, 30.0, latest_s=2.0), 2)

    def first(now: float) -> Ticket | None:
        held = rules.next(line, account(), now)
        assert held is not None
        return held.ticket

    assert first(1.0) is not due
    assert first(1.6) is due
    assert first(2.1) is not due


def test_the_overload_switch_stays_on_for_a_while_after_the_last_sign() -> None:
    switch = Overload()
    assert not switch.look(0.4, 1.0)
    assert switch.look(0.6, 1.0)
    assert switch.look(0.0, 1.0 + 0.9 * OVERLOAD_HOLD_S)
    assert not switch.look(0.0, 1.1 + OVERLOAD_HOLD_S)


def test_under_overload_long_prompts_leave_memory_for_idle_prefixes() -> None:
    rules, row = releaser(), account(profile=PROFILE)
    rules.kv.started(ticket_for(query(("long", 32_000), cls="coding"), row, 1), 32_000, 0.0)
    rules.kv.started(ticket_for(query(("short", 640), cls="chat"), row, 3), 640, 0.0)
    row.place(ticket_for(query(("long", 32_000), cls="coding"), row, 2), 0.0)
    used = row.kv_tokens

    assert rules.kv.long("coding")
    assert not rules.kv.long("chat")
    assert rules.kv.room(row, "coding", 0.0, overloaded=False) == 97_000 - used
    assert rules.kv.room(row, "coding", 0.0, overloaded=True) == 70_000 - used - 15_000 + 900
    # what coding already holds counts towards its own reserve
    assert rules.kv.room(row, "chat", 0.0, overloaded=True) == 97_000 - used


def test_what_has_ended_holds_no_memory() -> None:
    rules, row = releaser(), account(profile=PROFILE)
    tickets = [ticket_for(query((f"t{i}", 6400), cls="coding"), row, i) for i in range(3)]
    for ticket in tickets:
        rules.kv.started(ticket, 6400, 0.0)
    assert rules.kv.held(row.slot, "coding") == 3 * (6400 + 10 + 250)
    for ticket in tickets:
        rules.kv.ended(ticket)
    assert rules.kv.held(row.slot, "coding") == 0
    assert not rules.kv._used


def test_shares_fade_and_never_fall_below_nothing() -> None:
    shares = Shares(CLASSES)
    assert shares.lag("chat") == 0.0
    shares.charge("chat", 4.0, 0.0)
    assert shares.lag("coding") == 0.5
    assert shares.lag("chat") == -0.5
    shares.charge("coding", 4.0, 100.0)
    assert shares.lag("coding") == pytest.approx(-0.5, abs=1e-3)
    shares.charge("coding", -9.0, 100.0)
    assert shares.lag("coding") == pytest.approx(0.5, abs=1e-3)


def test_shares_above_one_together_are_scaled_down() -> None:
    shares = Shares((ClassSpec("a", share=1.0), ClassSpec("b", share=1.0)))
    shares.charge("a", 1.0, 0.0)
    assert shares.lag("b") == 0.5


def test_r34_stated_deadlines_gain_nobody_the_share_of_another_class() -> None:
    rules, line = releaser(), Line()
    rules.shares.charge("chat", 10.0, 0.0)
    waiting(line, 1, 2.0, "coding")
    due = ticket_for(query(("due", 640)), account(), 2)
    line.add(Held(due, 0, "chat", 0.1, 0.0, 30.0, latest_s=0.2), 2)

    held = rules.next(line, account(), 0.0)
    assert held is not None
    assert held.cls == "coding"


def test_the_pace_of_starts_is_known_from_the_first_seconds_on_and_fades() -> None:
    pace = StartRate()
    assert pace.per_second(1.0) == 0.0
    for i in range(21):
        pace.note(i * 0.1)
    assert 9.0 < pace.per_second(2.0) < 12.0
    assert pace.per_second(60.0) < 0.1


def test_w_is_what_is_configured_until_first_tokens_say_otherwise() -> None:
    rules, row = releaser(QueueSpec(owed_s=0.5, adaptive=True)), account()
    busy(row, 0.4)
    assert rules.open(row)
    for i in range(40):
        rules.limit.first_token(2.0, 1.0, float(i), held=False)
    assert not rules.open(row)
    rules.apply(QueueSpec(owed_s=0.5), CLASSES)
    assert rules.open(row)


def test_a_class_that_sends_nothing_has_no_reserve() -> None:
    rules, row = releaser(), account(profile=PROFILE)
    rules.kv.started(ticket_for(query(("a", 640), cls="coding"), row, 1), 640, 0.0)

    assert rules.kv.room(row, "chat", 10.0, overloaded=True) == 97_000 - 25_000 + 900
    assert rules.kv.room(row, "chat", 100.0, overloaded=True) == 97_000


def test_a_document_that_many_ask_about_at_once_makes_no_class_long() -> None:
    rules, row = releaser(), account(profile=PROFILE)
    for number in range(200):
        ticket = ticket_for(query(("doc", 24_000), (f"q{number}", 128)), row, number)
        row.place(ticket, 0.0)
        rules.kv.started(ticket, row.new_tokens, 0.0)

    assert not rules.kv.long("chat")
