"""KV events as engines write them, and what is no event."""

from typing import Any

import msgspec
import pytest

from gateway.core.kv_events import SLICE_BYTES, Batch, Cleared, Decoder, Malformed, Removed, Stored
from tests.kv_kit import recorded

STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, 7],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


def packed(*events: Any, head: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([head, list(events), 0])


def fields(event: Any) -> dict[str, Any]:
    return {field: getattr(event, field) for field in event.__struct_fields__}


def test_every_recorded_batch_of_vllm_is_read_whole() -> None:
    decoder = Decoder()
    batches = [decoder.decode(payload) for _, payload in recorded()]

    kinds = [type(event).__mro__[1] for batch in batches for event in batch.events]
    assert {kind.__name__ for kind in kinds} == {"Stored", "Removed", "Cleared"}
    for batch in batches:
        assert batch.unknown == 0
        assert batch.rank == 0
        for event in batch.events:
            if isinstance(event, Stored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    salted = [
        e for b in batches for e in b.events if isinstance(e, Stored) and any(e.extra_keys or ())
    ]
    assert [event.extra_keys for event in salted] == [[["tenant-a"]]]


def test_arrays_and_maps_say_the_same() -> None:
    one = Decoder().decode(packed(STORED, {"type": "BlockRemoved", "block_hashes": [1]}))
    other = Decoder().decode(packed(list(STORED.values()), ["BlockRemoved", [1]]))

    assert [fields(event) for event in one.events] == [fields(event) for event in other.events]


def test_an_engine_that_changes_its_encoding_is_still_read() -> None:
    decoder = Decoder()
    for _ in range(2):
        for item in ({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]):
            assert isinstance(decoder.decode(packed(item)).events[0], Cleared)


def test_sglang_s_short_arrays_are_read() -> None:
    """SGLang tells five fields of a stored block, and its hashes may be negative."""
    stored = ["BlockStored", [-5], -(2**63), [1, 2], 2, None]
    events = Decoder().decode(packed(stored, ["BlockRemoved", [-5]])).events

    assert isinstance(events[0], Stored)
    assert isinstance(events[1], Removed)
    assert (events[0].block_hashes, events[0].parent_block_hash) == ([-5], -(2**63))
    assert events[0].medium is None


def test_hashes_may_be_bytes() -> None:
    stored = dict(STORED, block_hashes=[b"a" * 32, b"b" * 32], parent_block_hash=b"p" * 32)
    (event,) = Decoder().decode(packed(stored)).events

    assert isinstance(event, Stored)
    assert event.block_hashes == [b"a" * 32, b"b" * 32]
    assert event.parent_block_hash == b"p" * 32


def test_fields_and_events_of_a_later_version_are_passed_over() -> None:
    later = dict(STORED, session_id="s", locality="LOCAL")
    assert fields(Decoder().decode(packed(later)).events[0]) == fields(
        Decoder().decode(packed(STORED)).events[0]
    )

    batch = Decoder().decode(packed({"type": "BlockMoved", "to": 1}, STORED, ["Other", 1]))
    assert batch.unknown == 2
    assert isinstance(batch.events[0], Stored)


def test_a_batch_without_a_rank_is_read() -> None:
    batch = Decoder().decode(msgspec.msgpack.encode([3.5, []]))
    assert batch == Batch(3.5, [], None)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0]),
        packed([]),
        packed([["BlockStored"], 1]),
        packed(["BlockStored", "hashes"]),
        packed(dict(STORED, token_ids=[[1, 2]])),
        packed(dict(STORED, block_hashes=[1.5])),
        packed({"type": "BlockRemoved"}),
        packed({"block_hashes": [1]}),
    ],
)
def test_what_is_no_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        Decoder().decode(payload)


@pytest.mark.parametrize("form", ["maps", "arrays", "both and others"])
def test_a_long_batch_is_read_in_slices_that_say_the_same(form: str) -> None:
    events: list[Any] = [{**STORED, "parent_block_hash": at} for at in range(3000)]
    if form != "maps":
        events = [list(event.values()) for event in events]
    if form == "both and others":
        events[1000] = STORED
        events[2000] = ["BlockMoved", 1]
    payload = msgspec.msgpack.encode([7.5, events, 3])
    assert len(payload) > 2 * SLICE_BYTES
    whole = Decoder().decode(payload)
    slices = list(Decoder().slices(payload))
    assert {(part.ts, part.rank) for part in slices[1:]} == {(7.5, 3)}
    assert [fields(e) for part in slices for e in part.events] == [fields(e) for e in whole.events]
    assert sum(part.unknown for part in slices) == whole.unknown
    assert not slices[0].events
    largest = max(len(part.events) for part in slices)
    assert largest * (len(payload) // 3000) < 1.1 * SLICE_BYTES


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_slice_may_be_of_one_event(count: int) -> None:
    long = {**STORED, "token_ids": [2**31] * (SLICE_BYTES // 5 + 1)}
    payload = packed(*[long] * count, {"type": "AllBlocksCleared"})
    events = [event for part in Decoder().slices(payload) for event in part.events]
    assert len(events) == count + 1
    assert isinstance(events[-1], Cleared)


def test_a_long_batch_with_a_broken_event_is_malformed_when_that_is_reached() -> None:
    events = [STORED] * 2999 + [{**STORED, "token_ids": "x"}]
    slices = Decoder().slices(packed(*events))
    for _ in range(3):
        next(slices)
    with pytest.raises(Malformed):
        list(slices)


@pytest.mark.parametrize("payload", [b"\xc1" * (SLICE_BYTES + 1), b"\x90" + bytes(SLICE_BYTES)])
def test_what_is_long_and_no_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        list(Decoder().slices(payload))
