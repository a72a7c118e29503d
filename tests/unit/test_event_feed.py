"""A stream of KV events with holes, replays and restarts, by example and as a model test."""

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from gateway.core import event_feed, kv_events
from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from tests.kv_kit import SeenIndex, ToyEngine, chain, recorded, seed, talk

Batches = list[tuple[int, bytes]]


class Rig:
    """A feed, the index under it, and an engine with a replay buffer."""

    def __init__(self, blocks: int = 60, *, buffer: int = 10_000) -> None:
        self.rng = random.Random(3)
        self.index = SeenIndex()
        self.changes: list[bool] = []
        self.emptied = 0
        self.feed = Feed(
            Holdings(self.index, 0, seed, 16),
            lambda: self.changes.append(self.feed.exact),
            self._count_empty,
        )
        self.said: list[list[int]] = []
        self.start(blocks, buffer)

    def start(self, blocks: int = 60, buffer: int = 10_000) -> None:
        """Start the engine, or another process in its place."""
        self.engine = ToyEngine(random.Random(self.rng.random()), blocks=blocks)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)

    def batches(self, count: int) -> Batches:
        """Let the engine work; what it publishes."""
        made = []
        for _ in range(count):
            self.engine.run(talk(self.rng, self.said))
            made.append(self.engine.batch())
        self.buffer.extend(made)
        return made

    def live(self, batches: Batches) -> None:
        for number, payload in batches:
            self.feed.live(number, payload)

    def answer(self) -> None:
        """Answer every replay request the feed makes, as the engine would."""
        while (start := self.feed.replay_from) is not None:
            self.feed.replay_asked()
            for number, payload in list(self.buffer):
                if number >= start and self.feed.replay_from is None:
                    self.feed.replayed(number, payload)
            if self.feed.replay_from is None:
                self.feed.replay_ended()

    def drain(self) -> None:
        while self.feed.step():
            pass

    def _count_empty(self) -> None:
        self.emptied += 1

    def exact(self) -> bool:
        return self.feed.exact

    def equal(self) -> bool:
        held = {own for ids in self.engine.prompts() for own in chain(ids)}
        return self.index.held.get(0, set()) == held


@pytest.fixture
def rig() -> Rig:
    """An engine that has published twenty batches to a feed that was there from the start."""
    rig = Rig()
    rig.feed.linked()
    rig.answer()
    rig.live(rig.batches(20))
    rig.drain()
    assert rig.exact()
    assert rig.equal()
    return rig


def test_an_engine_followed_from_its_first_batch_is_exact() -> None:
    rig = Rig()
    rig.feed.linked()
    assert rig.feed.replay_from == 0
    assert not rig.exact()

    rig.answer()
    rig.drain()
    assert rig.exact()
    assert rig.changes == [True]


def test_a_gateway_that_starts_later_replays_from_the_first_batch() -> None:
    rig = Rig()
    rig.batches(50)
    rig.feed.linked()
    rig.answer()
    assert not rig.exact()  # nothing applied yet
    rig.drain()

    assert rig.exact()
    assert rig.equal()
    assert rig.feed.losses == rig.feed.gaps == 0


def test_live_batches_during_a_replay_are_applied_after_it_and_once() -> None:
    rig = Rig()
    old = rig.batches(10)
    rig.feed.linked()
    rig.feed.replay_asked()
    rig.live(rig.batches(3))
    for number, payload in [*old, *list(rig.buffer)[10:12]]:
        rig.feed.replayed(number, payload)
    rig.feed.replay_ended()
    rig.drain()

    assert rig.exact()
    assert rig.equal()


def test_a_gap_is_filled_by_a_replay(rig: Rig) -> None:
    rig.batches(5)
    rig.live(rig.batches(2))
    assert rig.feed.gaps == 1
    assert rig.feed.replay_from == 19  # with the last batch applied, as proof

    rig.answer()
    rig.drain()
    assert rig.exact()
    assert rig.equal()
    assert rig.feed.losses == 0
    assert rig.changes == [True]


def test_a_gap_no_replay_can_fill_forgets_everything(rig: Rig) -> None:
    rig.batches(5)
    lost = rig.batches(1)
    rig.live(lost)
    rig.feed.replay_asked()
    rig.feed.replay_failed()
    assert rig.feed.losses == 1
    assert not rig.exact()
    assert not rig.index.held

    rig.live(rig.batches(5))
    rig.drain()
    assert not rig.exact()


