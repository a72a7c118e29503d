"""The slices in which the index is written down."""

from random import Random

from gateway.core import export as module
from gateway.core.export import export, walk
from gateway.core.fleet import Fleet
from gateway.core.learn import OutputLengths
from gateway.core.restore import Saved
from gateway.core.types import Snapshot
from tests.core_kit import chain, settings


def fleet() -> Fleet:
    made = Fleet(settings(["a", "b"]), Random(1))
    for name in ("a", "b"):
        told = Snapshot(0.0, kv_capacity_tokens=10**9, start_time=5.0)
        made.observe(made.by_name[name], told)
    return made


def test_no_slice_is_more_than_its_share_of_work() -> None:
    made = fleet()
    for number in range(5000):
        made.trie.insert(made.by_name["a"].slot, chain((f"{number}", 640)).hashes, float(number))
    pieces = list(export(made, OutputLengths(), str, 0.0))
    sizes = [len(Saved([pieces[0], piece]).visits["a"]) for piece in pieces[1:]]
    assert sum(sizes) == 5000
    assert max(sizes) <= module.SLICE_NODES


def test_what_many_prompts_begin_with_is_written_once() -> None:
    made = fleet()
    for row in made.by_name.values():
        for number in range(100):
            prompt = chain(("system", 64_000), (f"{number}", 64))
            made.trie.insert(row.slot, prompt.hashes, float(number))
    pieces = list(export(made, OutputLengths(), str, 0.0))
    visits = [visit for held in Saved(pieces).visits.values() for visit in held]
    assert len(visits) == 200
    assert sum(len(blocks) // 8 for _, _, blocks, _ in visits) < 1500


def test_the_walk_goes_on_when_where_it_stood_has_gone() -> None:
    made = fleet()
    slot = made.by_name["a"].slot
    prompts = [chain((f"{number}", 640)).hashes for number in range(6)]
    for number, prompt in enumerate(prompts):
        made.trie.insert(slot, prompt, float(number))
    share = made.trie.share(slot)
    assert share is not None
    visits = walk(share)
    assert [next(visits).at for _ in range(3)] == [0.0, 1.0, 2.0]
    made.trie.insert(slot, prompts[2], 7.0)
    made.trie.insert(slot, prompts[1], 8.0)
    made.trie.insert(slot, prompts[4], 9.0)
    assert [visit.at for visit in visits] == [3.0, 5.0, 7.0, 8.0, 9.0]
