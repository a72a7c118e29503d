"""One engine's holdings, from its events, by example."""

import random
from typing import Any

import msgspec
import pytest

from gateway.core.exact import MAX_ADAPTERS, MAX_MEDIA, Holdings
from gateway.core.kv_events import Cleared, Decoder, Removed, Stored
from tests.kv_kit import SeenIndex, ToyEngine, chain, recorded, seed

IDS = list(range(100, 164))


def holdings(block: int = 16, **options: Any) -> tuple[SeenIndex, Holdings]:
    index = SeenIndex()
    return index, Holdings(index, 3, seed, block, **options)


def stored(names: list[Any], ids: list[int], size: int = 16, **fields: Any) -> Stored:
    return Stored(block_hashes=names, token_ids=ids, block_size=size, **fields)


def test_recorded_events_of_vllm_give_the_prompts_chain() -> None:
    index, held = holdings(block=32)
    for _, payload in recorded()[:2]:
        for event in Decoder().decode(payload).events:
            held.apply(event)

    first = Decoder().decode(recorded()[0][1]).events[0]
    assert isinstance(first, Stored)
    assert index.depth(3, chain(first.token_ids, 32)) == 1
    assert index.depth(3, chain(first.token_ids, 32, cache_salt="tenant-a")) == 1
    assert index.depth(3, chain(first.token_ids, 32, cache_salt="tenant-b")) == 0
    assert held.unknown == held.foreign == held.broken == 0


def test_recorded_clearing_empties_the_index() -> None:
    index, held = holdings(block=32)
    for _, payload in recorded()[:3]:
        for event in Decoder().decode(payload).events:
            held.apply(event)

    assert not index.held
    assert held.blocks == 0


def test_recorded_blocks_whose_parent_was_never_told_of_are_counted_and_left_out() -> None:
    index, held = holdings(block=32)
    orphan = recorded()[3]
    for event in Decoder().decode(orphan[1]).events:
        held.apply(event)

    assert held.unknown == held.stored > 1
    assert not index.held
    assert held.blocks == 0


def test_blocks_go_on_from_their_parent() -> None:
    index, held = holdings()
    held.apply(stored([1, 2], IDS[:32]))
    held.apply(stored([3, 4], IDS[32:], parent_block_hash=2))

    assert index.depth(3, chain(IDS)) == 4


def test_a_removed_block_is_held_no_more() -> None:
    index, held = holdings()
    held.apply(stored([1, 2, 3], IDS[:48]))
    held.apply(Removed([3]))

    assert index.depth(3, chain(IDS)) == 2
    assert held.blocks == 2
    assert (held.stored, held.removed) == (3, 1)


def test_a_block_with_two_copies_is_held_until_both_are_gone() -> None:
    index, held = holdings()
    held.apply(stored([1], IDS[:16]))
    held.apply(stored([1], IDS[:16]))
    held.apply(Removed([1]))
    assert index.depth(3, chain(IDS)) == 1

    held.apply(Removed([1]))
    assert index.depth(3, chain(IDS)) == 0
    assert held.blocks == 0


def test_a_block_offloaded_is_held_until_no_medium_has_it() -> None:
    index, held = holdings()
    held.apply(stored([1, 2], IDS[:32], medium="GPU"))
    held.apply(Stored([1, 2], medium="CPU"))
    held.apply(Removed([2, 1], medium="GPU"))
    assert index.depth(3, chain(IDS)) == 2

    held.apply(stored([3], IDS[32:48], parent_block_hash=2, medium="GPU"))
    assert index.depth(3, chain(IDS)) == 3

    held.apply(Removed([3], medium="GPU"))
    held.apply(Removed([2], medium="CPU"))
    assert index.depth(3, chain(IDS)) == 1


def test_a_copy_of_a_block_never_told_of_is_unknown() -> None:
    index, held = holdings()
    held.apply(Stored([1], medium="CPU"))

    assert held.unknown == 1
    assert not index.held


def test_lora_blocks_belong_to_the_adapter() -> None:
    index, held = holdings()
    held.apply(stored([1], IDS[:16], lora_id=4, lora_name="sql", extra_keys=[["sql"]]))

    assert index.depth(3, chain(IDS, adapter="sql")) == 1
    assert index.depth(3, chain(IDS)) == 0
    assert held.adapters == {"sql"}


