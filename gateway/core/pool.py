"""The backends of one model, and the candidates a decision looks at.

Keeps the list of eligible backends between decisions and rebuilds it only when eligibility may
have changed, so that a decision over hundreds of backends stays cheap. Must never choose.
"""

from collections.abc import Sequence
from operator import attrgetter

from gateway.core.ledger import Account
from gateway.core.settings import ModelSpec
from gateway.core.types import BackendId

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
        taken = {row.slot for row in chosen}
        left = _MOST_HITS
        for _, mask in reversed(held):
            homes = [by_slot[slot] for slot in _slots(mask) if slot in by_slot]
            if len(homes) > left:
                homes.sort(key=_by_load)
            for row in homes:
                if row.slot not in taken and row in self._allowed and left:
                    taken.add(row.slot)
                    chosen.append(row)
                    left -= 1
            if not left:
                break
        return chosen


def fill_depths(
    rows: Sequence[Account], held: list[tuple[int, int]], by_slot: dict[int, Account]
) -> None:
    """Write to each candidate's `depth` how many leading blocks it is believed to hold."""
    for row in rows:
        row.depth = 0
    for depth, mask in held:
        for slot in _slots(mask):
            if slot in by_slot:
                by_slot[slot].depth = depth


def _slots(mask: int) -> list[BackendId]:
    slots = []
    while mask:
        low = mask & -mask
        slots.append(BackendId(low.bit_length() - 1))
        mask ^= low
    return slots
