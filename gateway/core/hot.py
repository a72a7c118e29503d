"""Prefixes that so much of the traffic shares that one home is not enough.

A price looks at one request: recomputing a shared prefix elsewhere is never worth it for that one,
so without this a common system prompt would keep a whole pool's traffic on the backend that had it
first (routing case R09). Here the recompute is an investment: once per backend, and only while the
prefix's share of the prompt tokens is more than its homes' fair share and they are the busier ones:
a long document that few ask for fills an engine like a short prompt that many send.
Must never hold more than a bounded number of hashes, or a byte of any prompt.
"""

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

from gateway.core.ledger import Account

# Requests after which all counts are halved: the memory is about the last thousand requests.
_HALVE_AT = 1024
# Requests of other prefixes assumed before any were seen: a few requests prove nothing.
_PRIOR = 4.0


class HotPrefixes:
    """How often each known prefix was asked for of late."""

    __slots__ = ("all_tokens", "counts", "tokens", "total", "where")

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}
        self.tokens: dict[int, float] = {}
        self.where: dict[int, tuple[int, int]] = {}  # depth and homes, as last found
        self.total = self.all_tokens = 0.0

    def __len__(self) -> int:
        return len(self.counts)

    def note(self, key: int | None, where: tuple[int, int] = (0, 0), tokens: float = 1.0) -> None:
        """Count a request whose longest known prefix ends in the block `key`; None = it had none.

        `where` = (how many blocks it has, which backends hold it); `tokens` = the prompt's.
        """
        self.total += 1.0
        self.all_tokens += tokens
        if key is not None:
            counts = self.counts
            if key in counts:
                counts[key] += 1.0
                self.tokens[key] += tokens
            else:
                counts[key] = 1.0
                self.tokens[key] = tokens
            self.where[key] = where
        if self.total >= _HALVE_AT:
            self.total /= 2
            self.all_tokens /= 2
            self.counts = {k: n / 2 for k, n in self.counts.items() if n >= 2}
            self.tokens = {key: self.tokens[key] / 2 for key in self.counts}
            self.where = {key: self.where[key] for key in self.counts}

    def hottest(self, most: int) -> list[tuple[int, float]]:
        """Return the prefixes asked for most, each with its share of recent requests."""
        top = nlargest(most, self.counts.items(), key=itemgetter(1))
        return [(key, seen / self.total) for key, seen in top]

    def homes_deserved(self, key: int, backends: int) -> float:
        """Return how many of `backends` the prefix's share of all prompt tokens fills."""
        seen = self.tokens.get(key)
        if seen is None:
            return 0.0
        return backends * seen / (self.all_tokens * (1.0 + _PRIOR / self.total))

    def deserves_more(self, key: int, homes: int, backends: int) -> bool:
        """Return whether the prefix's share of all prompt tokens fills more than its `homes`."""
        return self.homes_deserved(key, backends) > homes


def homes_busy(
    rows: Sequence[Account], mask: int, busier: float, prompt_tokens: float = 0.0
) -> bool:
    """Return whether the backends in `mask` are the busy ones of `rows`, and not all of them.

    Busy = the least busy has `busier` times as much in flight as the candidates on average and one
    more, in requests or in the tokens of their contexts (one more: `prompt_tokens`).
    """
    homes = [row for row in rows if row.bit & mask]
    if not homes or len(homes) == len(rows):
        return False
    least = min([row.in_flight + row.other_in_flight for row in homes])
    mean = sum([row.in_flight + row.other_in_flight for row in rows]) / len(rows)
    if least > busier * mean + 1.0:
        return True
    least = min([row.context_tokens + row.other_context_tokens for row in homes])
    mean = sum([row.context_tokens + row.other_context_tokens for row in rows]) / len(rows)
    return least > busier * mean + prompt_tokens