def test_an_adapter_and_a_cache_salt_go_together() -> None:
    index, held = holdings()
    keys: list[list[Any] | None] = [["sql", "tenant"], ["sql"]]
    held.apply(stored([1, 2], IDS[:32], lora_name="sql", extra_keys=keys))

    assert index.depth(3, chain(IDS, adapter="sql", cache_salt="tenant")) == 2
    assert index.depth(3, chain(IDS, adapter="sql")) == 0


def test_an_adapter_without_a_name_matches_nobody() -> None:
    index, held = holdings()
    held.apply(stored([1], IDS[:16], lora_id=4))

    assert not index.held.get(3)
    assert held.foreign == 1


def test_blocks_from_an_image_on_match_no_prompt_of_ours() -> None:
    index, held = holdings()
    keys: list[list[Any] | None] = [None, [["picture", 0]], None]
    held.apply(stored([1, 2, 3], IDS[:48], extra_keys=keys))
    held.apply(stored([4], IDS[48:], parent_block_hash=3))

    assert index.depth(3, chain(IDS)) == 1
    assert held.foreign == 3
    assert held.unknown == 0
    held.apply(Removed([4, 3, 2]))
    assert held.blocks == 1


def test_groups_that_prove_no_prefix_are_passed_over() -> None:
    index, held = holdings()
    held.apply(stored([9], IDS[:16], group_idx=1, kv_cache_spec_kind="sliding_window"))
    held.apply(stored([1, 2], IDS[:32], group_idx=0, kv_cache_spec_kind="full_attention"))
    held.apply(Removed([2], group_idx=1))
    assert index.depth(3, chain(IDS)) == 2

    held.apply(Removed([2], group_idx=0))
    assert index.depth(3, chain(IDS)) == 1