def test_a_replay_that_begins_after_the_gap_is_a_loss() -> None:
    rig = Rig(buffer=4)
    rig.feed.linked()
    rig.answer()
    rig.live(rig.batches(10))
    rig.drain()
    rig.batches(8)
    rig.live(rig.batches(1))
    rig.answer()
    rig.drain()

    assert rig.feed.losses == 1
    assert not rig.exact()


def test_a_cleared_cache_is_known_again_after_a_loss(rig: Rig) -> None:
    rig.batches(5)
    rig.live(rig.batches(1))
    rig.feed.replay_failed()
    assert not rig.exact()

    rig.engine.clear()
    rig.live(rig.batches(3))
    rig.drain()
    assert rig.exact()
    assert rig.equal()


def test_a_cache_replaced_once_over_is_known_again_after_a_loss(rig: Rig) -> None:
    rig.feed.capacity_blocks = 60
    rig.batches(5)
    rig.live(rig.batches(1))
    rig.feed.replay_failed()
    rig.drain()
    assert not rig.exact()
    rig.said.clear()

    turns = 0
    while not rig.exact() and turns < 500:
        turns += 1
        rig.live(rig.batches(1))
        rig.drain()
    assert rig.exact()
    assert rig.equal()


def test_a_restarted_engine_is_noticed_by_its_numbers(rig: Rig) -> None:
    rig.start()
    rig.live(rig.batches(3))
    assert rig.feed.restarts == 1
    rig.answer()
    rig.drain()

    assert rig.exact()
    assert rig.equal()


def test_a_restart_told_by_the_metrics_forgets_at_once(rig: Rig) -> None:
    rig.start()
    rig.feed.restart_told()
    assert not rig.exact()
    assert not rig.index.held

    rig.answer()
    rig.drain()
    assert rig.exact()
    rig.live(rig.batches(3))
    rig.drain()
    assert rig.equal()
    assert rig.feed.losses == 0


def test_a_restart_noticed_before_the_metrics_tell_it_is_one_restart(rig: Rig) -> None:
    rig.start()
    rig.live(rig.batches(3))
    rig.answer()
    rig.drain()
    rig.feed.restart_told()
    assert rig.exact()
    assert rig.feed.restarts == 1

    rig.feed.restart_told()
    assert rig.feed.restarts == 2


@pytest.mark.parametrize("batches", [0, 3, 19, 20, 30])
def test_an_engine_that_restarted_while_the_link_was_down_is_not_taken_for_the_old_one(
    rig: Rig, batches: int
) -> None:
    rig.feed.unlinked()
    assert not rig.exact()
    rig.start()
    rig.batches(batches)
    rig.feed.linked()
    rig.answer()
    rig.drain()

    assert rig.feed.restarts == 1
    assert rig.exact()
    assert rig.equal()


def test_a_link_that_broke_is_exact_again_once_what_was_missed_is_replayed(rig: Rig) -> None:
    rig.feed.unlinked()
    rig.batches(4)
    rig.feed.linked()
    rig.answer()
    rig.drain()

    assert rig.changes == [True, False, True]
    assert rig.equal()
    assert rig.feed.restarts == rig.feed.losses == 0


def test_without_replay_a_broken_link_stays_in_doubt_until_the_next_batch(rig: Rig) -> None:
    rig.feed.unlinked()
    rig.feed.linked()
    rig.feed.replay_failed()
    assert not rig.exact()

    rig.live(rig.batches(1))
    rig.drain()
    assert rig.exact()
    assert rig.equal()


def test_without_replay_an_engine_is_exact_only_from_its_first_batch() -> None:
    rig = Rig()
    rig.feed.linked()
    rig.feed.replay_failed()
    first = rig.batches(2)
    rig.live(first)
    rig.drain()
    assert rig.exact()
    assert rig.equal()

    late = Rig()
    late.batches(1)
    late.feed.linked()
    late.feed.replay_failed()
    late.live(late.batches(1))
    late.drain()
    assert not late.exact()


def test_an_empty_engine_is_told_of_and_a_loss_is_not(rig: Rig) -> None:
    rig.batches(2)
    rig.live(rig.batches(1))
    rig.feed.replay_failed()
    assert (rig.feed.losses, rig.emptied) == (1, 0)

    rig.engine.clear()
    rig.live(rig.batches(1))
    rig.drain()
    assert rig.emptied == 1
    rig.feed.restart_told()
    assert rig.emptied == 2


