"""Limits of keys: a minute's, a day's, streams; what reloads leave of them."""

from gateway.core.key_limits import DAY_S, KeyBooks, Keys, Quota
from gateway.core.settings import KeySpec


def test_a_key_without_limits_has_no_books() -> None:
    keys = Keys([KeySpec("free"), KeySpec("tight", streams=1)], 0.0)
    assert keys.get("free") is None
    assert keys.get(None) is None
    assert keys.get("nobody") is None
    assert keys.get("tight") is not None


def test_requests_a_minute_come_back_evenly_and_a_refused_one_costs_nothing() -> None:
    books = KeyBooks(KeySpec("k", requests_per_minute=2), -2, 0.0)
    assert [books.begin(0.0), books.begin(0.0)] == [0.0, 0.0]
    assert books.begin(0.0) == 30.0
    assert books.begin(30.0) == 0.0


def test_a_request_that_was_refused_elsewhere_gives_its_turn_back() -> None:
    books = KeyBooks(KeySpec("k", requests_per_minute=1), -2, 0.0)
    assert books.begin(0.0) == 0.0
    books.withdraw(0.0)
    assert books.begin(0.0) == 0.0


def test_d50_a_quota_refuses_until_its_day_is_over() -> None:
    quota = Quota(100, 0.0)
    assert quota.reserve(80.0, 0.0) == 0.0
    quota.settle(80.0, 99.0, 1.0)
    assert quota.reserve(50.0, 2.0) == 0.0  # the last one may go over
    assert quota.reserve(1.0, 3600.0) == DAY_S - 3600.0
    assert quota.reserve(1.0, DAY_S) == 0.0


def test_what_was_reserved_and_not_used_comes_back() -> None:
    quota = Quota(100, 0.0)
    quota.reserve(100.0, 0.0)
    quota.settle(100.0, 0.0, 0.0)
    assert quota.reserve(1.0, 0.0) == 0.0


def test_a_reload_keeps_what_was_spent_and_takes_the_new_limits() -> None:
    keys = Keys([KeySpec("k", requests_per_minute=1, tokens_per_day=10, streams=1)], 0.0)
    books = keys.get("k")
    assert books is not None
    books.begin(0.0)
    assert books.quota is not None
    books.quota.reserve(10.0, 0.0)
    books.streams = 1
    was_full = books.full

    keys.apply([KeySpec("k", requests_per_minute=2, tokens_per_day=20, streams=2)], 0.0)
    assert keys.get("k") is books
    assert (was_full, books.full) == (True, False)
    assert books.begin(0.0) == 0.0  # one of the two is spent
    assert books.begin(0.0) > 0.0
    assert books.quota.reserve(10.0, 0.0) == 0.0
    assert books.quota.reserve(1.0, 0.0) > 0.0


def test_a_key_that_is_gone_keeps_its_books_while_it_has_streams() -> None:
    keys = Keys([KeySpec("k", streams=1)], 0.0)
    books = keys.get("k")
    assert books is not None
    books.streams = 1
    keys.apply([], 0.0)
    assert keys.get("k") is books
    assert not books.full
    books.streams = 0
    keys.apply([], 0.0)
    assert keys.get("k") is None


def test_lines_of_keys_are_never_shared() -> None:
    keys = Keys([KeySpec("a", streams=1)], 0.0)
    first = keys.get("a")
    keys.apply([KeySpec("b", streams=1)], 0.0)
    second = keys.get("b")
    assert first is not None
    assert second is not None
    assert first.line != second.line
    assert max(first.line, second.line) < -1
