"""Print what KV events cost: decode and apply per block, lookup beside the budgets, memory.

Run: python -m loadtest.bench_events. Prints figures, asserts nothing: machines differ.
"""

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.core.chain import chain_tokens, token_seed
from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from gateway.core.exact_index import ExactIndex
from gateway.core.exactness import Exactness
from gateway.core.trie import RadixTrie
from gateway.core.types import Chain

BLOCK = 16
BACKENDS = 64
BLOCKS_PER_PROMPT = 512  # one prefill step of vLLM: 8,192 tokens
PROMPTS = 200
RUNS = 5  # of the same work, the least counts: a neighbour's share is not ours


def main() -> None:
    for name, wide, maps in (
        ("maps, integers (vLLM)", False, True),
        ("maps, 32 bytes (vLLM, VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)", True, True),
        ("arrays, integers (SGLang, pages of 16)", False, False),
    ):
        rates(name, wide=wide, maps=maps)
    decode_steps()
    lookups()
    memory()


def seed(adapter: str | None, cache_salt: str) -> int:
    return token_seed(1, model=adapter or "m", cache_salt=cache_salt)


def feed_of(index: ExactIndex, slot: int) -> Feed:
    feed = Feed(Holdings(index, slot, seed, BLOCK), lambda: None)
    feed.linked()
    feed.replay_ended()
    return feed


def stored(names: list[Any], parent: Any, ids: list[int], *, maps: bool) -> Any:
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event if maps else list(event.values())[:7]


def removed(names: list[Any], *, maps: bool) -> Any:
    event = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
    return event if maps else list(event.values())[:3]


def names_of(rng: random.Random, count: int, *, wide: bool) -> list[Any]:
    return [rng.randbytes(32) if wide else rng.getrandbits(64) for _ in range(count)]


def timed(feed: Feed, batches: list[bytes], first: int) -> float:
    """CPU seconds to decode and apply batches, everything included."""
    start = time.thread_time()
    for number, payload in enumerate(batches, first):
        feed.live(number, payload)
        while feed.step():
            pass
    return time.thread_time() - start


def rates(name: str, *, wide: bool, maps: bool) -> None:
    """Prompts are stored a step at a time and evicted block by block, as engines tell it."""
    rng = random.Random(1)
    ids = rng.choices(range(150_000), k=BLOCKS_PER_PROMPT * BLOCK)
    best_store = best_remove = float("inf")
    for _ in range(RUNS):
        gc.collect()
        feed = feed_of(ExactIndex(), 0)
        prompts = [names_of(rng, BLOCKS_PER_PROMPT, wide=wide) for _ in range(PROMPTS)]
        stores = []
        for number, names in enumerate(prompts):
            ids[0] = number
            stores.append(msgspec.msgpack.encode([1.0, [stored(names, None, ids, maps=maps)], 0]))
        best_store = min(best_store, timed(feed, stores, 0))
        drops = [
            msgspec.msgpack.encode(
                [1.0, [removed([block], maps=maps) for block in reversed(names)], 0]
            )
            for names in prompts
        ]
        best_remove = min(best_remove, timed(feed, drops, len(stores)))
        assert feed.holdings.blocks == 0
    blocks = PROMPTS * BLOCKS_PER_PROMPT
    both = 2 * blocks / (best_store + best_remove)
    print(
        f"{name}: stored {blocks / best_store / 1e6:.2f} M blocks/s, removed one by one "
        f"{blocks / best_remove / 1e6:.2f} M/s, both {both / 1e6:.2f} M/s (bar 0.4)"
    )


def decode_steps() -> None:
    """One block per event: sixteen sequences that decode, and SGLang's way to tell a prefill."""
    rng = random.Random(2)
    for what, lanes, maps in (
        ("of 16 sequences", 16, True),
        ("of 16 sequences, arrays", 16, False),
        ("of one sequence, arrays", 1, False),
    ):
        last: list[Any] = [None] * 16
        batches = []
        for _ in range(100):
            events = []
            for number in range(160):
                (name,) = names_of(rng, 1, wide=False)
                ids = rng.choices(range(150_000), k=BLOCK)
                lane = number % lanes
                events.append(stored([name], last[lane], ids, maps=maps))
                last[lane] = name
            batches.append(msgspec.msgpack.encode([1.0, events, 0]))
        best = float("inf")
        for _ in range(4 * RUNS):
            gc.collect()
            feed = feed_of(ExactIndex(), 0)
            best = min(best, timed(feed, batches, 0))
            assert feed.holdings.blocks == 100 * 160
        print(f"one block an event, {what}: {100 * 160 / best / 1e6:.2f} M blocks/s (bar 0.4)")


def lookups() -> None:
    """A 64k-token prompt that 64 backends hold to different depths, and merging with the trie."""
    rng = random.Random(3)
    ids = rng.choices(range(150_000), k=4096 * BLOCK)
    hashes = chain_tokens(ids, seed(None, ""), BLOCK)
    for name, depths in (
        ("64 backends, one depth", [2000] * BACKENDS),
        ("64 backends, four depths", [500 * (1 + slot % 4) for slot in range(BACKENDS)]),
        ("64 backends, 64 depths (worst)", [64 * slot + 1 for slot in range(BACKENDS)]),
    ):
        exactness = Exactness(RadixTrie())
        index = exactness.index
        for slot, depth in enumerate(depths):
            index.extend(index.take(slot), hashes[:depth])
            index.set_live(slot, frozenset({"m"}))
        lanes, _ = index.live["m"]
        alone = least(lambda: index.lookup(hashes, lanes, len(hashes)))  # noqa: B023
        prompt = Chain(hashes, float(BLOCK), BLOCK * len(hashes), exact=True)
        whole = least(lambda: exactness.lookup("m", prompt, 0.0))  # noqa: B023
        print(
            f"lookup of 4096 blocks, {name}: {alone:.1f} us, with the trie {whole:.1f}"
            " (budget 10, worst 20)"
        )


def least(call: Callable[[], object]) -> float:
    """CPU microseconds of one call, the least of many runs."""
    best = float("inf")
    for _ in range(40):
        start = time.thread_time()
        for _ in range(50):
            call()
        best = min(best, (time.thread_time() - start) / 50)
    return best * 1e6


def memory() -> None:
    """Bytes per block: what the engine's names cost per replica, what ours cost once."""
    rng = random.Random(4)
    for wide in (False, True):
        gc.collect()
        tracemalloc.start()
        index = ExactIndex()
        feed = feed_of(index, 0)
        for number in range(100):
            ids = [number, *rng.choices(range(150_000), k=BLOCKS_PER_PROMPT * BLOCK - 1)]
            names = names_of(rng, BLOCKS_PER_PROMPT, wide=wide)
            feed.live(
                number, msgspec.msgpack.encode([1.0, [stored(names, None, ids, maps=True)], 0])
            )
            while feed.step():
                pass
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        blocks = feed.holdings.blocks
        told = (feed.holdings.bytes + index.bytes) / blocks
        kind = "32-byte" if wide else "integer"
        print(f"memory: {used / blocks:.0f} B per block with {kind} names; {told:.0f} estimated")


if __name__ == "__main__":
    main()
