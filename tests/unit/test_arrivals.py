import pytest

from gateway.core.arrivals import Arrivals


def arrivals() -> Arrivals:
    made = Arrivals()
    made.apply({"chat": 1 / 2.0, "coding": 1 / 5.0})
    return made


def test_each_class_has_its_own_rate() -> None:
    seen = arrivals()
    for _ in range(3):
        seen.note("chat", 0.125, 1.0)
    seen.note("coding", 0.125, 1.0)
    assert seen.rates == {"chat": pytest.approx(0.375), "coding": pytest.approx(0.125)}


def test_a_tighter_target_makes_a_class_more_urgent() -> None:
    seen = arrivals()
    seen.note("chat", 0.125, 1.0)
    chat = seen.urgent
    seen.note("coding", 0.125, 1.0)
    assert chat == pytest.approx(0.125 / 2.0)
    assert seen.urgent - chat == pytest.approx(0.125 / 5.0)


def test_all_rates_fade_together() -> None:
    seen = arrivals()
    seen.note("chat", 0.125, 1.0)
    seen.note("coding", 0.125, 0.5)
    assert seen.rates["chat"] == pytest.approx(0.0625)
    assert seen.urgent == pytest.approx(0.0625 / 2.0 + 0.125 / 5.0)


def test_a_request_that_never_ran_is_taken_back() -> None:
    seen = arrivals()
    seen.note("chat", 0.125, 1.0)
    seen.note("coding", 0.125, 1.0)
    seen.take_back("chat", 0.125 * 0.5, 0.5)
    assert seen.rates == {"chat": 0.0, "coding": pytest.approx(0.0625)}
    assert seen.urgent == pytest.approx(0.0625 / 5.0)


def test_an_unknown_class_is_not_remembered() -> None:
    seen = arrivals()
    seen.note("nobody", 0.125, 1.0)
    assert set(seen.rates) == {"chat", "coding"}
    assert seen.urgent == 0.0


def test_a_reload_keeps_the_classes_that_stay() -> None:
    seen = arrivals()
    seen.note("chat", 0.125, 1.0)
    seen.note("coding", 0.125, 1.0)
    seen.apply({"chat": 1 / 1.0, "batch": 1 / 60.0})
    assert seen.rates == {"chat": 0.125, "batch": 0.0}
    assert seen.urgent == pytest.approx(0.125)
