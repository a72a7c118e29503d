"""Which backends' KV events are followed, and what the prefix index answers with them.

Beside what engines tell stands the trie of what was sent: it goes on learning, so that a backend
whose events break off is as well known as any other; while it is exact, only the trie's youngest
entries count, for prompts whose prefill is still to come. Must never read a clock.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.chain import token_seed
from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from gateway.core.exact_index import ExactIndex, beyond, merge
from gateway.core.ledger import Account
from gateway.core.runs import slots_of
from gateway.core.trie import RadixTrie
from gateway.core.types import Chain, EventStatus

# Engines tell of blocks in the step that computes them, so about when the first token comes; this
# is for the one being faster than the other.
GRACE_S: Final = 0.02
_SWEEP_BLOCKS: Final = 2000

_NONE: Final = EventStatus()
# So many answers in a row with far larger hits than the events foretold: the tokens they tell are
# not those of our chains. A wrong tokenizer or chat template makes every answer one of them.
_REFUTED_AFTER: Final = 16
_FAR_BLOCKS: Final = 4


@dataclass(slots=True, frozen=True)
class EventSpec:
    """How our chains are made of the tokens that a backend's events tell.

    As the prompter of `model` makes them: its salt and its block size. `model` is what the backend
    serves without an adapter.
    """

    model: str
    salt: int
    block_tokens: int


class Exactness:
    """The feeds of a fleet, by account, and the index they fill."""

    def __init__(self, trie: RadixTrie) -> None:
        self.index = ExactIndex()
        self._trie = trie
        self._rows: dict[int, Account] = {}
        self._feeds: dict[int, tuple[EventSpec, Feed]] = {}
        self._missed: dict[int, int] = {}  # answers in a row that the events did not foretell

    @property
    def bytes(self) -> int:
        """Estimated memory of all that engines told."""
        return self.index.bytes + sum(feed.holdings.bytes for _, feed in self._feeds.values())

    def follow(self, row: Account, spec: EventSpec) -> Feed:
        """Return the feed of a backend's events: a new one unless it has one made the same way."""
        held = self._feeds.get(row.slot)
        if held is not None and held[0] == spec:
            return held[1]
        self.leave(row)

        def seed(adapter: str | None, cache_salt: str) -> int:
            return token_seed(spec.salt, model=adapter or spec.model, cache_salt=cache_salt)

        holdings = Holdings(self.index, row.slot, seed, spec.block_tokens)
        feed = Feed(holdings, lambda: self._turn(row, spec, feed), lambda: self._emptied(row))
        self._feeds[row.slot] = spec, feed
        self._rows[row.slot] = row
        self.note_capacity(row)
        return feed

    def judge(self, row: Account, predicted: int, reported: int) -> None:
        """Compare a hit foretold by events with the answer's; give up on events that never fit."""
        held = self._feeds.get(row.slot)
        if held is None:
            return
        spec, feed = held
        if reported - predicted > max(_FAR_BLOCKS * spec.block_tokens, reported // 2):
            missed = self._missed[row.slot] = self._missed.get(row.slot, 0) + 1
            if missed >= _REFUTED_AFTER:
                del self._missed[row.slot]
                feed.refute()
        elif predicted:
            self._missed.pop(row.slot, None)

    def leave(self, row: Account) -> None:
        """Believe and keep nothing more of a backend's events."""
        self._missed.pop(row.slot, None)
        held = self._feeds.pop(row.slot, None)
        if held is None:
            return
        del self._rows[row.slot]
        held[1].holdings.close()
        self.index.set_live(row.slot, frozenset())
        row.exact = False

    def restart_told(self, row: Account) -> None:
        """Note that the metrics show another engine process."""
        held = self._feeds.get(row.slot)
        if held is not None:
            held[1].restart_told()

    def note_capacity(self, row: Account) -> None:
        """Tell a backend's feed how much its engine can hold, once that is known."""
        held = self._feeds.get(row.slot)
        snapshot = row.snapshot
        if held is None or snapshot is None or not snapshot.kv_capacity_tokens:
            return
        spec, feed = held
        feed.capacity_blocks = snapshot.kv_capacity_tokens // (
            snapshot.block_tokens or spec.block_tokens
        )

    def sweep(self) -> bool:
        """Give back a slice of what was cleared; return whether more is left."""
        return self.index.sweep(_SWEEP_BLOCKS)

    # -- lookups ----------------------------------------------------------------------------

    def lookup(self, model: str, chain: Chain, now: float) -> list[tuple[int, int]]:
        """Return `(depth, mask)` pairs as `RadixTrie.lookup`, with the engines' word where it is known.

        Chains that are no exact tokens are the trie's alone.
        """
        hashes = chain.hashes
        held = self._trie.lookup(hashes)
        live = self.index.live.get(model) if chain.exact else None
        if live is None:
            return held
        lanes, exact = live
        # an engine computes the last token anew, so the block that ends with it is no hit
        most = int((chain.tokens - 1) // chain.tokens_per_block)
        told = self.index.lookup(hashes, lanes, most)
        recent = [
            pair
            for depth, ahead in beyond(held, told, exact, most)
            for pair in self._under_way(hashes, depth, ahead, now)
        ]
        return merge(held, told, exact, recent)

    def _under_way(
        self, hashes: "array[int]", depth: int, mask: int, now: float
    ) -> Sequence[tuple[int, int]]:
        """Return the backends in `mask` that were sent this prefix and have not prefilled it yet."""
        found = 0
        for slot in slots_of(mask):
            live = self._rows[slot].live.values()
            since = min([ticket.dispatched_at for ticket in live if ticket.owes], default=now)
            used = self._trie.last_use(slot, hashes, depth)
            if used is not None and used[0] >= min(since, now - GRACE_S):
                found |= 1 << slot
        return ((depth, found),) if found and depth else ()

    def is_exact(self, row: Account, model: str, chain: Chain) -> bool:
        """Whether `lookup` answers for this backend with what its engine tells."""
        _, slots = self.index.live.get(model, (0, 0))
        return chain.exact and bool(slots >> row.slot & 1)

    # -- figures ----------------------------------------------------------------------------

    def status(self, row: Account) -> EventStatus:
        """Return what a backend's events have come to."""
        held = self._feeds.get(row.slot)
        if held is None:
            return _NONE
        feed = held[1]
        return EventStatus(
            mode="exact" if row.exact else "approximate",
            events=feed.events,
            gaps=feed.gaps,
            losses=feed.losses,
            restarts=feed.restarts,
            unreadable=feed.malformed + feed.unread,
            unknown_blocks=feed.holdings.unknown,
            blocks=feed.holdings.blocks,
        )

    # -- inside -----------------------------------------------------------------------------

    def _emptied(self, row: Account) -> None:
        """Forget what was sent, too: the engine holds nothing of it."""
        self._trie.drop(row.slot)
        row.oldest_use = None

    def _turn(self, row: Account, spec: EventSpec, feed: Feed) -> None:
        """Believe a feed, or stop to; what was learnt of the trie's errors is void either way."""
        exact = feed.exact and not misnamed(spec, feed)
        models = frozenset({spec.model, *feed.holdings.adapters}) if exact else frozenset()
        self.index.set_live(row.slot, models)
        if row.exact != exact:
            row.exact = exact
            row.trust = 1.0
            row.belief.clear()
            row.belief.counted = None


def misnamed(spec: EventSpec, feed: Feed) -> bool:
    """Whether the model that stands for the engine's own is one of its adapters in truth.

    Blocks with and without the adapter were then taken for the same.
    """
    return spec.model in feed.holdings.adapters
