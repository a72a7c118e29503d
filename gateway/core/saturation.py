"""How full a backend and a pool are, as one number: 0 = idle, 1 = the next request waits.

It is the largest of three shares: prefill seconds owed and waiting here over W, KV tokens over what
requests may fill, sequences over what the engine takes. Above 1 it says how many times over: 3 =
three times W of prefill is owed or waits. Reads only.
"""

from collections.abc import Callable, Iterable
from math import inf

from gateway.core.ledger import Account

# W may be configured as 0: then anything owed is far above it.
_LEAST_LIMIT_S = 1e-3


def of_backend(row: Account, limit_s: float, kv_share: float) -> float:
    """Return a backend's saturation. `limit_s` is W, `kv_share` the part of the KV requests fill."""
    engine = row.engine
    owed = row.owed_s + row.other_owed_s + row.held_s
    kv = row.kv_tokens + row.other_context_tokens
    return max(
        owed / max(limit_s, _LEAST_LIMIT_S),
        kv / (kv_share * engine.kv_tokens) if engine.kv_tokens else 0.0,
        row.in_flight / engine.max_sequences if engine.max_sequences else 0.0,
    )


def of_pool(rows: Iterable[Account], of: Callable[[Account], float]) -> float:
    """Return the mean of the backends that may be chosen, infinity when there is none.

    The mean, so that it tells how many backends the load needs: their number times this.
    """
    values = [of(row) for row in rows if row.up and not row.draining]
    return sum(values) / len(values) if values else inf
