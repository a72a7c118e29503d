from array import array

import pytest

from gateway.core.belief import (
    LEAST_SHARE,
    MOST_SHARE,
    Belief,
    Claim,
    claim_of,
    learn_cache,
    trust,
)
from gateway.core.ledger import Account
from gateway.core.trie import RadixTrie
from tests.core_kit import account, query, ticket_for

PROMPT = 6400
BLOCKS = 100


class Cache:
    """One backend's index with prompts of 100 blocks, 64 tokens each, used one after the other."""

    def __init__(self, prompts: int, capacity: int | None = None) -> None:
        self.row: Account = account()
        self.trie = RadixTrie()
        self.capacity = capacity or 100 * BLOCKS
        self.trie.add_backend(0, self.capacity)
        self.row.index_capacity_blocks = self.capacity
        self.row.tokens_per_block = 64.0
        self.now = 0.0
        for prompt in range(prompts):
            self.now += 1.0
            self.trie.insert(0, self.chain(prompt), self.now)

    def chain(self, prompt: int) -> "array[int]":
        return array("Q", [prompt * 1000 + block for block in range(BLOCKS)])

    def held(self, prompt: int) -> int:
        return self.trie.depths(self.chain(prompt)).get(0, 0)

    def ask(self, prompt: int, cached: int) -> bool:
        """Send a prompt and let its answer report `cached` tokens."""
        self.now += 1.0
        hashes = self.chain(prompt)
        depth = self.held(prompt)
        used = self.trie.last_use(0, hashes, depth)
        indexed = depth * 64
        predicted = int(indexed * trust(self.row, self.now))
        claim = Claim(predicted, indexed, PROMPT, used, self.now)
        self.trie.insert(0, hashes, self.now)
        return learn_cache(self.row, self.trie, claim, cached, self.now)


def test_a_claim_is_what_the_decision_saw() -> None:
    row = account()
    ticket = ticket_for(query(("p", 6400)), row, hit=3200)
    ticket.known_blocks, ticket.last_use = 100, (4.0, 90)
    assert claim_of(ticket) == Claim(3200, 6400, ticket.query.chain.tokens, (4.0, 90), 0.0)


def test_correct_predictions_change_nothing() -> None:
    cache = Cache(5)
    for turn in range(50):
        assert not cache.ask(turn % 5, 6384)
    assert (cache.row.trust, cache.row.index_share) == (1.0, 1.0)
    assert cache.row.hit_tokens_predicted == 50 * 6400
    assert cache.row.hit_tokens_reported == 50 * 6384


def test_one_odd_report_costs_nothing() -> None:
    cache = Cache(20)
    cache.ask(3, 0)
    for prompt in range(20):
        cache.ask(prompt, 6384)
    assert (cache.row.trust, cache.row.index_share) == (1.0, 1.0)
    assert all(cache.held(prompt) for prompt in range(20))


def test_three_misses_in_a_row_mean_that_all_is_lost() -> None:
    cache = Cache(20)
    for prompt in (7, 3, 12):
        cache.ask(prompt, 0)
    kept = [prompt for prompt in range(20) if cache.held(prompt)]
    assert kept == [3, 7, 12]
    assert cache.row.index_share == 1.0


def test_missing_only_what_half_the_capacity_could_not_hold_is_no_loss_of_all() -> None:
    cache = Cache(20, capacity=20 * BLOCKS)
    for prompt in (0, 3, 7):
        cache.ask(prompt, 0)
    assert [p for p in range(20) if not cache.held(p)] == [1, 2, 4, 5, 6]


def test_what_was_used_before_a_missing_prefix_is_forgotten_with_it() -> None:
    cache = Cache(20)
    cache.ask(2, 0)
    cache.ask(8, 0)
    assert [p for p in range(20) if not cache.held(p)] == [0, 1, 3, 4, 5, 6, 7]


