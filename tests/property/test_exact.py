"""Model test: what the index knows from events is what the engine's cache holds, after every batch."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from tests.kv_kit import SeenIndex, ToyEngine, chain, seed, talk

FORMS = [
    {"form": form, "wide": wide, "twice": twice}
    for form in ("map", "array")
    for wide in (False, True)
    for twice in (False, True)
]


def agree(
    index: SeenIndex, engine: ToyEngine, prompts: list[tuple[list[int], dict[str, Any]]]
) -> None:
    """Every prompt's depth is the number of its leading blocks that the cache holds."""
    size = engine.block
    for ids, keys in prompts:
        extra = [key for key in (keys.get("adapter"), keys.get("cache_salt")) if key]
        depth = 0
        while (depth + 1) * size <= len(ids):
            if engine.name(ids[: (depth + 1) * size], extra) not in engine.cached:
                break
            depth += 1
        assert index.depth(0, chain(ids, **keys)) == depth * size // 16


def drain(feed: Feed) -> None:
    while feed.step():
        pass


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_index_equals_cache_after_every_batch(form: dict[str, Any]) -> None:
    rng = random.Random(str(form))
    engine = ToyEngine(rng, blocks=150, **form)
    index = SeenIndex()
    feed = Feed(Holdings(index, 0, seed, 16), lambda: None)
    said: list[list[int]] = []
    prompts: list[tuple[list[int], dict[str, Any]]] = []
    for _ in range(400):
        for _ in range(rng.randrange(3)):
            keys = rng.choice([{}, {}, {"adapter": "sql"}, {"cache_salt": "x"}])
            ids = talk(rng, said)
            engine.run(ids, **keys)
            prompts.append((ids, keys))
        if rng.random() < 0.01:
            engine.clear()
        feed.live(*engine.batch())
        drain(feed)
        agree(index, engine, prompts[-8:])
        assert len(index.held.get(0, ())) == len(engine.cached)
        assert feed.holdings.blocks == len(engine.cached)
    assert feed.holdings.unknown == feed.losses == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 4, 16, 32, 48]),
    st.lists(st.sampled_from(["run", "run", "run", "evict", "clear", "batch"]), max_size=40),
)
def test_index_equals_cache_whatever_the_engine_s_block_size(
    number: int, block: int, steps: list[str]
) -> None:
    rng = random.Random(number)
    engine = ToyEngine(rng, blocks=100 * 16 // block, block=block)
    index = SeenIndex()
    feed = Feed(Holdings(index, 0, seed, 16), lambda: None)
    said: list[list[int]] = []
    for step in [*steps, "batch"]:
        if step == "run":
            engine.run(talk(rng, said))
        elif step == "evict":
            for _ in range(min(len(engine.cached), 40)):
                engine.evict()
        elif step == "clear":
            engine.clear()
        elif step == "batch":
            feed.live(*engine.batch())
            drain(feed)
            held = {own for ids in engine.prompts() for own in chain(ids)}
            assert index.held.get(0, set()) == held
    assert feed.holdings.broken == feed.holdings.unknown == 0


@pytest.mark.parametrize("block", [8, 24, 32, 48])
def test_index_equals_a_cache_of_other_blocks_whose_prompts_part_within_one(block: int) -> None:
    rng = random.Random(block)
    engine = ToyEngine(rng, blocks=60 * 16 // block, block=block)
    index = SeenIndex()
    feed = Feed(Holdings(index, 0, seed, 16), lambda: None)
    said: list[list[int]] = []
    for step in range(300):
        engine.run(talk(rng, said, block=4))
        for _ in range(rng.randrange(3)):
            if engine.cached:
                engine.evict()
        if step % 50 == 49:
            engine.clear()
        feed.live(*engine.batch())
        drain(feed)
        assert index.held.get(0, set()) == {own for ids in engine.prompts() for own in chain(ids)}
    assert feed.holdings.broken == feed.holdings.unknown == 0
