"""Decisions put into words and figures: what `/explain` and `/decisions/{id}` show.

Reads candidates after a policy priced them. Must never influence a decision.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from gateway.core.belief import trust
from gateway.core.ledger import Account
from gateway.core.policies import Policy
from gateway.core.types import BackendScore, Decided, Explanation, Query, Ticket, TrailRow

# Request ids whose decision can still be looked up.
REMEMBERED = 1000
_TRAIL_ROWS = 32
_NOTABLE = 0.01

_by_cost = attrgetter("cost")

ONLY = "the only eligible backend"
NO_HIT = "no backend holds a prefix; lowest cost"
HOME = "longest prefix hit and lowest cost"
AWAY = "its prefix home costs more than recomputing here"
INVEST = "a prefix this popular gets another home"
NO_PREFILL = "runs no prefill; fewest requests in flight"
NOBODY = "no eligible backend"


def reason_for(rows: Sequence[Account], winner: Account) -> str:
    """Say in one phrase why `winner` came out of the priced `rows`."""
    if len(rows) == 1:
        return ONLY
    longest = 0
    for row in rows:
        if row.depth > longest:  # noqa: PLR1730 - a third of the price of max
            longest = row.depth
    if not longest:
        return NO_HIT
    return HOME if winner.depth == longest else AWAY


def trail_of(rows: Sequence[Account]) -> Sequence[TrailRow]:
    """Keep what the decision saw of each candidate (the accounts are overwritten by the next).

    Of a big pool only the cheapest are kept: a live ticket carries this.
    """
    if len(rows) > _TRAIL_ROWS:
        rows = sorted(rows, key=_by_cost)[:_TRAIL_ROWS]
    return [
        (
            row.name,
            row.hit_tokens,
            row.uncached_tokens,
            row.in_flight,
            row.owed_ns * 1e-9,
            row.cost,
            row.terms,
        )
        for row in rows
    ]


def scores(trail: Sequence[TrailRow], policy: Policy) -> list[BackendScore]:
    """Return the candidates of a decision as rows of an explanation."""
    return [
        BackendScore(
            name=name,
            eligible=True,
            why_not=None,
            hit_tokens=hit,
            uncached_tokens=uncached,
            in_flight=in_flight,
            owed_prefill_s=owed,
            cost_s=cost if policy.seconds else None,
            terms=dict(zip(policy.terms, terms, strict=True)),
        )
        for name, hit, uncached, in_flight, owed, cost, terms in trail
    ]


def why_not(row: Account, now: float) -> str:
    """Say why a backend is not among the candidates."""
    if not row.up:
        return "down"
    if row.draining:
        return "draining"
    if not row.breaker.allows(now):
        return f"breaker {row.breaker.state.value}"
    if row.warm_from is not None:
        return "warming up: it has enough for now"
    return "the policy looked at better ones only"


def left_out(row: Account, now: float) -> BackendScore:
    """Return the row of a backend that was no candidate; its prefix figures must be filled in."""
    return BackendScore(
        name=row.name,
        eligible=False,
        why_not=why_not(row, now),
        hit_tokens=row.hit_tokens,
        uncached_tokens=row.uncached_tokens,
        in_flight=row.in_flight,
        owed_prefill_s=row.owed_s,
        cost_s=None,
        terms={},
    )


def why_hit(row: Account, query: Query, blocks: int, now: float, *, exact: bool) -> str:
    """Say what is believed of a backend's cache for this prompt, and why.

    `blocks` = what its index holds; the row's prefix figures must be filled in.
    """
    count = len(query.chain.hashes)
    if exact:
        return f"the engine says it holds {row.depth} of {count} blocks"
    parts = [f"{row.depth} of {count} blocks indexed"]
    trusted = trust(row, now)
    if row.depth and trusted < 1.0:
        parts.append(f"trusted to {trusted:.0%}")
    parts.append(f"index holds {blocks} of {row.index_capacity_blocks} blocks")
    if abs(row.index_share - 1.0) >= _NOTABLE:
        parts.append(f"sized to {row.index_share:.0%} of the engine's cache by its reports")
    return "; ".join(parts)


def explanation(
    query: Query, policy: str, winner: str | None, reason: str, backends: list[BackendScore]
) -> Explanation:
    """Put the parts together."""
    return Explanation(
        cls=query.cls,
        class_rule=query.class_rule,
        prompt_tokens=query.chain.tokens,
        prompt_tokens_exact=query.chain.exact,
        policy=policy,
        winner=winner,
        reason=reason,
        backends=backends,
    )


# class, its rule, prompt tokens, exact, policy, winner, reason, trail, when it was dispatched
_Record = tuple[str, str, int, bool, Policy, str, str, Sequence[TrailRow], float]


class Memory:
    """The last decisions by request id; never more than `REMEMBERED`, and no prompt in any."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def remember(self, request_id: str, ticket: Ticket, policy: Policy) -> None:
        """Take over the ticket's trail; an id seen again replaces its record."""
        trail = ticket.trail
        if not trail:
            return
        ticket.trail = ()
        query = ticket.query
        chain = query.chain  # never kept: its hashes may be a megabyte
        records = self._records
        if request_id in records:
            records.move_to_end(request_id)
        records[request_id] = (
            query.cls,
            query.class_rule,
            chain.tokens,
            chain.exact,
            policy,
            ticket.backend,
            ticket.reason,
            trail,
            ticket.dispatched_at,
        )
        if len(records) > REMEMBERED:
            records.popitem(last=False)

    def recall(self, request_id: str) -> Explanation | None:
        """Return the decision as it was made, or None when the id is unknown or forgotten."""
        record = self._records.get(request_id)
        if record is None:
            return None
        cls, class_rule, prompt_tokens, exact, policy, winner, reason, trail, _ = record
        return Explanation(
            cls=cls,
            class_rule=class_rule,
            prompt_tokens=prompt_tokens,
            prompt_tokens_exact=exact,
            policy=policy.name,
            winner=winner,
            reason=reason,
            backends=scores(trail, policy),
        )

    def latest(self, count: int) -> list[Decided]:
        """Return the last `count` decisions, the newest first."""
        return [
            Decided(request_id, cls, winner, _hit_of(winner, trail), prompt_tokens, dispatched_at)
            for request_id, (
                cls,
                _,
                prompt_tokens,
                _,
                _,
                winner,
                _,
                trail,
                dispatched_at,
            ) in islice(reversed(self._records.items()), count)
        ]


def _hit_of(winner: str, trail: Sequence[TrailRow]) -> int:
    """Return the hit of a decision's winner: it is among the candidates kept."""
    return next((hit for name, hit, *_ in trail if name == winner), 0)
