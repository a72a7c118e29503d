"""The backends of one model, and the candidates a decision looks at.

Keeps the list of eligible backends between decisions and rebuilds it only when eligibility may
have changed, so that a decision over hundreds of backends stays cheap. Must never choose.
"""

from collections.abc import Sequence
from operator import attrgetter

from gateway.core.hot import HotPrefixes
from gateway.core.learn import trust
from gateway.core.ledger import Account
from gateway.core.settings import ModelSpec
from gateway.core.types import Chain

# Up to here every backend gets a full price; above, the longest hits and the least loaded do.
SHORTLIST_ABOVE = 24
_MOST_HITS = 8
_LEAST_LOADED = 16
# Weight of the newest request in the token hit share: about the last hundred requests count.
_HIT_WEIGHT = 0.02

_by_load = attrgetter("load")


class Pool:
    """One model's backends, in configured order."""

    __slots__ = (
        "_allowed",
        "_eligible",
        "_epoch",
        "_ordered",
        "_until",
        "cursor",
        "hit_tokens",
        "hot",
        "prompt_tokens",
        "rows",
        "since_calibration",
        "spec",
    )

    def __init__(self, spec: ModelSpec, rows: Sequence[Account]) -> None:
        self.spec = spec
        self.rows = list(rows)
        self.cursor = 0
        self.hit_tokens = 0.0
        self.prompt_tokens = 0.0
        self.since_calibration = 0
        self.hot = HotPrefixes()
        self._eligible: list[Account] = []
        self._ordered: list[Account] = []
        self._allowed: frozenset[Account] = frozenset()
        self._epoch = -1
        self._until = 0.0

    def inherit(self, old: "Pool") -> None:
        """Keep what `old`, the same model's pool before a reload, has learnt."""
        self.cursor = old.cursor
        self.hit_tokens = old.hit_tokens
        self.prompt_tokens = old.prompt_tokens
        self.hot = old.hot

    @property
    def hit_share(self) -> float:
        """Share of recent prompt tokens believed cached where they were sent (H of the formula)."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def note_hit(self, hit_tokens: int, prompt_tokens: int) -> None:
        """Count one dispatched prompt towards `hit_share`."""
        self.hit_tokens += _HIT_WEIGHT * (hit_tokens - self.hit_tokens)
        self.prompt_tokens += _HIT_WEIGHT * (prompt_tokens - self.prompt_tokens)

    def eligible(self, now: float, epoch: int) -> list[Account]:
        """Return the backends that may be chosen, in configured order; owned by the pool.

        `epoch` counts the dispatcher's changes of eligibility. When every backend that is up has
        tripped its breaker, all of them are eligible: a failing answer says more than ours would.
        """
        if epoch != self._epoch or now >= self._until:
            usable = [row for row in self.rows if row.up and not row.draining]
            closed = [row for row in usable if row.breaker.allows(now)]
            self._eligible = closed or usable
            self._ordered = list(self._eligible)
            self._allowed = frozenset(self._eligible)
            waiting = [row.breaker.retry_at for row in usable if row.breaker.retry_at > now]
            self._until = min(waiting, default=float("inf"))
            self._epoch = epoch
        return self._eligible

    def shortlist(self, held: list[tuple[int, int]], by_slot: dict[int, Account]) -> list[Account]:
        """Return the eligible backends worth a full price: the longest hits, then the least loaded.

        `held` is the prefix index's answer. Call after `eligible`.
        """
        ordered = self._ordered
        ordered.sort(key=_by_load)
        chosen = ordered[:_LEAST_LOADED]
        taken = 0
        for row in chosen:
            taken |= row.bit
        left = _MOST_HITS
        for _, mask in reversed(held):
            if mask.bit_count() > _MOST_HITS:  # many homes: the least loaded of them
                homes: Sequence[Account] = ordered
            else:
                homes = [by_slot[slot] for slot in _slots(mask)]
            for row in homes:
                if mask & row.bit and not taken & row.bit and row in self._allowed:
                    taken |= row.bit
                    chosen.append(row)
                    left -= 1
                    if not left:
                        return chosen
        return chosen


def fill(
    rows: Sequence[Account], held: Sequence[tuple[int, int]], chain: Chain, now: float
) -> None:
    """Write each candidate's prefix figures: depth, hit, uncached tokens, seconds of prefill.

    `held` is the prefix index's answer: no backend is in two of its masks.
    """
    prompt = chain.tokens or 1
    hits = [(mask, blocks, chain.hit_tokens(blocks)) for blocks, mask in held]
    for row in rows:
        hit = depth = 0
        bit = row.bit
        for mask, blocks, tokens in hits:
            if mask & bit:
                depth = blocks
                hit = tokens
                if row.trust != 1.0:
                    hit = int(hit * trust(row, now))
                break
        uncached = prompt - hit if hit < prompt else 1
        engine = row.engine
        row.depth = depth
        row.hit_tokens = hit
        row.uncached_tokens = uncached
        row.prefill_s = uncached * (
            engine.prefill_token_s + engine.attention_s * (prompt - 0.5 * uncached)
        )


def _slots(mask: int) -> list[int]:
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
