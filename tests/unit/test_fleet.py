from array import array
from dataclasses import replace
from random import Random

import pytest

from gateway.core.fleet import Fleet, restarted
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, EngineProfile, ModelSpec
from gateway.core.types import Snapshot
from tests.core_kit import chain, query, settings, ticket_for


def fleet(count: int = 3) -> Fleet:
    return Fleet(settings(count), Random(1))


def held(made: Fleet, name: str) -> int:
    return made.trie.blocks(made.by_name[name].slot)


def test_names_and_aliases_resolve_and_others_do_not() -> None:
    made = fleet()
    assert [made.resolve(name) for name in ("m", "alias", "x")] == ["m", "m", None]


def test_a_name_wins_over_an_alias_of_another_model() -> None:
    chosen = settings(1)
    models = (ModelSpec("a", ("b0",), aliases=("b",)), ModelSpec("b", ("b0",)))
    assert Fleet(replace(chosen, models=models), Random(1)).resolve("b") == "b"


def test_a_backend_of_two_models_has_one_account() -> None:
    chosen = settings(2)
    models = (ModelSpec("a", ("b0", "b1")), ModelSpec("b", ("b1",)))
    made = Fleet(replace(chosen, models=models), Random(1))
    assert made.pools["a"].rows[1] is made.pools["b"].rows[0]


def test_a_removed_idle_backend_frees_its_slot_and_its_share_of_the_index() -> None:
    made = fleet()
    slot = made.by_name["b1"].slot
    made.trie.insert(slot, chain(("p", 640)).hashes, 0.0)
    made.apply(settings(["b0", "b2"]))
    assert made.trie.total_blocks == 0
    made.apply(settings(["b0", "b2", "new"]))
    assert made.by_name["new"].slot == slot


def test_a_removed_busy_backend_keeps_its_slot_until_its_last_request_ended() -> None:
    made = fleet()
    row = made.by_name["b1"]
    ticket = ticket_for(query(("p", 640)), row)
    row.place(ticket, 0.0)
    made.apply(settings(["b0", "b2", "new"]))
    assert made.by_name["new"].slot != row.slot
    row.release(ticket)
    made.settle(row)
    assert row.slot not in made.by_slot


def test_a_backend_that_comes_back_while_draining_off_keeps_its_books() -> None:
    made = fleet()
    row = made.by_name["b1"]
    row.place(ticket_for(query(("p", 640)), row), 0.0)
    made.apply(settings(["b0"]))
    made.apply(settings(3))
    assert made.by_name["b1"] is row
    assert row.in_flight == 1
    assert not row.retired


def test_a_reload_keeps_what_the_index_knows() -> None:
    made = fleet()
    made.trie.insert(made.by_name["b1"].slot, chain(("p", 640)).hashes, 0.0)
    made.apply(settings(["new", "b1"]))
    assert held(made, "b1") == 10


def bad(chosen: CoreSettings) -> list[CoreSettings]:
    return [
        replace(chosen, backends=(*chosen.backends, BackendSpec("b0"))),
        replace(chosen, models=(*chosen.models, ModelSpec("m", ()))),
        replace(chosen, models=(ModelSpec("m", ("nobody",)),)),
        replace(chosen, classes=(ClassSpec("a"), ClassSpec("a"))),
        settings(257),
    ]


@pytest.mark.parametrize("index", range(5))
def test_settings_that_contradict_themselves_change_nothing(index: int) -> None:
    made = fleet()
    before = (made.settings, dict(made.by_name), made.epoch)
    with pytest.raises(ValueError, match=r"same name|unknown backend|more than"):
        made.apply(bad(settings(3))[index])
    assert (made.settings, dict(made.by_name), made.epoch) == before


def test_256_backends_fit() -> None:
    assert len(fleet(256).by_slot) == 256


def test_the_engines_capacity_sizes_its_share_of_the_index() -> None:
    made = fleet()
    row = made.by_name["b0"]
    assert made.trie.capacity(row.slot) == 420_000 // 64
    made.observe(row, Snapshot(at=0.0, kv_capacity_tokens=64_000))
    assert made.trie.capacity(row.slot) == 1000
    assert row.engine.kv_tokens == 64_000


def test_another_block_size_resizes_the_share_and_drift_does_not() -> None:
    made = fleet()
    row = made.by_name["b0"]
    made.note_block_size(row, 16.0)
    assert made.trie.capacity(row.slot) == 420_000 // 16
    for _ in range(20):
        made.note_block_size(row, 17.0)
    assert made.trie.capacity(row.slot) == 420_000 // 16


