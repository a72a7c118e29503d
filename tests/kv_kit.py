"""An engine's KV cache in miniature, and what a prefix index should know of it."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from xxhash import xxh3_64_intdigest, xxh128_digest

from gateway.core.chain import chain_tokens, token_seed
from gateway.core.exact_index import ExactIndex

SALT = 77
MODEL = "m"
SAMPLES = Path(__file__).parent / "samples" / "vllm-0.32"


def recorded() -> list[tuple[int, bytes]]:
    """The recorded batches of a real vLLM 0.32, with their numbers, as they were on the wire."""
    lines = (SAMPLES / "kv_events_selected.jsonl").read_bytes().splitlines()
    rows = [orjson.loads(line) for line in lines]
    return [(row["seq"], msgspec.msgpack.encode(row["batch"])) for row in rows if row["batch"]]


def seed(adapter: str | None = None, cache_salt: str = "") -> int:
    """Where chains of the model start, as the prompters would have it."""
    return token_seed(SALT, model=adapter or MODEL, cache_salt=cache_salt)


def chain(
    ids: Sequence[int], block: int = 16, *, adapter: str | None = None, cache_salt: str = ""
) -> "array[int]":
    """A prompt's own hashes."""
    return chain_tokens(ids, seed(adapter, cache_salt), block)


class SeenIndex(ExactIndex):
    """The product's index, looked into."""

    @property
    def held(self) -> dict[int, set[int]]:
        """What each slot holds, by our hashes."""
        found = {
            slot: {own for own, there in self.stretches.items() if there.mask >> lane & 1}
            for slot, lane in self._lane_of.items()
        }
        return {slot: owns for slot, owns in found.items() if owns}

    def depth(self, slot: int, hashes: "array[int]") -> int:
        """The leading blocks of a prompt that a slot holds."""
        held = self.lookup(hashes, 1 << self._lane_of[slot], len(hashes))
        return held[0][0] if held else 0


class ToyEngine:
    """Caches blocks least recently used, tails first, and tells as vLLM or SGLang do.

    `form` is the encoding of events, `wide` hashes are 32 bytes, `twice` = now and then a block is
    held in two copies, both told of (vLLM does not deduplicate what ran at the same time).
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        blocks: int = 200,
        block: int = 16,
        form: str = "map",
        wide: bool = False,
        twice: bool = False,
    ) -> None:
        self.rng = rng
        self.block = block
        self.cached: dict[Any, tuple[int, ...]] = {}  # engine hash -> ids from the start; LRU first
        self.copies: dict[Any, int] = {}
        self.events: list[Any] = []
        self.number = 0
        self._room = blocks
        self._form = form
        self._wide = wide
        self._twice = twice
        self._secret = rng.randbytes(8)

    def name(self, ids: Sequence[int], extra: Sequence[Any] = ()) -> Any:
        """The engine's own hash of the last block of `ids`."""
        data = self._secret + array("I", ids).tobytes() + repr(list(extra)).encode()
        return xxh128_digest(data) * 2 if self._wide else xxh3_64_intdigest(data)

    def run(self, ids: Sequence[int], *, adapter: str | None = None, cache_salt: str = "") -> int:
        """Compute and cache a sequence; return how many of its tokens were cached before."""
        extra = [key for key in (adapter, cache_salt) if key]
        size = self.block
        ends = range(size, len(ids) + 1, size)
        names = [self.name(ids[:end], extra) for end in ends]
        hit = next((i for i, name in enumerate(names) if name not in self.cached), len(names))
        fresh = names[hit:]
        if self._twice and hit and self.rng.random() < 0.3:
            self.copies[names[hit - 1]] = self.copies.get(names[hit - 1], 0) + 1
            self.store(ids, names, hit - 1, hit, adapter=adapter, cache_salt=cache_salt)
        if fresh:
            self.store(ids, names, hit, len(names), adapter=adapter, cache_salt=cache_salt)
        for name, end in reversed(list(zip(names, ends, strict=True))):
            self.cached.pop(name, None)
            self.cached[name] = tuple(ids[:end])
        while len(self.cached) > self._room:
            self.evict()
        return hit * size

    def store(
        self,
        ids: Sequence[int],
        names: Sequence[Any],
        start: int,
        stop: int,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> None:
        size = self.block
        keys: list[Any] = [[adapter] if adapter else None for _ in range(start, stop)]
        if cache_salt and start == 0:
            keys[0] = [*(keys[0] or []), cache_salt]
        event = {
            "type": "BlockStored",
            "block_hashes": list(names[start:stop]),
            "parent_block_hash": names[start - 1] if start else None,
            "token_ids": list(ids[start * size : stop * size]),
            "block_size": size,
            "lora_id": 1 if adapter else None,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self._tell(event)

    def evict(self) -> None:
        name = next(iter(self.cached))
        if self.copies.get(name):  # one copy goes; the other was used later, with all before it
            self.copies[name] -= 1
            before = {ids: other for other, ids in self.cached.items()}
            ids = self.cached[name]
            for end in range(len(ids), 0, -self.block):
                if (other := before.get(ids[:end])) is not None:
                    self.cached[other] = self.cached.pop(other)
            self._tell({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})
            return
        del self.cached[name]
        self._tell({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def clear(self) -> None:
        self.cached.clear()
        self.copies.clear()
        self._tell({"type": "AllBlocksCleared"})

    def batch(self) -> tuple[int, bytes]:
        """The events since the last batch, numbered and packed."""
        events, self.events = self.events, []
        number, self.number = self.number, self.number + 1
        return number, msgspec.msgpack.encode([1.5, events, 0])

    def prompts(self) -> list[tuple[int, ...]]:
        """Every cached block, as the sequence that ends with it."""
        return list(self.cached.values())

    def _tell(self, event: dict[str, Any]) -> None:
        self.events.append(list(event.values()) if self._form == "array" else event)


def talk(rng: random.Random, said: list[list[int]], block: int = 16) -> list[int]:
    """A prompt that shares a prefix with an earlier one, or none; remembers it in `said`."""
    base: list[int] = []
    if said and rng.random() < 0.8:
        base = rng.choice(said)
        base = base[: rng.randrange(len(base) + 1)]
    new = [rng.randrange(200_000) for _ in range(rng.randrange(1, 6 * block))]
    ids = (base + new)[: 40 * block]
    said.append(ids)
    del said[:-30]
    return ids
