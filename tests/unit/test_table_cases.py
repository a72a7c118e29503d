"""Cases R16, R17, R18, R20: the prefix index over its size, emptied, and the price of a long prompt."""

import tracemalloc
from array import array
from random import Random

import orjson
import pytest
from xxhash import xxh3_64_intdigest

from gateway.core import chain as chaining
from gateway.core import ledger
from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.settings import EngineProfile
from gateway.core.trie import INSERT_SLICE, RadixTrie
from gateway.core.types import Api
from tests.core_kit import admit, chain, dispatcher, done, query, serve

KIB = 1024


def unique(number: int, blocks: int = 8) -> "array[int]":
    return array("Q", range(number << 8, (number << 8) + blocks))


def test_r17_unique_prompts_without_end_stay_within_the_cap() -> None:
    """The case's million at a cap of 2 MiB: it is full after 1 % of these and turns over from then on."""
    trie = RadixTrie(2 * KIB * KIB)
    for slot in range(4):
        trie.add_backend(slot, 1 << 40)
    most = fewest = 0
    for number in range(120_000):
        before = trie.nodes
        trie.insert(number % 4, unique(number), float(number))
        most = max(most, trie.bytes)
        fewest = min(fewest, trie.nodes - before)

    assert most <= trie.max_bytes
    assert -fewest <= INSERT_SLICE  # what one call gives back, so what it takes, is bounded
    assert trie.depths(unique(119_999)) == {3: 8}
    assert trie.depths(unique(0)) == {}


def test_r17_the_cap_is_true_of_what_python_allocates() -> None:
    trie = RadixTrie(128 * KIB)
    trie.add_backend(0, 1 << 40)
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        for number in range(3_000):
            trie.insert(0, unique(number), float(number))
        held = tracemalloc.get_traced_memory()[0] - began
        for number in range(3_000, 6_000):
            trie.insert(0, unique(number), float(number))
        later = tracemalloc.get_traced_memory()[0] - began
    finally:
        tracemalloc.stop()

    assert held < 1.25 * trie.max_bytes
    assert later < 1.25 * trie.max_bytes


def test_r17_through_the_dispatcher_a_backends_share_is_bounded_by_its_cache() -> None:
    core = dispatcher(2, profile=EngineProfile(kv_tokens=64_000))
    for number in range(1_500):
        serve(core, query((f"user{number}", 640)), float(number))
    rows = core.backends(1_500.0)

    assert all(row.index_blocks <= row.index_capacity_blocks <= 1_000 for row in rows)
    assert all(row.index_blocks > 900 for row in rows)
    assert core.index_bytes < 1 << 20


@pytest.mark.parametrize("how", ["capacity", "drop", "remove", "cap"])
def test_r18_an_index_that_was_emptied_is_its_root_alone(how: str) -> None:
    trie, rng = RadixTrie(), Random(5)
    for slot in range(4):
        trie.add_backend(slot, 1 << 40)
    for number in range(3_000):  # shared beginnings that end anywhere: splits at every depth
        hashes = chain(
            (f"system{rng.randrange(3)}", 2_048), (f"user{rng.randrange(400)}", 512)
        ).hashes
        trie.insert(rng.randrange(4), hashes[: rng.randrange(1, len(hashes) + 1)], float(number))
    assert trie.nodes > 400

    for slot in range(4):
        if how == "capacity":
            trie.set_capacity(slot, 0)
        elif how == "drop":
            trie.drop(slot)
        elif how == "remove":
            trie.remove_backend(slot)
    if how == "cap":
        trie.max_bytes = 0
    while trie.sweep():
        pass

    assert trie.nodes == 1
    assert trie.total_blocks == 0
    assert not trie._root.kids


@pytest.mark.parametrize("kib", [1, 4, 16, 64, 256, 1024])
def test_r20_every_byte_of_a_prompt_is_hashed_once_however_long_it_is(
    kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = 0

    def counting(data: bytes, seed: int) -> int:
        nonlocal hashed
        hashed += len(data)
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(chaining, "_hashed", counting)
    text = Random(kib).randbytes(kib * KIB // 2).hex()
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    BytePrompter(1).chain(parse_json(Api.CHAT, body))

    assert 0.5 * kib * KIB < hashed <= kib * KIB + 512


def test_r20_a_turn_of_a_known_conversation_hashes_little_more_than_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompter = BytePrompter(1)
    messages = [{"role": "user", "content": Random(1).randbytes(64 * KIB).hex()}]

    def turn() -> int:
        body = orjson.dumps({"model": "m", "messages": messages})
        return len(prompter.chain(parse_json(Api.CHAT, body)).hashes)

    blocks = turn()
    hashed = 0

    def counting(data: bytes, seed: int) -> int:
        nonlocal hashed
        hashed += len(data)
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(chaining, "_hashed", counting)
    messages += [
        {"role": "assistant", "content": "a" * KIB},
        {"role": "user", "content": "b" * KIB},
    ]
    assert turn() > blocks
    assert hashed <= 2 * KIB + 16 * KIB + 512  # back to the last checkpoint, never to the start


def test_r19_prefills_nobody_will_see_the_end_of_are_kept_in_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "MAX_SILENT", 20)
    core = dispatcher(1)
    tickets = [admit(core, query((f"p{i}", 640), stream=False), 0.0) for i in range(50)]

    assert len(core._silent) == 20
    assert sum(ticket.owes for ticket in tickets) == 20
    for ticket in tickets:
        core.finish(ticket, done(), 0.1)
    assert core.backends(0.1)[0].owed_prefill_s == 0.0


# -- R16


def test_r16_heads_survive_tails_when_twice_the_capacity_came() -> None:
    trie = RadixTrie()
    trie.add_backend(0, 400)
    heads = [unique(1_000 + group, 10) for group in range(10)]
    tails = [unique(2_000 + number, 6) for number in range(120)]
    for number, tail in enumerate(tails):  # ten groups by turns: 100 blocks of heads, 720 of tails
        trie.insert(0, heads[number % 10] + tail, float(number))
        trie.settle(0)

    assert trie.blocks(0) <= 400
    assert [trie.depths(head) for head in heads] == [{0: 10}] * 10
    assert trie.depths(heads[0] + tails[0]) == {0: 10}
    assert trie.depths(heads[9] + tails[119]) == {0: 16}


def test_r16_what_is_left_of_a_prompt_is_its_beginning() -> None:
    """A block without those before it is of no use: every block held is one that can be hit."""
    trie = RadixTrie()
    trie.add_backend(0, 55)
    prompts = [unique(number, 10) for number in range(11)]
    for number, prompt in enumerate(prompts):
        trie.insert(0, prompt, float(number))
        trie.settle(0)

    depths = [trie.depths(prompt).get(0, 0) for prompt in prompts]
    assert depths == [0, 0, 0, 0, 0, 5, 10, 10, 10, 10, 10]
    assert sum(depths) == trie.blocks(0) == 55
