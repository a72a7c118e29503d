"""Bytes to a chain of block hashes: the hash of each block is seeded with the one before it.

Must not depend on how long the data is: a block's hash is the same in every longer stream.
"""

from array import array
from struct import iter_unpack
from typing import Final

from xxhash import xxh3_64_intdigest as _hashed

BLOCK_BYTES: Final = 256
NARROW_BYTES: Final = 256 * 1024
"""Up to here blocks have their normal size; beyond, double: half the memory where it matters.

The switch is at a position, not by total length, so a growing prompt keeps its early blocks.
"""

MIN_BLOCK_BYTES: Final = 16


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


def _chain(data: bytes, link: int, block_bytes: int) -> list[int]:
    full = memoryview(data)[: len(data) // block_bytes * block_bytes]
    # One C iterator that cuts the blocks: 40 % less than slicing in a loop.
    return [link := _hashed(block, link) for (block,) in iter_unpack(f"{block_bytes}s", full)]
