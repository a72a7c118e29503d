"""What finished requests teach: answer lengths, engine speed, and how far to trust the prefix index.

Each lesson is an average that one request cannot turn over. Must never touch the books.
"""

from math import exp

from gateway.core.ledger import Account
from gateway.core.types import Finish, Ticket

# Answer length believed until a class and model have shown theirs (results.md: 250 if unknown).
PRIOR_OUTPUT_TOKENS = 250
_OUTPUT_WEIGHT = 0.05
_SETTLED = 18  # answers after which the plain mean would weigh a new one less than that
_UNKNOWN = (float(PRIOR_OUTPUT_TOKENS), 0)
# One report moves the trust by a fifth: ten wrong ones leave a tenth of it. It comes back within
# minutes by itself, because a backend that is not believed gets no requests that could prove it.
_TRUST_WEIGHT = 0.2
_TRUST_RECOVERY_S = 60.0
# Engines count cached tokens in whole blocks and never the last token: less than this is no miss.
_FULL_TRUST = 0.9
_SLACK_TOKENS = 64
# The index shrinks when more than about every sixth hit is a miss, and grows back when they fit.
_SHRINK, _GROW = 0.1, 0.02
# Where the engine told its capacity, half of it is the least that can be right (running requests
# and answers take the rest); where it did not, the prior may be off by far.
_LEAST_KNOWN_SHARE, _LEAST_SHARE = 0.5, 1 / 64


class OutputLengths:
    """Mean completion tokens per (model, class)."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], tuple[float, int]] = {}

    def expected(self, model: str, cls: str, max_tokens: int | None) -> int:
        """Return the tokens an answer is expected to have, at most `max_tokens`."""
        expected = round(self._means.get((model, cls), _UNKNOWN)[0])
        if expected < 1:  # noqa: PLR1730 - a third of the price of max
            expected = 1
        return expected if max_tokens is None else max(0, min(expected, max_tokens))

    def learn(self, model: str, cls: str, tokens: int) -> None:
        """Count one complete answer. The first ones outweigh the prior at once."""
        key = (model, cls)
        mean, count = self._means.get(key, _UNKNOWN)
        weight = _OUTPUT_WEIGHT if count >= _SETTLED else 1.0 / (count + 2)
        self._means[key] = (mean + weight * (tokens - mean), count + 1)

    def keep(self, models: set[str], classes: set[str]) -> None:
        """Forget models and classes that are no longer configured."""
        self._means = {
            key: mean for key, mean in self._means.items() if key[0] in models and key[1] in classes
        }


def trust(row: Account, now: float) -> float:
    """Return the share of an indexed hit that this backend is likely to serve from its cache."""
    if row.trust == 1.0:
        return 1.0
    now_trust = 1.0 - (1.0 - row.trust) * exp((row.trust_at - now) / _TRUST_RECOVERY_S)
    return 1.0 if now_trust > _FULL_TRUST else now_trust


def learn_cache(row: Account, ticket: Ticket, cached_tokens: int, now: float) -> bool:
    """Compare the predicted hit with the reported; return whether `index_share` changed."""
    row.hit_tokens_predicted += ticket.hit_tokens
    row.hit_tokens_reported += cached_tokens
    indexed = ticket.query.chain.hit_tokens(ticket.known_blocks)
    before = row.index_share
    if indexed <= _SLACK_TOKENS:
        return False
    held = min(1.0, (cached_tokens + _SLACK_TOKENS) / indexed)
    believed = 1.0 - (1.0 - row.trust) * exp((row.trust_at - now) / _TRUST_RECOVERY_S)
    row.trust = believed + _TRUST_WEIGHT * (held - believed)
    row.trust_at = now
    if held < _FULL_TRUST:
        told = row.snapshot is not None and row.snapshot.kv_capacity_tokens is not None
        least = _LEAST_KNOWN_SHARE if told else _LEAST_SHARE
        row.index_share = max(min(least, before), before * (1.0 - _SHRINK * (1.0 - held)))
    else:
        row.index_share = min(1.0, before * (1.0 + _GROW))
    return row.index_share != before


def learn_prefill(row: Account, ticket: Ticket, now: float) -> bool:
    """Learn prefill speed from a first token at `now` that had the engine to itself."""
    return row.engine.saw_prefill(
        now - ticket.dispatched_at,
        ticket.uncached_tokens,
        ticket.query.chain.tokens,
        row.in_flight + row.other_in_flight,
    )


def learn_tpot(row: Account, ticket: Ticket, finish: Finish, stretch: float) -> bool:
    """Learn decode speed from a finished stream; `row` has released it already."""
    started, ended = ticket.first_token_at, finish.last_token_at
    tokens = finish.usage.completion_tokens or finish.chunks
    if not ticket.query.stream or started is None or ended is None or tokens < 2:
        return False
    return row.engine.saw_tpot(
        (ended - started) / (tokens - 1),
        row.in_flight + 1 + row.other_in_flight,
        row.context_tokens + ticket.query.chain.tokens + row.other_context_tokens,
        stretch,
    )
