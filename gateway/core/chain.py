"""Bytes or token ids to block hashes: the hash of each block is seeded with the one before it.

Must not depend on how long the data is: a block's hash is the same in every longer stream.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from struct import Struct, iter_unpack
from typing import Final

import orjson
from xxhash import xxh3_64_intdigest as _hashed

BLOCK_BYTES: Final = 256
NARROW_BYTES: Final = 256 * 1024
"""Up to here blocks have their normal size; beyond, double: half the memory where it matters.

The switch is at a position, not by total length, so a growing prompt keeps its early blocks.
"""

MIN_BLOCK_BYTES: Final = 16
ID_BYTES: Final = 4
"""A token id is hashed as a little-endian 32-bit word."""

hash_block: Final = _hashed
"""`hash_block(data, link)` is the hash of one block after the one with the hash `link`."""

_64_BITS: Final = 0xFFFF_FFFF_FFFF_FFFF


def narrow_blocks(block_bytes: int) -> int:
    """Return how many leading blocks have the normal size."""
    return NARROW_BYTES // block_bytes


def chain_bytes(data: bytes, salt: int, block_bytes: int = BLOCK_BYTES) -> "array[int]":
    """Return the chained hashes of all full blocks of `data`.

    `salt` (64 bits) makes hashes of one cluster meaningless in another and collisions
    unpredictable. `block_bytes` is at least 16.
    """
    if block_bytes < MIN_BLOCK_BYTES:
        raise ValueError(f"block_bytes must be at least {MIN_BLOCK_BYTES}")
    if len(data) <= NARROW_BYTES - block_bytes:  # surely before the border
        return array("Q", _chain(data, salt, block_bytes))
    border = narrow_blocks(block_bytes) * block_bytes
    chain = _chain(data[:border], salt, block_bytes)
    if len(data) > border:
        chain += _chain(data[border:], chain[-1], 2 * block_bytes)
    return array("Q", chain)


def chain_blocks(data: bytes, link: int, block_bytes: int) -> "array[int]":
    """Return the hashes of `data`'s full blocks, chained on to `link`, the hash before them.

    From the salt on, this is token mode's whole chain: every block of `block_bytes`.
    """
    return array("Q", _chain(data, link, block_bytes))


def token_seed(salt: int, *, model: str, cache_salt: str = "", isolation: str = "") -> int:
    """Return where a chain of token blocks starts: what keeps prompts of equal tokens apart.

    Rules for whoever makes the same chain from an engine's KV events:
    - `salt` is the cluster's, as the prompters have it (64 bits; a wider one is cut).
    - `model` is what decides the KV content: the LoRA adapter's name where the event names one
      (`lora_name`), else the configured model's name, never an alias or the engine's own path.
    - `cache_salt` is the request's, "" where it has none. Engines put it into the extra keys of a
      sequence's first block only; the blocks after it follow by their parent.
    - `isolation` is never on an engine's wire: where keys are isolated (`index.isolate_keys`) events
      tell of nobody's chain and are not read.
    - The block size is no part of the seed: chains of different block sizes share no hash in
      practice, as their blocks hold different data.
    """
    parts = orjson.dumps((model, isolation, cache_salt))
    return _hashed(parts, salt & _64_BITS)


def chain_tokens(ids: Sequence[int], seed: int, block_tokens: int) -> "array[int]":
    """Return the chained hashes of all full blocks of `ids`, unsigned 32-bit token ids.

    `seed` is `token_seed`'s, or the hash of the block before `ids`: chaining goes on from there.

    Raises:
        OverflowError: an id has more than 32 bits or is negative.
    """
    words = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    if sys.byteorder != "little":
        words = words[:]
        words.byteswap()
    return array("Q", _chain(memoryview(words).cast("B"), seed, block_tokens * ID_BYTES))


def token_packer(block_tokens: int) -> Callable[..., bytes]:
    """Return what turns the ids of one block, as arguments, into the bytes for `hash_block`.

    It raises `struct.error` where they are too few, too many, or no unsigned 32-bit numbers.
    """
    return Struct(f"<{block_tokens}I").pack


def _chain(data: bytes | memoryview, link: int, block_bytes: int) -> list[int]:
    full = memoryview(data)[: len(data) // block_bytes * block_bytes]
    # One C iterator that cuts the blocks: 40 % less than slicing in a loop.
    return [link := _hashed(block, link) for (block,) in iter_unpack(f"{block_bytes}s", full)]
