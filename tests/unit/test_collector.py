"""What the collector is made to look at, in counts of objects and of collections."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from gateway import tasks
from gateway.collector import MOST_OLD, YOUNG, Collector, keep_tidy


class Knot:
    """Refers to itself. Looked for by type: isinstance raises on a dead weak proxy of another test."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    before = gc.get_threshold()
    with Collector() as made:
        yield made
    assert gc.get_threshold() == before
    assert made._note not in gc.callbacks
    assert gc.get_freeze_count() == 0


def old_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def old_objects() -> int:
    return len(gc.get_objects(generation=2))


def things(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


@pytest.mark.usefixtures("collector")
def test_start_sets_all_there_is_aside() -> None:
    assert gc.get_freeze_count() > 10_000
    assert old_objects() == 0


def test_no_collection_ever_has_much_to_look_at(collector: Collector) -> None:
    kept = []
    seen: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            younger = range(info["generation"] + 1)
            seen.append(sum(len(gc.get_objects(generation=age)) for age in younger))

    gc.callbacks.append(look)
    try:
        for _ in range(60):
            kept.append(things(5_000))
            collector.tidy(idle=False)
    finally:
        gc.callbacks.remove(look)
    assert len(seen) >= 120
    assert max(seen) < MOST_OLD + 4 * 5_000 + 4 * YOUNG
    assert gc.get_freeze_count() > 250_000


def test_a_growing_index_is_set_aside_and_not_collected(collector: Collector) -> None:
    before = old_collections()
    kept = []
    for _ in range(100):
        kept.append(things(MOST_OLD // 3))
        collector.tidy(idle=False)
        assert old_objects() < 2 * MOST_OLD
    assert old_collections() == before


def test_a_collection_is_only_started_by_what_was_made(collector: Collector) -> None:
    kept = things(YOUNG // 2)
    before = collector.collections
    for _ in range(200_000):
        {}.copy()
    assert collector.collections == before
    kept += things(YOUNG)
    assert collector.collections > before


def test_old_knots_are_untied_while_they_are_few(collector: Collector) -> None:
    kept = [Knot() for _ in range(100)]
    collector.tidy(idle=False)
    knots = sum(type(thing) is Knot for thing in gc.get_objects(generation=2))
    assert knots == 100
    kept.clear()
    before = old_collections()
    for _ in range(39):
        collector.tidy(idle=False)
    assert old_collections() == before + 1
    assert not any(type(thing) is Knot for thing in gc.get_objects())


def test_a_quiet_minute_unties_what_was_set_aside(collector: Collector) -> None:
    kept = [Knot() for _ in range(100)]
    gc.collect()
    gc.freeze()
    kept.clear()
    for _ in range(14_400):
        collector.tidy(idle=False)
    gc.unfreeze()
    assert sum(type(thing) is Knot for thing in gc.get_objects()) == 100
    gc.freeze()
    for _ in range(239):
        collector.tidy(idle=True)
    assert old_objects() < 1_000
    collector.tidy(idle=True)
    gc.unfreeze()
    assert not any(type(thing) is Knot for thing in gc.get_objects())


def test_every_collection_is_timed_and_told() -> None:
    told: list[float] = []
    with Collector(told.append) as collector:
        collector.tidy(idle=False)
        gc.collect()
        assert collector.collections == len(told) == 2
        assert collector.worst_s == max(told)
        assert collector.total_s == pytest.approx(sum(told))


async def test_sweeps_go_on_while_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tidied = asyncio.Event()
    left = [True, True, False]

    def sweep() -> bool:
        return left.pop(0)

    def idle() -> bool:
        tidied.set()
        return True

    monkeypatch.setattr("gateway.collector._TIDY_S", 0.0)
    with Collector() as collector:
        task = tasks.spawn(keep_tidy(collector, idle=idle, sweep=sweep), name="collector")
        await tidied.wait()
        await tasks.stop(task)
    assert left == []
