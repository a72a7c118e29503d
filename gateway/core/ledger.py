"""The books: what each backend has been given and has not yet finished. Exact, and ours alone.

Every amount is an integer, and a ticket leaves with exactly what it brought, so an idle backend's
books are zero, not nearly zero. An entry lives as long as its request's handler; nothing here
expires by time. Must never read a clock, wait, or guess from metrics (snapshots only add what
*others* put on the engine, in separate fields).
"""

from heapq import heappop, heappush
from math import exp, inf

from gateway.core.arrivals import Arrivals
from gateway.core.backlog import Backlog
from gateway.core.belief import Belief
from gateway.core.breaker import Breaker
from gateway.core.engine_model import EngineModel
from gateway.core.settings import CostSpec
from gateway.core.types import BackendId, Chain, Snapshot, Ticket

# Shared prefixes are counted once at this grain: fine beside a KV cache of 420k tokens, and a
# 32k-token prompt costs 32 dictionary updates.
_CHECKPOINT_TOKENS = 1024
# An engine under load prefills slower than alone; the extra covers network and one decode step.
_SILENT_ALLOWANCE = 1.5
_SILENT_EXTRA_S = 0.1
# They end on a grid, many at once: a fraction of any prefill worth telling apart. Binary, so exact.
_SILENT_GRAIN_S = 1 / 64
# More than may be in flight; beyond, the next to end counts as ended.
MAX_SILENT = 16_384
STALE = -inf


class LedgerError(RuntimeError):
    """The books were asked for something impossible: a bug of the caller, never of a client."""