def test_a_replay_that_failed_is_asked_for_again_only_if_it_would_help(rig: Rig) -> None:
    rig.feed.ask_again()
    rig.feed.replay_ended()  # nobody asked
    assert rig.exact()

    rig.batches(2)
    rig.live(rig.batches(1))
    rig.feed.replay_failed()
    rig.live(rig.batches(2))
    rig.drain()
    assert not rig.exact()
    rig.feed.ask_again()
    rig.answer()
    rig.drain()
    assert rig.exact()
    assert rig.equal()

    rig.feed.unlinked()
    rig.feed.linked()
    rig.feed.replay_failed()
    assert not rig.exact()
    rig.feed.ask_again()
    rig.answer()
    rig.drain()
    assert rig.exact()


def test_a_batch_that_cannot_be_read_costs_the_trust(rig: Rig) -> None:
    rig.live([(rig.engine.batch()[0], b"\xc1")])
    rig.drain()

    assert rig.feed.malformed == 1
    assert not rig.exact()
    assert not rig.index.held


def test_a_long_batch_is_read_in_many_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SLICE_BYTES", 1000)
    monkeypatch.setattr(event_feed, "SLICE_BYTES", 1000)
    for _ in range(30):
        rig.engine.run(talk(rig.rng, rig.said))
    number, payload = rig.engine.batch()
    assert len(payload) > 10_000
    rig.feed.live(number, payload)
    steps = 0
    while rig.feed.step():
        steps += 1
    assert steps > 10
    assert rig.exact()
    assert rig.equal()


def test_a_long_batch_whose_end_is_unreadable_forgets_what_its_beginning_said(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "SLICE_BYTES", 1000)
    monkeypatch.setattr(event_feed, "SLICE_BYTES", 1000)
    for _ in range(30):
        rig.engine.run(talk(rig.rng, rig.said))
    number, payload = rig.engine.batch()
    head, events, rank = msgspec.msgpack.decode(payload)
    events[-1]["block_hashes"] = "?"
    rig.feed.live(number, msgspec.msgpack.encode([head, events, rank]))
    rig.drain()
    assert not rig.exact()
    assert rig.feed.malformed == 1
    assert rig.index.held == {}


def test_what_waits_for_a_replay_is_capped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "HELD_BATCHES", 5)
    rig.batches(1)
    rig.live(rig.batches(10))
    rig.feed.replay_failed()
    rig.drain()
    assert rig.feed.losses == 1
    assert not rig.exact()

    monkeypatch.setattr(event_feed, "HELD_BATCHES", 1000)
    monkeypatch.setattr(event_feed, "HELD_BYTES", 2000)
    rig.batches(1)
    rig.live([(number, b"x" * 900) for number in range(100, 110)])
    assert sum(len(payload) for _, payload in rig.feed._held) <= 2000


def test_an_engine_that_claims_too_much_is_not_exact() -> None:
    rig = Rig()
    rig.feed = Feed(Holdings(rig.index, 0, seed, 16, max_blocks=3), lambda: None)
    rig.feed.linked()
    rig.answer()
    rig.drain()
    assert rig.exact()

    rig.engine.run(list(range(100)))
    rig.live([rig.engine.batch()])
    rig.drain()
    assert not rig.exact()


def test_events_of_a_kind_unknown_here_are_counted() -> None:
    rig = Rig()
    rig.feed.linked()
    rig.answer()
    rig.live([(0, msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0]))])
    rig.drain()
    assert rig.feed.unread == 1
    assert rig.exact()


def test_an_adapter_heard_of_is_told() -> None:
    rig = Rig()
    rig.feed.linked()
    rig.answer()
    rig.drain()
    rig.engine.run(list(range(64)), adapter="sql")
    rig.live([rig.engine.batch()])
    rig.drain()

    assert rig.changes == [True, True]
    assert rig.feed.holdings.adapters == {"sql"}


def test_a_step_takes_a_bounded_number_of_blocks(rig: Rig) -> None:
    for _ in range(10):
        rig.engine.run(list(range(160)) + [rig.rng.randrange(99) for _ in range(48)])
    longest = max(len(event.get("block_hashes", "")) for event in rig.engine.events)
    events, before = len(rig.engine.events), rig.feed.events
    rig.live([rig.engine.batch()])
    held = rig.feed.holdings
    seen = [held.stored + held.removed]
    while rig.feed.step():
        seen.append(held.stored + held.removed)

    assert rig.feed.events == before + events
    assert len(seen) > 3
    assert max(b - a for a, b in pairwise(seen)) < event_feed._STEP_BLOCKS + longest


