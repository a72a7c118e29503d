"""Hits learnt from an engine's counters, where its answers do not report them (vLLM's default).

Between two scrapes at which nothing of ours waits for its prefill, the engine's prefix counters grew
by exactly what we sent. If they did (its queries are our prompts), its hits are held against what
was claimed. Which of several prompts was missing is not said: an LRU loses what was used longest
ago. What the engine was asked beyond our prompts is somebody else's, and takes room in its cache:
so it does in the index. Must never believe counters that somebody else's requests moved, or keep more than `MOST`.
"""

from array import array
from typing import TYPE_CHECKING

from gateway.core.belief import SLACK_TOKENS, Claim, claim_of, learn_cache
from gateway.core.types import Snapshot, Ticket

if TYPE_CHECKING:
    from gateway.core.ledger import Account
    from gateway.core.trie import RadixTrie

MOST = 64
"""Prompts between two quiet scrapes that can be told apart; more say nothing."""

# Answers that report hits themselves make counters pointless for this long.
_TOLD_FOR_S = 60.0
# Estimated prompt tokens are off by a few percent.
_SAME = 0.1
# Fewer tokens of others than this are no matter: a probe, a tokenizer's warm-up.
_OTHERS_TOKENS = 1000
_NOBODYS = 1 << 63  # counted from here, hashes are as good as never a prompt's


def expect(row: "Account", ticket: Ticket, now: float) -> None:
    """Note a prompt that is sent; its claim only if this backend's answers do not report hits."""
    row.asked_tokens += ticket.query.chain.tokens
    row.claimed_tokens += ticket.hit_tokens
    belief = row.belief
    claims = belief.counted
    if claims is None or now < belief.told_at + _TOLD_FOR_S:
        return
    if len(claims) < MOST:
        claims.append(claim_of(ticket))
    else:
        belief.counted = None


def spoil(row: "Account", ticket: Ticket) -> None:
    """Give up this interval: a prompt that was noted may not have reached the engine."""
    row.asked_tokens -= ticket.query.chain.tokens
    row.claimed_tokens -= ticket.hit_tokens
    row.belief.counted = None


def learn_counters(row: "Account", trie: "RadixTrie", snapshot: Snapshot) -> bool:
    """Take in the counters of a scrape; return whether `index_share` changed."""
    if snapshot.prefix_queries is None or snapshot.prefix_hits is None or row.unprefilled:
        return False
    belief = row.belief
    claims = belief.counted
    queries, hits, asked, claimed = belief.count_from
    belief.count_from = (
        snapshot.prefix_queries,
        snapshot.prefix_hits,
        row.asked_tokens,
        row.claimed_tokens,
    )
    belief.counted = []
    if claims is None:
        return False
    queries = snapshot.prefix_queries - queries
    hits = snapshot.prefix_hits - hits
    asked = row.asked_tokens - asked
    if queries > (1 + _SAME) * asked + _OTHERS_TOKENS:
        others_hits = max(0.0, hits - (row.claimed_tokens - claimed))
        _crowd(row, trie, queries - asked - others_hits, snapshot.at)
        return False
    if not claims or snapshot.at < belief.told_at + _TOLD_FOR_S:
        return False
    if not (1 - _SAME) * asked <= queries <= (1 + _SAME) * asked:
        return False
    before = row.index_share
    for claim, cached in shared(claims, int(hits * asked / queries)):  # in our tokens
        learn_cache(row, trie, claim, cached, snapshot.at)
    return row.index_share != before


def _crowd(row: "Account", trie: "RadixTrie", tokens: float, now: float) -> None:
    """Let what others put into the cache take its place in the index, under a hash of nobody.

    The one for all its blocks: no prompt ever asks for them, and a million different ones take 0.1 s.
    """
    size = row.tokens_per_block
    blocks = min(int(tokens / size), row.index_capacity_blocks) if size else 0
    if blocks > 0:
        first = _NOBODYS + (row.slot << 40) + row.belief.nobody
        row.belief.nobody += 1
        trie.insert(row.slot, array("Q", [first]) * blocks, now)
        trie.settle(row.slot)


def shared(claims: list[Claim], hits: int) -> list[tuple[Claim, int]]:
    """Return each claim with the likely part of `hits`: first to what was used last.

    What is left over beyond every claim goes to the prompts with room for it, a few tokens' rounding
    apart.
    """
    order = sorted(claims, key=_freshness, reverse=True)
    parts = []
    for claim in order:
        part = min(claim.indexed, max(0, hits))
        parts.append(part)
        hits -= part
    if hits > SLACK_TOKENS * len(claims):
        for index in reversed(range(len(order))):
            more = min(hits, order[index].prompt - parts[index])
            parts[index] += more
            hits -= more
    return list(zip(order, parts, strict=True))


def _freshness(claim: Claim) -> float:
    return claim.asked_at if claim.last_use is None else claim.last_use[0]