class Account:
    """One backend: its live requests, what they owe, and what a decision needs to know about it.

    `depth` .. `terms` are scratch space of the decision in progress: the dispatcher fills them for
    the candidates, a policy writes `cost` and `terms`, and the next decision overwrites them.
    `fresh_until` is when the sums that prices read must be made anew (`cost.refresh`), by the next
    decision that looks at this backend: STALE after any change, so three of them cost one refresh.
    """

    __slots__ = (
        "alone",
        "arrivals",
        "asked_tokens",
        "backlog",
        "belief",
        "bit",
        "breaker",
        "claimed_tokens",
        "constants",
        "context_token_s",
        "context_tokens",
        "cost",
        "crowding",
        "depth",
        "draining",
        "engine",
        "exact",
        "followed",
        "fresh_until",
        "full_blocks",
        "held_s",
        "hit_tokens",
        "hit_tokens_predicted",
        "hit_tokens_reported",
        "in_flight",
        "index_capacity_blocks",
        "index_share",
        "jitter",
        "kv_room",
        "kv_tokens",
        "kv_utilization",
        "live",
        "load",
        "name",
        "new_tokens",
        "oldest_use",
        "other_context_tokens",
        "other_in_flight",
        "other_owed_s",
        "owed_ns",
        "owed_tokens",
        "peak_in_flight",
        "pinned",
        "prefill_s",
        "queue_s",
        "rate",
        "rate_at",
        "reported_waiting",
        "retired",
        "saved_s",
        "sequence_s",
        "sequences",
        "serves",
        "slot",
        "slots_over",
        "snapshot",
        "stalled",
        "step_s",
        "terms",
        "tokens_per_block",
        "trust",
        "trust_at",
        "uncached_tokens",
        "unprefilled",
        "up",
        "warm_from",
    )

    def __init__(self, slot: BackendId, name: str, engine: EngineModel, breaker: Breaker) -> None:
        self.slot = slot
        self.bit = 1 << slot  # this backend in the prefix index's masks
        self.name = name
        self.engine = engine
        self.breaker = breaker
        self.constants = CostSpec()  # the fleet puts in the configured ones
        self.up = True
        self.draining = self.retired = False
        self.warm_from: float | None = None  # when it began to be let in (core/warm.py)
        self.serves: frozenset[str] = frozenset()
        # what our own live requests hold
        self.live: dict[int, Ticket] = {}
        self.in_flight = self.unprefilled = 0
        self.owed_ns = self.owed_tokens = 0
        self.context_tokens = self.kv_tokens = self.new_tokens = 0
        self.pinned: dict[int, list[int]] = {}
        self.rate = self.rate_at = 0.0
        self.arrivals = Arrivals()  # fades like `rate`
        self.alone = 0
        # what others put there, as far as the last fresh snapshot tells
        self.snapshot: Snapshot | None = None
        self.kv_utilization: float | None = None
        self.reported_waiting = 0
        self.peak_in_flight = 0
        self.other_in_flight = 0
        self.other_context_tokens = 0
        self.other_owed_s = 0.0
        # prefill seconds that wait at the gateway for this backend; by size, None = nothing waits
        self.held_s = 0.0
        self.backlog: Backlog | None = None
        # sums of the above that prices read (`cost.refresh`)
        self.sequences = self.queue_s = self.crowding = self.stalled = self.followed = 0.0
        self.step_s = self.sequence_s = self.context_token_s = 0.0
        self.kv_room = self.slots_over = self.load = self.jitter = 0.0
        self.fresh_until = STALE
        # the prefix index's view
        self.tokens_per_block = 0.0
        self.index_capacity_blocks = 0
        self.full_blocks = 0.0
        self.index_share = 1.0
        self.oldest_use: float | None = None
        self.exact = False  # its engine tells what it holds (core/exactness.py)
        self.trust = 1.0
        self.trust_at = 0.0
        self.belief = Belief()
        self.asked_tokens = self.claimed_tokens = 0  # all prompts ever sent, hits expected of them
        self.hit_tokens_predicted = 0
        self.hit_tokens_reported = 0
        self.saved_s = 0.0  # engine seconds that all hits saved, at the speed learnt by then
        # the decision in progress
        self.depth = 0
        self.hit_tokens = 0
        self.uncached_tokens = 0
        self.prefill_s = 0.0
        self.cost = 0.0
        self.terms: tuple[float, ...] = ()

    @property
    def owed_s(self) -> float:
        """Prefill seconds dispatched by us that have not shown a first token."""
        return self.owed_ns * 1e-9

    def congestion(self, now: float) -> float:
        """Return prefill seconds dispatched per second, an average over `congestion_window_s`."""
        return self.rate * exp((self.rate_at - now) / self.constants.congestion_window_s)

    def place(self, ticket: Ticket, now: float) -> None:
        """Enter `ticket`, whose `prefill_s` and `uncached_tokens` are already set for this backend."""
        ident = ticket.id
        if ident in self.live:
            raise LedgerError(f"ticket {ident} is already on {self.name}")
        self.live[ident] = ticket
        self.in_flight = in_flight = self.in_flight + 1
        if in_flight > self.peak_in_flight:  # noqa: PLR1730 - a third of the price of max
            self.peak_in_flight = in_flight
        self.fresh_until = STALE
        if not ticket.query.prefills:
            return
        self.alone = 0 if self.unprefilled or self.other_owed_s else ident
        self.unprefilled += 1
        ticket.owes = True
        prefill_s = ticket.prefill_s
        chain = ticket.query.chain
        tokens = chain.tokens
        self.owed_ns += int(prefill_s * 1e9)
        self.owed_tokens += ticket.uncached_tokens
        self.context_tokens += tokens
        # a prompt this short has no checkpoint (see `_stride`)
        if 2 * len(chain.hashes) * chain.tokens_per_block > _CHECKPOINT_TOKENS:
            tokens = self._pin(chain)
        self.kv_tokens += tokens
        self.new_tokens = tokens  # of the last one placed: what it shares with no other
        window_s = self.constants.congestion_window_s
        rate = self.rate
        left = 1.0
        if rate:
            left = exp((self.rate_at - now) / window_s)
            rate *= left
        self.rate = rate + prefill_s / window_s
        self.rate_at = now
        self.arrivals.note(ticket.query.cls, 1.0 / window_s, left)

    def prefilled(self, ticket: Ticket) -> bool:
        """Take the prefill of `ticket` off the books; return whether it had the engine to itself."""
        if ticket.id not in self.live:
            raise LedgerError(f"ticket {ticket.id} is not on {self.name}")
        if not ticket.owes:
            return False
        self.fresh_until = STALE
        ticket.owes = False
        self.unprefilled -= 1
        self.owed_ns -= int(ticket.prefill_s * 1e9)
        self.owed_tokens -= ticket.uncached_tokens
        return self.alone == ticket.id

    def release(self, ticket: Ticket) -> bool:
        """Take `ticket` off the books; False when it was not on them."""
        live = self.live
        if ticket.id not in live:
            return False
        if ticket.owes:
            self.prefilled(ticket)
        del live[ticket.id]
        self.in_flight -= 1
        self.fresh_until = STALE
        query = ticket.query
        if not query.prefills:
            return True
        chain = query.chain
        tokens = chain.tokens
        self.context_tokens -= tokens
        if 2 * len(chain.hashes) * chain.tokens_per_block > _CHECKPOINT_TOKENS:
            tokens = self._unpin(chain)
        self.kv_tokens -= tokens
        return True

    def forget_rate(self, ticket: Ticket, now: float) -> None:
        """Take back the congestion of a prefill that never ran."""
        window_s = self.constants.congestion_window_s
        gone = exp((ticket.dispatched_at - now) / window_s) / window_s
        left = exp((self.rate_at - now) / window_s)
        self.rate = max(0.0, self.rate * left - ticket.prefill_s * gone)
        self.rate_at = now
        self.arrivals.take_back(ticket.query.cls, gone, left)

    def _pin(self, chain: Chain) -> int:
        """Count one more user of each checkpoint; return the tokens nobody had pinned before."""
        stride = _stride(chain)
        weight = int(stride * chain.tokens_per_block)
        pinned = self.pinned
        new = chain.tokens
        for key in chain.hashes[stride - 1 :: stride]:
            entry = pinned.get(key)
            if entry is None:
                pinned[key] = [1, weight]
            else:
                entry[0] += 1
                new -= weight
        return new

    def _unpin(self, chain: Chain) -> int:
        """Undo `_pin`; return the tokens that nobody pins any more."""
        stride = _stride(chain)
        weight = int(stride * chain.tokens_per_block)
        pinned = self.pinned
        gone = chain.tokens
        for key in chain.hashes[stride - 1 :: stride]:
            entry = pinned[key]
            entry[0] -= 1
            if entry[0]:
                gone -= weight
            else:
                gone += entry[1] - weight
                del pinned[key]
        return gone