def test_blocks_told_one_by_one_are_as_good_as_together() -> None:
    """SGLang's way; salts, adapters and gaps in between must not be joined."""
    names = list(range(1, 9))
    ids = list(range(128))
    rows: list[list[object]] = [
        ["BlockStored", [name], parent, ids[16 * i : 16 * i + 16], 16, None, "GPU"]
        for i, (name, parent) in enumerate(zip(names, [None, *names], strict=False))
    ]
    rows.insert(4, ["BlockRemoved", [77], "CPU"])
    rows.append(["BlockStored", [100], None, ids[:16], 16, None, "GPU", None, [["salt"]]])
    rows.append(["BlockStored", [101], 100, ids[16:32], 16, None, "GPU", None, [None]])
    rows.append(["BlockRemoved", [8], "GPU"])
    rows.append(["BlockRemoved", [7], "GPU"])
    rig = Rig()
    rig.feed.linked()
    rig.answer()
    rig.live([(0, msgspec.msgpack.encode([1.0, rows, 0]))])
    rig.drain()

    assert rig.index.depth(0, chain(ids)) == 6
    assert rig.index.depth(0, chain(ids, cache_salt="salt")) == 2
    assert rig.feed.events == len(rows)
    assert rig.feed.holdings.unknown == 1
    assert (rig.feed.holdings.stored, rig.feed.holdings.removed) == (10, 3)


def test_recorded_batches_with_holes_end_in_the_recorded_clearing() -> None:
    rig = Rig()
    rig.feed.linked()
    rig.feed.replay_failed()
    for number, payload in recorded():
        rig.feed.live(number, payload)
        rig.feed.replay_failed()
        rig.drain()

    numbers = [number for number, _ in recorded()]
    holes = sum(1 for a, b in pairwise(numbers) if b != a + 1)
    assert rig.feed.losses == rig.feed.gaps == holes
    assert rig.exact()  # the last batch says that all was cleared
    assert rig.feed.holdings.blocks == 0


@pytest.mark.parametrize("number", range(12))
def test_whatever_happens_an_exact_feed_is_right(number: int) -> None:
    """Losses, cut links, restarts, clearings and slow replays in any order."""
    rig = Rig(buffer=random.Random(number).choice([3, 20, 10_000]))
    rig.rng = rng = random.Random(number)
    missed: Batches = []
    linked = True
    exact = 0
    rig.feed.linked()

    def relink() -> None:
        nonlocal linked
        linked = not linked
        (rig.feed.linked if linked else rig.feed.unlinked)()

    def restart() -> None:
        nonlocal linked
        rig.feed.unlinked()  # a process takes its sockets with it
        rig.start(buffer=rig.buffer.maxlen or 0)
        rig.batches(rng.randrange(40))
        if rng.random() < 0.5:
            rig.feed.restart_told()
        rig.feed.linked()
        linked = True

    def clear() -> None:
        rig.engine.clear()

    odd: list[Callable[[], None]] = [rig.answer, rig.feed.replay_failed, relink, restart, clear]
    for _ in range(600):
        made = rig.batches(rng.randrange(3))
        if linked and rng.random() < 0.97:
            rig.live(made)
        else:
            missed = made or missed
        if rng.random() < 0.15:
            rng.choice(odd)()
        if linked:
            rig.answer()
        rig.drain()
        if rig.exact() and rig.feed._next == rig.engine.number and not rig.engine.events:
            exact += 1
            assert rig.equal()
    assert exact > 10
    assert missed


def test_an_engine_whose_blocks_cannot_be_placed_is_not_believed() -> None:
    """Old SGLang names blocks by their own tokens, and its first block's parent is never told of."""
    rig = Rig()
    rig.feed.linked()
    rig.feed.replay_asked()
    rig.feed.replay_ended()
    rig.drain()
    assert rig.changes == [True]
    for number in range(100):
        ids = list(range(number, number + 16))
        event = {"type": "BlockStored", "block_hashes": [number + 1], "parent_block_hash": 2**40}
        event |= {"token_ids": ids, "block_size": 16}
        rig.feed.live(number, msgspec.msgpack.encode([0.0, [event], 0]))
    rig.drain()
    assert rig.changes == [True, False]
    assert rig.feed.losses == 1


def test_a_batch_that_comes_before_the_news_of_the_link_hides_none_before_it() -> None:
    """The subscription and its monitor are two sockets: which is read first is chance."""
    rig = Rig()
    batches = rig.batches(20)
    rig.live(batches[17:19])
    rig.drain()
    rig.feed.linked()
    assert rig.feed.replay_from == 0
    rig.live(batches[19:])
    rig.answer()
    rig.drain()

    assert rig.exact()
    assert rig.equal()
    assert rig.feed.losses == rig.feed.restarts == 0