def test_the_capacity_is_put_between_what_fits_and_what_does_not() -> None:
    cache = Cache(20, capacity=20 * BLOCKS)
    cache.ask(4, 0)
    cache.ask(14, 6384)
    # 4 had 15 prompts used after it; 14 and the six after it fit, with itself 7, so half way: 11
    assert cache.row.index_share * 20 == pytest.approx(11.0, abs=0.1)


def test_missing_old_and_finding_young_prefixes_is_a_small_cache() -> None:
    cache = Cache(20, capacity=20 * BLOCKS)
    cache.ask(6, 0)
    assert cache.ask(15, 6384)
    assert 0.25 < cache.row.index_share < 13 / 20
    assert [p for p in range(20) if not cache.held(p)] == [0, 1, 2, 3, 4, 5]


def test_a_hit_older_than_the_miss_clears_the_suspicion() -> None:
    cache = Cache(20)
    cache.ask(9, 0)
    assert not cache.ask(4, 6384)
    cache.ask(14, 0)
    cache.ask(2, 6384)
    assert cache.row.index_share == 1.0
    assert all(cache.held(prompt) for prompt in range(20))


def test_what_is_used_and_missing_again_and_again_shrinks_the_index() -> None:
    cache = Cache(10, capacity=10 * BLOCKS)
    for turn in range(60):
        cache.ask(turn % 10, 0)
        cache.trie.set_capacity(0, int(cache.capacity * cache.row.index_share))
        cache.row.index_capacity_blocks = cache.trie.capacity(0)
    assert cache.row.index_share < 0.95
    assert sum(cache.held(p) for p in range(10)) < 10 * BLOCKS


def test_a_full_index_that_is_beaten_grows_beyond_what_was_claimed() -> None:
    cache = Cache(10, capacity=5 * BLOCKS)
    assert cache.ask(0, 6384)
    assert cache.row.index_share == 1.5
    for prompt in range(1, 40):
        cache.ask(prompt % 10, 6384)
    assert 1.5 < cache.row.index_share <= MOST_SHARE


def test_an_index_with_room_learns_no_size_from_others_prompts() -> None:
    cache = Cache(2)
    assert not cache.ask(50, 6384)
    assert cache.row.index_share == 1.0


def test_steps_halve_with_each_turn() -> None:
    belief = Belief()
    steps = [belief.stride(grow=bool(turn % 2)) for turn in range(8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 0.5
    assert steps[-1] == 0.02


def test_tails_that_are_missing_never_cost_more_than_half_the_index() -> None:
    cache = Cache(5)
    for turn in range(200):
        cache.ask(turn % 5, 4600)
    assert cache.row.index_share == 0.5
    assert 0.65 < cache.row.trust < 0.8


def test_a_cache_that_is_never_there_is_not_believed_after_twenty_reports() -> None:
    cache = Cache(1)
    for _ in range(20):
        cache.ask(0, 0)
    assert trust(cache.row, cache.now) < 0.1
    assert cache.row.index_share >= LEAST_SHARE


def test_trust_comes_back_by_itself() -> None:
    row = account()
    row.trust, row.trust_at = 0.0, 100.0
    assert trust(row, 100.0) == 0.0
    assert 0.5 < trust(row, 160.0) < 0.9
    assert trust(row, 400.0) == 1.0


def test_a_small_hit_teaches_nothing() -> None:
    row, trie = account(), RadixTrie()
    trie.add_backend(0, 100)
    assert not learn_cache(row, trie, Claim(64, 64, 64, (0.5, 1), 1.0), 0, 1.0)
    assert row.trust == 1.0


def test_the_error_is_that_of_the_sums() -> None:
    belief = Belief()
    assert belief.error_ratio is None
    for _ in range(200):
        belief.count(1000, 900)
        belief.count(900, 1000)
    assert belief.error_ratio == pytest.approx(0.0, abs=0.01)
    for _ in range(200):
        belief.count(1000, 500)
    assert belief.error_ratio == pytest.approx(0.5, abs=0.01)
