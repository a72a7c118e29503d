"""The waiting room: order, places, bytes, seconds and time limits."""

from math import inf
from random import Random

import pytest

from gateway.core.types import Ticket
from gateway.core.waiting import AGING, Held, WaitingRoom
from tests.core_kit import account, query, ticket_for


def room_and_news() -> tuple[WaitingRoom, dict[int, float]]:
    news: dict[int, float] = {}
    return WaitingRoom(news.__setitem__), news


def held(
    ident: int,
    *,
    pf_s: float = 0.1,
    since: float = 0.0,
    until: float = 5.0,
    slot: int = 0,
    cls: str = "chat",
    size: int = 10,
    latest_s: float = inf,
) -> Held:
    ticket = ticket_for(query(("a", 640), cls=cls), account(), ident)
    return Held(ticket, slot, cls, pf_s, since, until, latest_s, size)


def ident(entry: Held | None) -> int:
    assert entry is not None
    assert isinstance(entry.ticket, Ticket)
    return entry.ticket.id


def test_the_least_uncached_seconds_are_first() -> None:
    room, _ = room_and_news()
    for number, pf_s in enumerate((0.3, 0.1, 0.2), 1):
        room.enter(held(number, pf_s=pf_s))

    assert ident(room.lines[0].head("chat")) == 2


def test_waiting_outweighs_a_shorter_prompt_in_the_end() -> None:
    room, _ = room_and_news()
    room.enter(held(1, pf_s=0.3, since=0.0))
    room.enter(held(2, pf_s=0.1, since=0.21 / AGING))

    assert ident(room.lines[0].head("chat")) == 1


def test_each_class_has_a_head_of_its_own() -> None:
    room, _ = room_and_news()
    room.enter(held(1, pf_s=0.1, cls="chat"))
    room.enter(held(2, pf_s=0.9, cls="coding"))

    assert sorted(ident(entry) for entry in room.lines[0].heads()) == [1, 2]


def test_the_stated_deadline_that_comes_first_is_the_most_urgent() -> None:
    room, _ = room_and_news()
    room.enter(held(1, latest_s=9.0))
    room.enter(held(2, latest_s=4.0))
    room.enter(held(3))

    assert ident(room.lines[0].most_urgent()) == 2
    room.leave(2)
    assert ident(room.lines[0].most_urgent()) == 1
    room.leave(1)
    assert room.lines[0].most_urgent() is None


def test_leaving_gives_back_place_bytes_and_seconds_at_once() -> None:
    room, news = room_and_news()
    room.enter(held(1, pf_s=0.25, size=100))
    room.enter(held(2, pf_s=0.5, size=30))
    assert (room.waiting("chat"), room.waiting_bytes("chat"), news[0]) == (2, 130, 0.75)

    assert room.leave(1).id == 1
    assert (room.waiting("chat"), room.waiting_bytes("chat"), news[0]) == (1, 30, 0.5)
    room.leave(2)
    assert (room.waiting("chat"), room.waiting_bytes("chat"), news[0]) == (0, 0, 0.0)
    assert not room.lines
    with pytest.raises(KeyError):
        room.leave(2)


def test_who_has_left_is_neither_head_nor_expired() -> None:
    room, _ = room_and_news()
    room.enter(held(1, pf_s=0.1, until=1.0))
    room.enter(held(2, pf_s=0.2, until=2.0))
    room.leave(1)

    assert ident(room.lines[0].head("chat")) == 2
    assert room.expired(1.5) == []
    assert room.next_due == 2.0
    assert [ident(entry) for entry in room.expired(2.0)] == [2]


def test_a_move_keeps_the_time_limit_and_the_place() -> None:
    room, news = room_and_news()
    room.enter(held(1, pf_s=0.1, until=3.0))
    moved = room.move(room.lines[0].head("chat") or held(9), 5, 0.4)

    assert (moved.slot, moved.pf_s, moved.until, moved.moved) == (5, 0.4, 3.0, 1)
    assert (news[0], news[5]) == (0.0, 0.4)
    assert room.waiting("chat") == 1
    assert [ident(entry) for entry in room.expired(3.0)] == [1]


def test_the_part_of_its_limit_that_the_next_due_has_waited() -> None:
    room, _ = room_and_news()
    assert room.longest_wait(1.0) == 0.0
    room.enter(held(1, since=0.0, until=4.0))
    room.enter(held(2, since=0.9, until=9.0))

    assert room.longest_wait(1.0) == 0.25


def test_entries_of_those_who_left_do_not_pile_up() -> None:
    room, _ = room_and_news()
    rng = Random(1)
    room.enter(held(0, pf_s=9.0, until=1e6))
    for number in range(1, 5000):
        room.enter(held(number, pf_s=rng.random(), until=1e5 + number, latest_s=float(number)))
        if number > 50:
            room.leave(number - 50)

    line = room.lines[0]
    assert len(line.heaps["chat"].entries) < 200
    assert len(line.urgent.entries) < 200
    assert len(room._limits) < 200
    assert len(room) == 51


def test_the_order_equals_a_sorted_list_under_any_arrivals_and_leavings() -> None:
    rng = Random(7)
    room, _ = room_and_news()
    model: dict[int, float] = {}
    for number in range(2000):
        if model and rng.random() < 0.45:
            gone = rng.choice(list(model))
            room.leave(gone)
            del model[gone]
        else:
            pf_s, since = rng.random(), rng.random() * 50
            room.enter(held(number, pf_s=pf_s, since=since))
            model[number] = pf_s + AGING * since
        if model:
            assert ident(room.lines[0].head("chat")) == min(model, key=model.__getitem__)
