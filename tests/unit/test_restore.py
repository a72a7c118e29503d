"""Which backend's part of a saved state is believed, and what of it."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from gateway.core.export import export
from gateway.core.fleet import Fleet
from gateway.core.learn import OutputLengths
from gateway.core.restore import Restoration, Saved, SavedFault
from gateway.core.settings import EngineProfile
from gateway.core.types import Snapshot
from tests.core_kit import chain, settings

WAY = "bytes 256"
PROMPT = chain(("p", 640)).hashes


def fleet(profile: EngineProfile | None = None) -> Fleet:
    return Fleet(settings(["a", "b"], profile=profile), Random(1))


def see(made: Fleet, name: str = "a", **told: float) -> None:
    made.observe(made.by_name[name], Snapshot(0.0, **(told or {"start_time": 5.0})))  # type: ignore[arg-type]


def taught(**told: float) -> Fleet:
    """A fleet whose backend `a` holds a prompt and has shown how fast it is."""
    made = fleet()
    see(made, "a", **told)
    row = made.by_name["a"]
    made.trie.insert(row.slot, PROMPT, 10.0)
    for _ in range(20):
        row.engine.saw_prefill(1.0, 10_000, 10_000, 1)
        row.engine.saw_tpot(0.05, 4, 4000, 1.0)
    made.pools["m"].calibrate(Random(1))
    row.index_share, row.trust = 0.5, 0.25
    made.fit_index(row)
    return made


def saved(made: Fleet, outputs: OutputLengths | None = None) -> Saved:
    return Saved(list(export(made, outputs or OutputLengths(), lambda _: WAY, 20.0)))


def restore(made: Fleet, what: Saved, way: str = WAY, shift: float = -15.0) -> Restoration:
    restoration = Restoration(what, made, OutputLengths(), lambda _: way, shift)
    while restoration.step():
        pass
    return restoration


def held(made: Fleet, name: str = "a") -> int:
    return made.trie.blocks(made.by_name[name].slot)


def test_the_same_process_gets_its_prefixes_speeds_and_belief_back() -> None:
    old, new = taught(), fleet()
    see(new)
    assert restore(new, saved(old)).restored == ["a"]
    was, row = old.by_name["a"], new.by_name["a"]
    assert new.trie.depths(PROMPT) == {row.slot: len(PROMPT)}
    assert new.trie.oldest_use(row.slot) == -5.0
    prior = EngineProfile()
    assert row.engine.prefill_token_s == was.engine.prefill_token_s != prior.prefill_token_s
    assert row.engine.step_s == was.engine.step_s != prior.step_s
    assert (row.index_share, row.trust) == (0.5, 0.25)
    assert row.index_capacity_blocks == was.index_capacity_blocks


def test_another_process_gets_nothing() -> None:
    new = fleet()
    see(new, start_time=9.0)
    restoration = restore(new, saved(taught()))
    assert (restoration.restored, restoration.dropped) == ([], ["a"])
    assert held(new) == 0
    assert new.by_name["a"].engine.samples == 0


@pytest.mark.parametrize(("now", "same"), [(120.0, True), (80.0, False)])
def test_an_engine_without_a_start_time_is_known_by_its_counters(now: float, *, same: bool) -> None:
    new = fleet()
    see(new, prompt_tokens=now)
    assert restore(new, saved(taught(prompt_tokens=100.0))).restored == ["a"] * same


def test_an_engine_that_began_or_ceased_to_tell_its_start_is_another() -> None:
    new = fleet()
    see(new, prompt_tokens=500.0)
    assert restore(new, saved(taught())).dropped == ["a"]


def test_what_does_not_say_who_it_is_is_neither_written_nor_believed() -> None:
    silent = fleet()
    silent.trie.insert(silent.by_name["a"].slot, PROMPT, 1.0)
    assert saved(silent).visits == {}
    new = fleet()
    restoration = restore(new, saved(taught()))
    assert (list(restoration.waiting), held(new)) == (["a"], 0)
    see(new)
    while restoration.step():
        pass
    assert (list(restoration.waiting), held(new)) == ([], len(PROMPT))


def test_prompts_that_are_chained_in_another_way_now_are_dropped() -> None:
    new = fleet()
    see(new)
    assert restore(new, saved(taught()), "tokens 16").dropped == ["a"]


def test_speeds_learnt_against_other_priors_are_dropped_and_the_prefixes_kept() -> None:
    new = fleet(replace(EngineProfile(), step_s=1.0))
    see(new)
    assert restore(new, saved(taught())).restored == ["a"]
    assert (new.by_name["a"].engine.samples, held(new)) == (0, len(PROMPT))


def test_a_drained_backend_stays_drained_whatever_process_it_is() -> None:
    old, new = taught(), fleet()
    old.drain("b", draining=True)
    restore(new, saved(old))
    assert [row.draining for row in new.by_name.values()] == [False, True]


def test_answer_lengths_and_hits_of_models_come_back() -> None:
    outputs = OutputLengths()
    for _ in range(50):
        outputs.learn("m", "chat", 40)
    old, new, learnt = taught(), fleet(), OutputLengths()
    old.pools["m"].note_hit(50, 100)
    Restoration(saved(old, outputs), new, learnt, lambda _: WAY, 0.0)
    assert learnt.expected("m", "chat", None) == outputs.expected("m", "chat", None) != 250
    assert new.pools["m"].hit_share == 0.5


def test_a_backend_dropped_while_it_is_written_down_is_over() -> None:
    made = taught()
    row = made.by_name["a"]
    for number in range(3000):
        made.trie.set_capacity(row.slot, 100_000)
        made.trie.insert(row.slot, chain((f"{number}", 640)).hashes, 11.0)
    pieces = export(made, OutputLengths(), lambda _: WAY, 20.0)
    kept = [next(pieces), next(pieces)]
    made.forget(row)
    kept += pieces
    assert len(Saved(kept).visits["a"]) < 3000


def test_nothing_or_nonsense_is_a_fault() -> None:
    for pieces in ([], [b""], [b"\x00"], [b"\xc1"]):
        with pytest.raises(SavedFault):
            Saved(pieces)


def test_no_text_a_key_or_a_client_is_ever_written() -> None:
    """Only hashes, numbers, and names out of the configuration."""

    def strings(value: object) -> set[str]:
        if isinstance(value, str):
            return {value}
        if isinstance(value, dict):
            return strings(list(value.items()))
        if isinstance(value, list | tuple):
            return {text for item in value for text in strings(item)}
        return set()

    found: set[str] = set()
    for piece in export(taught(), OutputLengths(), lambda _: WAY, 20.0):
        found |= strings(msgspec.msgpack.decode(piece))
    assert found <= {
        *("type", "learnt", "visits", "backend", "backends", "models", "at", "a", "b", "m"),
        WAY,
    }
