from array import array

import pytest

from gateway.core.belief import Claim
from gateway.core.counted import MOST, expect, learn_counters, shared, spoil
from gateway.core.ledger import Account
from gateway.core.trie import RadixTrie
from gateway.core.types import Snapshot, Ticket
from tests.core_kit import account, query, ticket_for


@pytest.fixture
def row() -> Account:
    row = account()
    row.tokens_per_block = 64.0
    row.index_capacity_blocks = 1000
    return row


@pytest.fixture
def trie() -> RadixTrie:
    trie = RadixTrie()
    trie.add_backend(0, 1000)
    return trie


def claim(indexed: int, prompt: int = 7000, used: float | None = 1.0, at: float = 2.0) -> Claim:
    return Claim(indexed, indexed, prompt, None if used is None else (used, 9), at)


def sent(hit: int = 6400, ident: int = 1) -> Ticket:
    """A prompt of 7,000 tokens of which `hit` are believed to be there."""
    ticket = ticket_for(query(("p", 6976), tail=24), account(), ident, hit=hit)
    ticket.known_blocks = hit // 64
    return ticket


def scrape(at: float, queries: float, hits: float) -> Snapshot:
    return Snapshot(at=at, prefix_queries=queries, prefix_hits=hits)


def test_what_the_counters_grew_by_is_the_report(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 500.0, 100.0))
    expect(row, sent(), 1.0)
    learn_counters(row, trie, scrape(2.0, 7500.0, 6484.0))
    assert (row.hit_tokens_predicted, row.hit_tokens_reported) == (6400, 6384)


def test_nothing_is_noted_before_the_first_quiet_scrape(row: Account, trie: RadixTrie) -> None:
    expect(row, sent(), 1.0)
    row.unprefilled = 1
    learn_counters(row, trie, scrape(2.0, 0.0, 0.0))
    assert row.belief.counted is None


def test_others_requests_spoil_an_interval_and_no_more(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    expect(row, sent(), 1.0)
    learn_counters(row, trie, scrape(2.0, 20_000.0, 6384.0))
    assert row.hit_tokens_predicted == 0
    expect(row, sent(), 3.0)
    learn_counters(row, trie, scrape(4.0, 27_000.0, 12_768.0))
    assert row.hit_tokens_reported == 6384


def test_a_prompt_that_waits_for_its_prefill_keeps_the_interval_open(
    row: Account, trie: RadixTrie
) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    expect(row, sent(), 1.0)
    row.unprefilled = 1
    learn_counters(row, trie, scrape(2.0, 0.0, 0.0))
    row.unprefilled = 0
    learn_counters(row, trie, scrape(3.0, 7000.0, 6384.0))
    assert row.hit_tokens_reported == 6384


def test_a_prompt_taken_back_spoils_the_interval(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    ticket = sent()
    expect(row, ticket, 1.0)
    spoil(row, ticket)
    assert (row.asked_tokens, row.claimed_tokens) == (0, 0)
    learn_counters(row, trie, scrape(2.0, 7000.0, 6384.0))
    assert row.hit_tokens_predicted == 0


def test_too_many_prompts_to_tell_apart_say_nothing(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    for _ in range(MOST + 1):
        expect(row, sent(), 1.0)
    assert row.belief.counted is None
    learn_counters(row, trie, scrape(2.0, (MOST + 1) * 7000.0, 0.0))
    assert row.hit_tokens_predicted == 0


def test_counters_are_not_asked_where_answers_report_hits(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    row.belief.told_at = 0.5
    expect(row, sent(), 1.0)
    assert row.belief.counted == []
    expect(row, sent(), 61.0)
    assert len(row.belief.counted) == 1


def test_an_engine_without_counters_teaches_nothing(row: Account, trie: RadixTrie) -> None:
    assert not learn_counters(row, trie, Snapshot(at=1.0))
    assert row.belief.counted is None


def test_hits_go_to_what_was_used_last() -> None:
    old, young, new = claim(6400, used=1.0), claim(6400, used=9.0), claim(0, used=None, at=5.0)
    parts = dict(shared([old, young, new], 6400))
    assert parts == {young: 6400, old: 0, new: 0}


def test_hits_beyond_every_claim_go_where_there_is_room() -> None:
    parts = shared([claim(6400), claim(0, used=None, at=5.0)], 12_800)
    assert sum(part for _, part in parts) == 12_800
    assert all(part <= each.prompt for each, part in parts)


def test_rounding_is_no_hit_of_a_new_prompt() -> None:
    assert shared([claim(0, used=None)], 48) == [(claim(0, used=None), 0)]


def test_what_others_put_into_the_cache_takes_its_place_in_the_index(
    row: Account, trie: RadixTrie
) -> None:
    trie.insert(0, array("Q", range(900)), 0.0)
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    expect(row, sent(), 1.0)
    # 7,000 ours with 6,400 found, 32,000 theirs with 6,400 found
    learn_counters(row, trie, scrape(2.0, 39_000.0, 12_800.0))
    assert trie.blocks(0) == 1000
    assert trie.depths(array("Q", range(900))) == {0: 600}


def test_a_probes_tokens_take_no_place(row: Account, trie: RadixTrie) -> None:
    learn_counters(row, trie, scrape(0.0, 0.0, 0.0))
    learn_counters(row, trie, scrape(2.0, 400.0, 0.0))
    assert trie.blocks(0) == 0


def test_the_counts_of_an_engines_first_scrape_are_not_taken_for_others(
    row: Account, trie: RadixTrie
) -> None:
    learn_counters(row, trie, scrape(0.0, 5e6, 1e6))
    assert trie.blocks(0) == 0