class SilentPrefills:
    """Prefills whose end nobody will see, because the answer comes whole (`stream` False).

    They leave the books when they should be over by our own estimate; otherwise a backend that
    serves such requests would seem to owe all it has in flight. An entry outlives its request by
    less than its estimate. `next_due` is when `due` has something to do: infinity for never.
    """

    __slots__ = ("_added", "_heap", "next_due")

    def __init__(self) -> None:
        self.next_due = inf
        self._heap: list[tuple[float, int, Account, Ticket]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, row: Account, ticket: Ticket, now: float) -> None:
        """Expect the prefill to be over once all that `row` owes now is, with some allowance."""
        owed_s = row.owed_ns * 1e-9 + row.other_owed_s
        due = now + _SILENT_ALLOWANCE * owed_s + _SILENT_EXTRA_S
        due = (due // _SILENT_GRAIN_S + 1.0) * _SILENT_GRAIN_S
        self._added += 1
        heap = self._heap
        heappush(heap, (due, self._added, row, ticket))
        if len(heap) > MAX_SILENT:
            self._settle()
        if due < self.next_due:  # noqa: PLR1730 - a third of the price of min
            self.next_due = due

    def due(self, now: float) -> list[Account]:
        """Settle what should be over; return the backends whose books changed."""
        heap = self._heap
        changed = []
        while heap and heap[0][0] <= now:
            row = self._settle()
            if row is not None:
                changed.append(row)
        self.next_due = heap[0][0] if heap else inf
        return changed

    def _settle(self) -> Account | None:
        """Take the next off the books; return its backend if it was still on them."""
        _, _, row, ticket = heappop(self._heap)
        if not ticket.owes or row.live.get(ticket.id) is not ticket:
            return None
        row.prefilled(ticket)
        return row


def _stride(chain: Chain) -> int:
    """Blocks between checkpoints: a power of two, so that small drifts of the ratio change nothing.

    Never less than half of `_CHECKPOINT_TOKENS / tokens_per_block`.
    """
    blocks = int(_CHECKPOINT_TOKENS / max(1.0, chain.tokens_per_block))
    return 1 << max(0, blocks.bit_length() - 1)
