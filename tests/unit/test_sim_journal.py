"""The simulated engine's events: what they say is what its block pool holds."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from gateway.sim import tokens
from gateway.sim.engine import Engine, Job
from gateway.sim.journal import Journal
from gateway.sim.profiles import DEMO
from tests.kv_kit import SeenIndex, chain, seed

BLOCK = 16
SMALL = replace(
    DEMO, name="small", block_tokens=BLOCK, engine=replace(DEMO.engine, kv_tokens=BLOCK * 120)
)


def job(name: str, ids: bytes, output: int, salt: str = "") -> Job:
    hashes = tokens.chain(ids, BLOCK, salt)
    return Job(name, tokens.count(ids) - output, output, hashes, ids, salt)


def test_blocks_stored_together_are_one_event() -> None:
    journal = Journal(BLOCK)
    ids = random.Random(1).randbytes(BLOCK * 4 * 3)
    hashes = tokens.chain(ids, BLOCK)
    for at in range(3):
        journal.stored(hashes, at, ids, "salt")
    journal.evicted(hashes[2])
    journal.stored(hashes, 2, ids, "salt")

    first, second, third = journal.take()
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert first["block_hashes"] == hashes
    assert first["token_ids"] == tokens.unpack(ids)
    assert first["extra_keys"] == [["salt"], None, None]
    assert first["parent_block_hash"] is None
    assert third["parent_block_hash"] == hashes[1]
    assert third["extra_keys"] == [None]
    assert second == {
        "type": "BlockRemoved",
        "block_hashes": [hashes[2]],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert journal.take() == []


@pytest.mark.parametrize("arrays", [False, True])
def test_a_feed_of_the_events_holds_what_the_pool_holds(arrays: bool) -> None:
    rng = random.Random(2)
    journal = Journal(BLOCK, arrays=arrays)
    engine = Engine(SMALL, journal=journal)
    index = SeenIndex()
    feed = Feed(Holdings(index, 0, seed, BLOCK), lambda: None)
    feed.linked()
    feed.replay_ended()
    heads = [rng.randbytes(BLOCK * 4 * 8) for _ in range(6)]
    jobs: list[Job] = []
    batches = 0
    now = 0.0
    for number in range(400):
        ids = rng.choice(heads) + rng.randbytes(4 * rng.randrange(4, 300))
        jobs.append(job(str(number), ids, 3, rng.choice(["", "x"])))
        engine.submit(jobs[-1], now)
        now += rng.expovariate(3.0)
        engine.advance(now)
        if rng.random() < 0.1:
            engine.abort(rng.choice(jobs), now)
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        events: Any = journal.take()
        if not events:
            continue
        feed.live(batches, msgspec.msgpack.encode([now, events, 0]))
        batches += 1
        while feed.step():
            pass
        held = engine.pool.counts()
        assert feed.holdings.blocks == len(held)
        expected = {
            own
            for j in jobs
            for engine_hash, own in zip(
                j.hashes, chain(tokens.unpack(j.ids), cache_salt=j.salt), strict=True
            )
            if engine_hash in held
        }
        assert index.held.get(0, set()) == expected
    assert feed.exact
    assert feed.holdings.removed > 100
    assert feed.holdings.unknown == 0
