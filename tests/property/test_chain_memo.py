from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.chain import NARROW_BYTES, chain_bytes
from gateway.core.chain_memo import CHECKPOINT_BLOCKS, MAX_ENTRIES, ChainMemo

SALT = 7
BLOCK = 16
STRIDE = CHECKPOINT_BLOCKS * BLOCK

pieces = st.tuples(st.integers(0, 3), st.integers(0, 3 * STRIDE))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(pieces, max_size=4)), max_size=12))
def test_a_chain_is_the_same_with_and_without_memory(
    prompts: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    memo = ChainMemo(SALT, BLOCK)
    seen = [b""]
    for base, parts in prompts:  # each prompt grows, cuts or repeats an earlier one
        data = seen[base % len(seen)]
        for letter, length in parts:
            data += bytes([65 + letter]) * length
        data = data[: 40 * STRIDE]
        seen.append(data)

        assert memo.chain(data) == chain_bytes(data, SALT, BLOCK)
        assert memo.chain(data) == chain_bytes(data, SALT, BLOCK)


def test_the_border_of_wide_blocks_is_kept() -> None:
    memo = ChainMemo(SALT, 256)
    data = bytes(range(256)) * ((NARROW_BYTES + 50_000) // 256)
    for size in (NARROW_BYTES - 256, NARROW_BYTES - 1, NARROW_BYTES, NARROW_BYTES + 700, len(data)):
        assert memo.chain(data[:size]) == chain_bytes(data[:size], SALT, 256)


def test_what_a_caller_does_to_its_chain_is_not_remembered() -> None:
    memo = ChainMemo(SALT, BLOCK)
    data = b"x" * (4 * STRIDE)
    memo.chain(data)[0] = 0

    assert memo.chain(data) == chain_bytes(data, SALT, BLOCK)


def test_the_memory_is_bounded() -> None:
    memo = ChainMemo(SALT, BLOCK)
    for number in range(3 * MAX_ENTRIES):
        memo.chain(number.to_bytes(8, "little") * (STRIDE // 8))

    assert len(memo._known) == MAX_ENTRIES
