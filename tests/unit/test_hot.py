from random import Random

from gateway.core.hot import HotPrefixes, homes_busy
from tests.core_kit import account


def test_a_prefix_of_all_traffic_deserves_every_backend() -> None:
    hot = HotPrefixes()
    for _ in range(400):
        hot.note(1)
    assert 7.9 < hot.homes_deserved(1, 8) <= 8


def test_a_prefix_of_a_few_requests_deserves_less_than_one() -> None:
    hot = HotPrefixes()
    for key in range(300):
        hot.note(key % 150)
    assert hot.homes_deserved(7, 8) < 1


def test_two_requests_prove_nothing() -> None:
    hot = HotPrefixes()
    hot.note(1)
    hot.note(1)
    assert hot.homes_deserved(1, 2) < 1


def test_what_is_no_longer_asked_for_is_forgotten() -> None:
    hot = HotPrefixes()
    for _ in range(500):
        hot.note(1)
    for _ in range(20_000):
        hot.note(None)
    assert hot.homes_deserved(1, 8) < 0.1


def test_its_memory_is_bounded() -> None:
    hot = HotPrefixes()
    rng = Random(1)
    sizes = []
    for _ in range(20_000):
        hot.note(rng.getrandbits(64))
        sizes.append(len(hot))
    assert max(sizes) <= 1024


def test_one_more_home_only_while_the_homes_are_the_busy_ones() -> None:
    rows = [account(slot) for slot in range(4)]
    assert not homes_busy(rows, 0b0001, 1.2)
    rows[0].other_in_flight = 10
    assert homes_busy(rows, 0b0001, 1.2)
    rows[1].other_in_flight = 2
    assert not homes_busy(rows, 0b0011, 1.2)
    assert not homes_busy(rows, 0b1111, 1.2)
    assert not homes_busy(rows[1:], 0b0001, 1.2)


def test_a_prefix_of_all_traffic_deserves_one_more_home_until_it_has_them_all() -> None:
    hot = HotPrefixes()
    for _ in range(100):
        hot.note(1)
    assert hot.deserves_more(1, 1, 4)
    assert hot.deserves_more(1, 3, 4)
    assert not hot.deserves_more(1, 4, 4)


def test_an_ordinary_conversation_gets_no_further_home_however_busy_it_is() -> None:
    hot = HotPrefixes()
    for key in range(400):
        hot.note(key % 40)
    assert not hot.deserves_more(5, 1, 4)
    assert not hot.deserves_more(99, 1, 4)


def test_what_was_found_of_a_prefix_is_kept_as_long_as_its_count() -> None:
    hot = HotPrefixes()
    for _ in range(600):
        hot.note(7, (3, 0b101))
    hot.note(8, (4, 0b1))
    for _ in range(423):
        hot.note(None)
    assert hot.where == {7: (3, 0b101)}
    assert [key for key, _ in hot.hottest(5)] == [7]


def test_a_long_document_that_few_ask_for_deserves_as_many_homes_as_its_tokens_fill() -> None:
    hot = HotPrefixes()
    for number in range(100):
        hot.note(1 if number % 4 == 0 else None, tokens=24_000 if number % 4 == 0 else 1_000)
    assert 6.5 < hot.homes_deserved(1, 8) < 7.2
    assert hot.deserves_more(1, 6, 8)
    assert dict(hot.hottest(1)) == {1: 0.25}


def test_tokens_fade_with_the_counts() -> None:
    hot = HotPrefixes()
    for _ in range(1500):
        hot.note(1, tokens=100.0)
    for _ in range(3000):
        hot.note(None, tokens=100.0)
    assert hot.homes_deserved(1, 8) < 2.0
    assert hot.all_tokens == 100.0 * hot.total


def test_homes_with_few_long_contexts_are_busy_too() -> None:
    rows = [account(slot) for slot in range(4)]
    rows[0].other_in_flight = 1
    rows[0].other_context_tokens = 100_000
    assert homes_busy(rows, 0b0001, 1.2, 24_000)
    assert not homes_busy(rows, 0b0001, 1.2, 80_000)  # one more prompt than the others is chance