@pytest.mark.parametrize("size", [1, 8, 32, 64, 24])
def test_engine_blocks_of_another_size_give_the_same_chain(size: int) -> None:
    index, held = holdings()
    ids = random.Random(size).choices(range(1000), k=192)
    cut = size * (96 // size)
    names: list[int | bytes] = [f"h{end}".encode() for end in range(size, 193, size)]
    held.apply(stored(names[: cut // size], ids[:cut], size))
    assert index.depth(3, chain(ids)) == cut // 16

    rest = stored(names[cut // size :], ids[cut : len(names) * size], size)
    rest.parent_block_hash = names[cut // size - 1]
    held.apply(rest)
    assert index.depth(3, chain(ids)) == len(names) * size // 16

    held.apply(Removed(names[1:]))
    assert index.depth(3, chain(ids)) == size // 16


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 2, 1], [2, 3, 1]])
def test_our_block_that_several_of_the_engine_s_begin_with_is_held_until_all_are_gone(
    order: list[int],
) -> None:
    index, held = holdings()
    ends: dict[int, list[int]] = {1: IDS[16:32], 2: IDS[32:48], 3: IDS[48:64]}
    for name, end in ends.items():
        held.apply(stored([name], IDS[:16] + end, size=32))
        held.apply(stored([name], IDS[:16] + end, size=32, medium="CPU"))
    held.apply(Stored([1], medium="CPU"))
    held.apply(Removed([1], medium="CPU"))
    for name in order:
        assert index.depth(3, chain(IDS[:16] + ends[name])) == 2
        held.apply(Removed([name], medium="CPU"))
        assert index.depth(3, chain(IDS[:16] + ends[name])) == 2
        held.apply(Removed([name]))
        assert index.depth(3, chain(IDS[:16] + ends[name])) == (name != order[-1])
    assert index.held == {}
    assert not held._twice


def test_clearing_forgets_what_was_held_under_several_names() -> None:
    index, held = holdings()
    held.apply(stored([1], IDS[:32], size=32))
    held.apply(stored([2], IDS[:16] + IDS[32:48], size=32))
    held.clear()
    held.apply(stored([1], IDS[:32], size=32))
    held.apply(Removed([1]))
    assert index.held == {}


@pytest.mark.parametrize(
    "event",
    [
        stored([1], IDS[:15]),
        stored([1, 2], IDS[:16]),
        stored([1], [2**32, *IDS[:15]]),
        stored([1], [-1, *IDS[:15]]),
        stored([1], IDS[:16], size=0),
    ],
)
def test_an_event_that_contradicts_itself_is_counted_and_left_out(event: Stored) -> None:
    index, held = holdings()
    held.apply(event)

    assert held.broken == len(event.block_hashes)
    assert not index.held


def test_an_engine_that_claims_too_much_is_not_kept() -> None:
    index, held = holdings(max_blocks=2)
    full = []
    for event in (
        stored([1, 2], IDS[:32]),
        stored([3], IDS[32:48], parent_block_hash=2),
        Removed([2]),
        Cleared(),
    ):
        held.apply(event)
        full.append(held.full)

    assert full == [False, True, True, False]
    assert not index.held


def test_media_and_adapters_are_capped() -> None:
    _, held = holdings()
    for number in range(MAX_MEDIA + 5):
        held.apply(stored([number], IDS[:16], medium=f"tier{number}"))
    assert held.blocks == MAX_MEDIA

    for number in range(MAX_ADAPTERS + 5):
        held.apply(stored([1000 + number], IDS[:16], lora_name=f"a{number}"))
    assert len(held.adapters) == MAX_ADAPTERS


def test_what_was_cleared_is_unknown_at_once_and_freed_in_slices() -> None:
    index, held = holdings()
    ids = list(range(1024))
    held.apply(stored(list(range(64)), ids))
    full = index.bytes
    held.clear()
    assert held.blocks == 0
    assert index.depth(3, chain(ids)) == 0
    assert index.bytes > full  # ours to give back now, the engine's side too

    assert held.sweep(40)
    held.apply(stored([1], ids[:16]))  # under another bit: what is swept cannot touch it
    assert not held.sweep(40)
    assert index.depth(3, chain(ids)) == 1
    assert len(index.stretches) == 1


def test_nothing_an_engine_can_say_raises() -> None:
    rng = random.Random(5)
    _, held = holdings(max_blocks=500)
    engine = ToyEngine(rng, blocks=50)
    for _ in range(300):
        engine.run(rng.choices(range(5), k=rng.randrange(200)))
        _, payload = engine.batch()
        for event in Decoder().decode(payload).events:
            damaged = msgspec.structs.asdict(event)
            field = rng.choice([*damaged, "none"])
            if field == "block_hashes":
                damaged[field] = damaged[field][: rng.randrange(3)]
            elif field == "token_ids":
                damaged[field] = damaged[field][rng.randrange(3) :]
            elif field in ("parent_block_hash", "extra_keys"):
                damaged[field] = rng.choice([None, []] if field == "extra_keys" else [None, 5, b""])
            kind = Stored if isinstance(event, Stored) else Removed
            held.apply(kind(**damaged))
    assert held.stored


def test_a_name_told_again_for_another_text_stands_for_the_first_and_leaves_nothing() -> None:
    """Old SGLang names a block by its own tokens: the same one after two beginnings."""
    index, held = holdings()
    one, other, after = IDS[:16], IDS[16:32], IDS[32:48]
    held.apply(stored([b"one", b"after"], one + after))
    held.apply(stored([b"other", b"after"], other + after))

    assert index.depth(3, chain(one + after)) == 2
    assert index.depth(3, chain(other + after)) == 1
    assert held.broken == held.lost == 1
    held.apply(Removed([b"one", b"other", b"after", b"after"]))
    assert not index.stretches
    assert held.blocks == 0


def test_names_told_again_over_and_over_take_no_more_memory() -> None:
    index, held = holdings()
    for number in range(100):
        held.apply(stored([b"first", b"same"], [*range(number, number + 16), *IDS[:16]]))
    assert len(index.stretches) == 2
    assert held.blocks == 2


def test_a_name_told_twice_in_one_event_leaves_nothing() -> None:
    index, held = holdings()
    held.apply(stored([b"same", b"same", b"next"], IDS[:48]))
    held.apply(Removed([b"next", b"same", b"same"]))
    assert not index.stretches
    assert held.blocks == 0


def test_a_name_of_tokens_told_again_for_media_leaves_nothing() -> None:
    index, held = holdings()
    held.apply(stored([b"one"], IDS[:16]))
    held.apply(stored([b"one"], IDS[:16], extra_keys=[[["image", 1]]]))
    assert index.depth(3, chain(IDS[:16])) == 1
    held.apply(Removed([b"one", b"one"]))
    assert not index.stretches
