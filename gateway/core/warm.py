"""How a cold or returning backend is let in: not flooded, and not starved either.

A backend that comes back owes nothing, so it looks best for every request that has its prefix nowhere,
and would get all of them while its engine still compiles kernels and its cache is empty. For a few
seconds it may therefore have only so many requests in flight, growing to what the others have; then
no more is said about it. Without another backend that is warm nothing is held back: somebody has to
serve. Must never leave a request without a candidate.
"""

from collections.abc import Sequence
from math import inf

from gateway.core.ledger import Account

# In flight from the first moment on, however little the others have: no engine feels so few.
LEAST = 8
# `Account.warm_from` of a backend that is cold and has not been a candidate since.
COLD = inf


def begin(row: Account) -> None:
    """Note that a backend is cold; its ramp begins when it may first be chosen."""
    row.warm_from = COLD


def enter(candidates: Sequence[Account], now: float, warm_up_s: float) -> list[Account]:
    """Start and end ramps; return those of the candidates that are on one.

    None are when all of them would be: then nobody is held back.
    """
    warming = []
    for row in candidates:
        since = row.warm_from
        if since is None:
            continue
        if since == COLD:
            row.warm_from = since = now
        if now < since + warm_up_s:
            warming.append(row)
        else:
            row.warm_from = None
    return warming if len(warming) < len(candidates) else []


def ends(warming: Sequence[Account], warm_up_s: float) -> float:
    """Return when the first of the ramps that `enter` returned is over; infinity for none."""
    starts = [row.warm_from for row in warming if row.warm_from is not None]
    return min(starts) + warm_up_s if starts else inf


def full(
    candidates: Sequence[Account], warming: Sequence[Account], now: float, warm_up_s: float
) -> list[Account]:
    """Return who of `warming`, on its ramp, has as many requests as it may have now.

    What waits at the gateway for a backend counts as well.
    """
    warm = [row.in_flight for row in candidates if row.warm_from is None]
    mean = sum(warm) / max(1, len(warm))
    return [row for row in warming if _taken(row) >= _allowed(row, mean, now, warm_up_s)]


def _allowed(row: Account, mean: float, now: float, warm_up_s: float) -> float:
    since = row.warm_from
    return inf if since is None else max(LEAST, mean * (now - since) / warm_up_s)


def _taken(row: Account) -> int:
    return row.in_flight + (0 if row.backlog is None else row.backlog.count)