def test_a_restarted_engine_loses_its_share_of_the_index() -> None:
    made = fleet()
    row = made.by_name["b0"]
    made.observe(row, Snapshot(at=0.0, start_time=1000.0))
    made.trie.insert(row.slot, chain(("p", 640)).hashes, 0.0)
    made.observe(row, Snapshot(at=1.0, start_time=1000.4))
    assert held(made, "b0") == 10
    made.observe(row, Snapshot(at=2.0, start_time=2000.0))
    assert held(made, "b0") == 0


@pytest.mark.parametrize(
    ("old", "new", "other"),
    [
        (Snapshot(at=0, prompt_tokens=50), Snapshot(at=1, prompt_tokens=10), True),
        (Snapshot(at=0, prompt_tokens=50), Snapshot(at=1, prompt_tokens=50), False),
        (Snapshot(at=0, prefix_queries=50), Snapshot(at=1, prefix_queries=0), True),
        (Snapshot(at=0, start_time=5.0, prompt_tokens=9), Snapshot(at=1, start_time=5.0), False),
        (Snapshot(at=0), Snapshot(at=1, start_time=5.0), False),
        (None, Snapshot(at=1, start_time=5.0), False),
    ],
)
def test_a_restart_shows_in_the_start_time_or_in_counters_that_fell(
    old: Snapshot | None, new: Snapshot, other: bool
) -> None:
    assert restarted(old, new) is other


def test_others_load_is_what_exceeds_our_own_peak() -> None:
    made = fleet()
    row = made.by_name["b0"]
    ours = [ticket_for(query((f"u{i}", 640)), row, i) for i in range(6)]
    for ticket in ours:
        row.place(ticket, 0.0)
    for ticket in ours[:4]:
        row.release(ticket)
    made.observe(row, Snapshot(at=0.0, running=6))
    assert row.other_in_flight == 0  # four of ours may still have been there when it was read
    made.observe(row, Snapshot(at=0.25, running=6, waiting=2, kv_utilization=0.5))
    assert row.other_in_flight == 6
    assert row.other_context_tokens == 210_000 - row.kv_tokens
    assert row.other_owed_s > 0


def test_a_stale_snapshot_takes_others_load_off_again_but_for_what_its_peers_show() -> None:
    made = fleet()
    rows = [made.by_name["b0"], made.by_name["b1"]]
    made.observe(rows[0], Snapshot(at=0.0, running=9, waiting=9, kv_utilization=0.9))
    made.observe(rows[1], Snapshot(at=0.5, running=4))
    made.expire_snapshots(0.8)
    stale = rows[0]
    assert (stale.other_in_flight, stale.other_owed_s, stale.reported_waiting) == (4, 0.0, 0)
    assert stale.kv_utilization is None
    assert rows[1].other_in_flight == 4
    assert made.fresh_until == pytest.approx(1.25)
    made.expire_snapshots(1.3)  # nobody tells anything
    for row in rows:
        assert (row.other_in_flight, row.other_owed_s, row.other_context_tokens) == (0, 0.0, 0)


def test_another_profile_replaces_the_engine_model() -> None:
    made = fleet(1)
    slow = EngineProfile(step_s=1.0, kv_tokens=6400)
    made.apply(settings(1, profile=slow))
    row = made.by_name["b0"]
    assert row.engine.step_s == 1.0
    assert made.trie.capacity(row.slot) == 100


def test_a_backend_that_serves_other_models_now_is_another_process() -> None:
    both = (ModelSpec("m", ("b0",)), ModelSpec("adapter", ("b0",)))
    made = Fleet(replace(settings(1), models=both), Random(1))
    trie = made.trie
    trie.insert(0, array("Q", range(50)), 1.0)
    made.apply(replace(settings(1), models=both[:1]))  # an adapter was unloaded
    made.apply(replace(settings(1), models=()))  # it is down, or has not said
    assert trie.blocks(0) == 50
    made.apply(replace(settings(1), models=(ModelSpec("other", ("b0",)),)))
    assert trie.blocks(0) == 0


@pytest.mark.parametrize(
    ("snapshot", "kept"),
    [(None, 0), (Snapshot(at=0.0), 0), (Snapshot(at=0.0, start_time=5.0), 50)],
)
def test_an_engine_that_was_down_and_cannot_show_a_restart_is_forgotten(
    snapshot: Snapshot | None, kept: int
) -> None:
    made = Fleet(settings(1), Random(1))
    row = made.by_name["b0"]
    row.snapshot = snapshot
    made.trie.insert(0, array("Q", range(50)), 1.0)
    made.set_up(row, up=False)
    made.set_up(row, up=True)
    assert made.trie.blocks(0) == kept
