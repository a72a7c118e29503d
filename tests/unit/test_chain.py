"""Block chains by example."""

import random
import struct
from array import array

import pytest
import xxhash

from gateway.core.chain import (
    NARROW_BYTES,
    chain_bytes,
    chain_tokens,
    narrow_blocks,
    token_seed,
)
from gateway.core.types import Chain

SALT = 0xDEADBEEF


def test_each_hash_is_seeded_with_the_one_before() -> None:
    data = random.Random(1).randbytes(600)
    first = xxhash.xxh3_64_intdigest(data[:256], SALT)
    second = xxhash.xxh3_64_intdigest(data[256:512], first)
    assert list(chain_bytes(data, SALT)) == [first, second]


def test_only_full_blocks_are_hashed() -> None:
    assert len(chain_bytes(b"x" * 255, SALT)) == 0
    assert len(chain_bytes(b"x" * 256, SALT)) == 1
    assert len(chain_bytes(b"", SALT)) == 0


def test_another_salt_gives_other_hashes() -> None:
    data = b"x" * 2048
    assert not set(chain_bytes(data, 1)) & set(chain_bytes(data, 2))


def test_equal_blocks_at_different_places_have_different_hashes() -> None:
    assert len(set(chain_bytes(b"x" * 25_600, SALT))) == 100


@pytest.mark.parametrize("size", [255, 256, 257, 262_143, 262_144, 262_655, 262_656, 400_001])
def test_growing_data_keeps_the_hashes_it_had(size: int) -> None:
    data = random.Random(2).randbytes(600_000)
    whole, part = chain_bytes(data, SALT), chain_bytes(data[:size], SALT)
    assert whole[: len(part)] == part
    wide = max(0, size - NARROW_BYTES) // 512
    assert len(part) == min(size, NARROW_BYTES) // 256 + wide


@pytest.mark.parametrize("block_bytes", [16, 100, 256, 1000])
def test_border_lies_between_blocks_of_any_size(block_bytes: int) -> None:
    data = random.Random(3).randbytes(NARROW_BYTES + 10 * block_bytes)
    chain = chain_bytes(data, SALT, block_bytes)
    border = narrow_blocks(block_bytes) * block_bytes
    first_wide = data[border : border + 2 * block_bytes]
    before = chain[narrow_blocks(block_bytes) - 1]
    assert chain[narrow_blocks(block_bytes)] == xxhash.xxh3_64_intdigest(first_wide, before)


def test_tiny_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        chain_bytes(b"x", SALT, 8)


def test_hit_tokens_count_wide_blocks_twice() -> None:
    hashes = chain_bytes(b"x" * (NARROW_BYTES + 5120), SALT)
    chain = Chain(hashes, 64.0, tokens=66_800, narrow_blocks=narrow_blocks(256))
    assert len(hashes) == 1024 + 10
    assert chain.hit_tokens(1024) == 1024 * 64
    assert chain.hit_tokens(1025) == 1024 * 64 + 128
    assert chain.hit_tokens(1033) == 1042 * 64
    assert chain.hit_tokens(1034) == 66_800


def test_token_blocks_are_hashed_as_little_endian_words() -> None:
    ids = [1, 2, 3, 2**32 - 1, 5]
    first = xxhash.xxh3_64_intdigest(struct.pack("<2I", 1, 2), SALT)
    second = xxhash.xxh3_64_intdigest(struct.pack("<2I", 3, 2**32 - 1), first)
    assert list(chain_tokens(ids, SALT, 2)) == [first, second]
    assert chain_tokens(array("I", ids), SALT, 2) == chain_tokens(tuple(ids), SALT, 2)


@pytest.mark.parametrize("cut", [0, 1, 7, 40])
def test_token_chain_goes_on_from_any_block(cut: int) -> None:
    ids = array("I", range(1000))
    whole = chain_tokens(ids, SALT, 16)
    seed = whole[cut - 1] if cut else SALT
    assert whole[:cut] + chain_tokens(ids[cut * 16 :], seed, 16) == whole


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_token_ids_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        chain_tokens([token], SALT, 16)


def test_seeds_differ_in_each_of_their_parts() -> None:
    seeds = [
        token_seed(SALT, model="m"),
        token_seed(SALT + 1, model="m"),
        token_seed(SALT, model="n"),
        token_seed(SALT, model="m", cache_salt="x"),
        token_seed(SALT, model="m", isolation="x"),
        token_seed(SALT, model="mx"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert token_seed(SALT + 2**64, model="m") == seeds[0]
