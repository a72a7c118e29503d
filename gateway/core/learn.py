"""What finished requests teach of engines and models: answer lengths, prefill and decode speed.

Each lesson is an average that one request cannot turn over. Must never touch the books.
"""

from collections.abc import Mapping

from gateway.core.ledger import Account
from gateway.core.types import Finish, Ticket

# Answer length believed until a class and model have shown theirs (results.md: 250 if unknown).
PRIOR_OUTPUT_TOKENS = 250
_OUTPUT_WEIGHT = 0.05
_SETTLED = 18  # answers after which the plain mean would weigh a new one less than that
_UNKNOWN = (float(PRIOR_OUTPUT_TOKENS), 0)


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

    def of_model(self, model: str) -> dict[str, tuple[float, int]]:
        """Return what is known of a model's answers: class -> mean, how many were counted."""
        return {cls: mean for (name, cls), mean in self._means.items() if name == model}

    def restore(self, model: str, means: Mapping[str, tuple[float, int]]) -> None:
        """Go on from what an earlier process had learnt, for classes not heard of yet."""
        for cls, mean in means.items():
            self._means.setdefault((model, cls), mean)

    def keep(self, models: set[str], classes: set[str]) -> None:
        """Forget models and classes that are no longer configured."""
        self._means = {
            key: mean for key, mean in self._means.items() if key[0] in models and key[1] in classes
        }


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
