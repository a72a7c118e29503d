import pytest

from gateway.core.bucket import Bucket
from gateway.core.settings import BucketSpec
from gateway.core.status import backend_status, class_status
from gateway.core.types import Snapshot
from tests.core_kit import account, query, ticket_for


def test_a_backend_never_scraped_says_so() -> None:
    shown = backend_status(account(), 0, 5.0)
    assert shown.snapshot_age_s is None
    assert shown.kv_utilization is None
    assert (shown.up, shown.queue_depth, shown.running) == (True, 0, 0)


def test_the_engines_counts_and_their_age_are_shown() -> None:
    row = account()
    row.snapshot = Snapshot(at=3.0, running=4, waiting=2, kv_utilization=0.25)
    shown = backend_status(row, 7, 5.0)
    assert (shown.running, shown.queue_depth, shown.kv_utilization) == (4, 2, 0.25)
    assert shown.snapshot_age_s == 2.0
    assert shown.index_blocks == 7


def test_our_own_books_are_shown() -> None:
    row = account()
    ticket = ticket_for(query(("p", 6400)), row, hit=640)
    row.place(ticket, 0.0)
    shown = backend_status(row, 0, 0.0)
    assert (shown.in_flight, shown.in_flight_prefill_tokens) == (1, 5770)
    assert shown.owed_prefill_s == pytest.approx(ticket.prefill_s, abs=1e-8)
    assert shown.context_tokens == 6410


def test_the_learnt_prefill_speed_is_shown() -> None:
    row = account()
    row.engine.own = (2.0, 1.0)
    assert backend_status(row, 0, 0.0).prefill_tokens_per_s == pytest.approx(1 / 60e-6)


def test_a_backend_with_an_open_breaker_is_not_up() -> None:
    row = account()
    for ident in range(3):
        row.breaker.failed(ident, 0.0)
    shown = backend_status(row, 0, 0.0)
    assert (shown.up, shown.breaker) == (False, "open")


def test_a_backend_that_is_down_has_a_breaker_of_its_own() -> None:
    row = account()
    row.up = False
    shown = backend_status(row, 0, 0.0)
    assert (shown.up, shown.breaker) == (False, "closed")


def test_an_unlimited_class_shows_no_bucket() -> None:
    assert class_status("chat", None, 3, 1, 0.0).bucket_tokens is None


def test_a_buckets_level_is_shown_as_of_now_and_not_changed() -> None:
    bucket = Bucket(BucketSpec(10.0, 100.0), 0.0)
    bucket.reserve(100, 0.0)
    shown = class_status("chat", bucket, 3, 1, 4.0)
    assert (shown.admitted, shown.rejected, shown.bucket_tokens) == (3, 1, 40.0)
    assert bucket.level == 0.0
