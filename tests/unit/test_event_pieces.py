"""KV events joined and cut: the same is said, in pieces of a bounded size."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.core.event_pieces import pieces
from gateway.core.exact import Holdings
from gateway.core.kv_events import Decoder, Event, Removed, Stored
from tests.kv_kit import SeenIndex, ToyEngine, chain, seed, talk

MOST = 4


def stored(names: list[Any], ids: list[int], **fields: Any) -> Stored:
    return Stored(block_hashes=names, token_ids=ids, block_size=16, **fields)


def ids(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + 16 * blocks))


def taken(events: Iterable[Event | list[Stored]]) -> tuple[Any, ...]:
    index = SeenIndex()
    held = Holdings(index, 0, seed, 16)
    for event in events:
        if isinstance(event, list):
            held.store_each(event)
        else:
            held.apply(event)
    counts = (held.stored, held.removed, held.unknown, held.foreign, held.broken, held.blocks)
    return index.held, counts


def test_a_long_prompt_is_told_in_pieces() -> None:
    cut = list(pieces([stored(list(range(1, 31)), ids(30))], MOST, 16))
    assert [len(event.block_hashes) for event in cut if isinstance(event, Stored)] == [4] * 7 + [2]
    index = SeenIndex()
    held = Holdings(index, 0, seed, 16)
    for event in cut:
        assert isinstance(event, Stored)
        held.apply(event)
    assert index.depth(0, chain(ids(30))) == 30


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"parent_block_hash": 99},
        {"lora_name": "a", "extra_keys": [["a"]] * 30},
        {"extra_keys": [["salt"], *[None] * 29]},
        {"extra_keys": [*[None] * 13, [["image", 1]], *[None] * 16]},
        {"extra_keys": [["salt"]]},
        {"medium": "CPU"},
        {"lora_id": 3},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
    ],
)
def test_pieces_say_what_the_event_said(fields: dict[str, Any]) -> None:
    def events() -> list[Event]:
        return [stored(list(range(1, 31)), ids(30), **fields), Removed(list(range(20, 31)))]

    assert taken(list(pieces(events(), MOST, 16))) == taken(events())


def test_an_event_that_contradicts_itself_is_left_whole() -> None:
    odd = stored(list(range(1, 31)), ids(29))
    assert list(pieces([odd], MOST, 16)) == [odd]


@pytest.mark.parametrize("at", [0, 1])
def test_what_goes_on_with_media_is_not_joined_to_text(at: int) -> None:
    keys: list[list[Any] | None] = [None, None]
    keys[at] = [["image", 0]]

    def events() -> list[Event]:
        return [
            stored([1, 2], ids(2)),
            stored([3, 4], ids(2, 32), parent_block_hash=2, extra_keys=keys),
        ]

    assert taken(list(pieces(events(), 64, 16))) == taken(events())
    assert taken(events())[1][3] == 2 - at


@pytest.mark.parametrize("tokens", [0, 17])
def test_an_event_that_contradicts_itself_takes_none_with_it(tokens: int) -> None:
    def events() -> list[Event]:
        return [
            stored([1, 2], ids(2)),
            stored([3, 4], ids(2, 32)[:tokens], parent_block_hash=2),
            stored([2, 5], ids(2, 16), parent_block_hash=1),
        ]

    assert taken(list(pieces(events(), 64, 16))) == taken(events())


def test_copies_told_without_tokens_are_cut_too() -> None:
    first = stored(list(range(1, 31)), ids(30))
    copies = Stored(block_hashes=list(range(1, 31)), medium="CPU")
    assert taken(list(pieces([first, copies], MOST, 16))) == taken([first, copies])


def test_what_an_engine_tells_in_one_step_is_the_same_in_pieces() -> None:
    for form in range(20):
        engine = ToyEngine(random.Random(form), twice=True)
        said: list[list[int]] = []
        for _ in range(8):
            engine.run(talk(engine.rng, said))
        _, payload = engine.batch()
        whole = Decoder().decode(payload).events
        cut = list(pieces(Decoder().decode(payload).events, MOST, 16))
        assert taken(cut) == taken(whole)
        sizes = [len(e) if isinstance(e, list) else len(e.block_hashes) for e in cut]  # type: ignore[union-attr]
        assert max(sizes) < 3 * MOST


@pytest.mark.parametrize(
    "odd",
    [
        {"parent_block_hash": 99},
        {"parent_block_hash": None},
        {"lora_name": "a", "extra_keys": [["a"]]},
        {"extra_keys": [[["image", 1]]]},
        {"medium": "CPU"},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
        {"token_ids": list(range(15))},
        {"token_ids": [*range(15), 1 << 32]},
        {"token_ids": [*range(15), -1]},
        {"token_ids": []},
        {"block_hashes": [7]},
    ],
)
def test_blocks_told_one_by_one_are_taken_as_each_alone(odd: dict[str, Any]) -> None:
    def events() -> list[Stored]:
        each = [stored([7], ids(1))]
        each.extend(stored([at], ids(1, at), parent_block_hash=at - 1) for at in range(8, 20))
        fields = {"block_hashes": [12], "parent_block_hash": 11, "token_ids": ids(1, 12), **odd}
        each[5] = Stored(block_size=16, **fields)
        return each

    cut = list(pieces(events(), MOST, 16))
    assert [len(piece) for piece in cut if isinstance(piece, list)] == [4, 4, 4, 1]
    assert taken(cut) == taken(events())


def test_blocks_of_another_size_than_ours_are_joined() -> None:
    events = [
        Stored([at], at - 1 if at else None, [at], 1, group_idx=0, extra_keys=[None])
        for at in range(40)
    ]
    (joined, *more) = pieces(events, 64, 16)
    assert isinstance(joined, Stored)
    assert not more
    assert joined.token_ids == list(range(40))
