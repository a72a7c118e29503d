import pytest

from gateway.core.bucket import Bucket, clamp_retry_after
from gateway.core.settings import BucketSpec

SPEC = BucketSpec(tokens_per_second=100.0, burst_tokens=1000.0)


def test_a_new_bucket_is_full() -> None:
    assert Bucket(SPEC, 5.0).available(5.0) == 1000.0


def test_reserving_takes_the_tokens() -> None:
    bucket = Bucket(SPEC, 0.0)
    assert bucket.reserve(400, 0.0) == 0.0
    assert bucket.available(0.0) == 600.0


def test_a_refused_reservation_takes_nothing_and_names_the_truthful_wait() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(1000, 0.0)
    wait = bucket.reserve(300, 1.0)
    assert wait == pytest.approx(2.0)
    assert bucket.available(1.0) == pytest.approx(100.0)


def test_the_named_wait_is_enough() -> None:
    bucket = Bucket(BucketSpec(3.7, 911.3), 0.0)
    bucket.reserve(911.3, 0.0)
    wait = bucket.reserve(123.456, 0.1)
    assert bucket.reserve(123.456, 0.1 + wait) == 0.0


def test_refill_never_exceeds_the_burst() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(10, 0.0)
    assert bucket.available(1e9) == 1000.0


def test_a_request_larger_than_the_burst_passes_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = Bucket(SPEC, 0.0)
    assert bucket.reserve(5000, 0.0) == 0.0
    assert bucket.available(0.0) == -4000.0
    assert bucket.reserve(1, 0.0) == pytest.approx(40.01)


def test_a_request_larger_than_the_burst_waits_until_the_bucket_is_full() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(500, 0.0)
    assert bucket.reserve(5000, 0.0) == pytest.approx(5.0)
    assert bucket.reserve(5000, 5.0) == 0.0


def test_settling_gives_back_what_was_reserved_too_much() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(800, 0.0)
    bucket.settle(800, 300, 0.0)
    assert bucket.available(0.0) == 700.0


def test_settling_charges_what_was_reserved_too_little() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(100, 0.0)
    bucket.settle(100, 1500, 0.0)
    assert bucket.available(0.0) == -500.0


def test_a_refund_never_lifts_the_bucket_above_its_burst() -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(800, 0.0)
    bucket.settle(800, 0, 100.0)
    assert bucket.available(100.0) == 1000.0


def test_time_running_backwards_earns_nothing() -> None:
    bucket = Bucket(SPEC, 10.0)
    bucket.reserve(1000, 10.0)
    assert bucket.available(5.0) == 0.0
    bucket.reserve(1, 5.0)
    assert bucket.available(11.0) == pytest.approx(100.0)


@pytest.mark.parametrize(("burst", "level"), [(2000.0, 1400.0), (500.0, -100.0)])
def test_new_limits_keep_what_was_spent(burst: float, level: float) -> None:
    bucket = Bucket(SPEC, 0.0)
    bucket.reserve(600, 0.0)
    bucket.resize(BucketSpec(100.0, burst), 0.0)
    assert bucket.available(0.0) == level


@pytest.mark.parametrize(("wait", "said"), [(0.0, 1e-3), (0.5, 0.5), (60.0, 60.0), (1e6, 60.0)])
def test_retry_after_stays_within_what_the_contract_allows(wait: float, said: float) -> None:
    assert clamp_retry_after(wait) == said
