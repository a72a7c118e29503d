"""The backends of one model, and the candidates a decision looks at.

Keeps the list of eligible backends between decisions and rebuilds it only when eligibility may
have changed, so that a decision over hundreds of backends stays cheap. Must never choose.
"""

from collections.abc import Sequence
from operator import attrgetter
from random import Random

from gateway.core import warm
from gateway.core.belief import trust
from gateway.core.cost import Demand, Held, refresh
from gateway.core.engine_model import calibrate
from gateway.core.hot import HotPrefixes
from gateway.core.ledger import STALE, Account
from gateway.core.ring import Ring
from gateway.core.settings import ModelSpec

# Up to here every backend gets a full price; above, the longest hits and the least loaded do.
SHORTLIST_ABOVE = 24
_MOST_HITS = 8
_LEAST_LOADED = 16
# Weight of the newest request in the token hit share: about the last hundred requests count.
_HIT_WEIGHT = 0.02

# The random part of a load: an idle backend that was just used comes back anywhere among its equals.
JITTER_S = 1e-9

_by_load = attrgetter("load")


class Pool:
    """One model's backends, in configured order.

    `candidates` are the eligible ones while `epoch` is the fleet's and `until` is not reached, and
    `warming` those of them that are only being let in; `eligible` makes it so.
    """

    __slots__ = (
        "_allowed",
        "_ordered",
        "_ring",
        "candidates",
        "cursor",
        "epoch",
        "hit_tokens",
        "hot",
        "prompt_tokens",
        "rows",
        "samples",
        "since_calibration",
        "spec",
        "until",
        "warm_up_s",
        "warming",
    )

    def __init__(self, spec: ModelSpec, rows: Sequence[Account], warm_up_s: float = 0.0) -> None:
        self.spec = spec
        self.rows = list(rows)
        self.cursor = 0
        self.hit_tokens = 0.0
        self.prompt_tokens = 0.0
        self.since_calibration = 0
        self.samples = 0
        self.hot = HotPrefixes()
        self.warm_up_s = warm_up_s
        self.candidates: list[Account] = []
        self.warming: list[Account] = []
        self.epoch = -1
        self.until = 0.0
        self._ordered: list[Account] = []
        self._allowed: frozenset[Account] = frozenset()
        self._ring: Ring | None = None

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

    def calibrate(self, rng: Random) -> None:
        """Turn what the backends' engines showed since the last time into prices.

        Equal loads of a big pool are also put into another order.
        """
        if len(self.rows) > SHORTLIST_ABOVE:
            for row in self.rows:
                was = row.jitter
                row.jitter = rng.random() * JITTER_S
                row.load += row.jitter - was
        samples = sum([row.engine.samples for row in self.rows])
        if samples != self.samples:
            self.samples = samples
            calibrate([row.engine for row in self.rows])
            for row in self.rows:
                row.fresh_until = STALE

    def eligible(self, now: float, epoch: int) -> list[Account]:
        """Return the backends that may be chosen, in configured order; owned by the pool.

        `epoch` counts the dispatcher's changes of eligibility. When every backend that is up has
        tripped its breaker, all of them are eligible: a failing answer says more than ours would.
        """
        if epoch != self.epoch or now >= self.until:
            usable = [row for row in self.rows if row.up and not row.draining]
            closed = [row for row in usable if row.breaker.allows(now)]
            self.candidates = closed or usable
            self._ordered = list(self.candidates)
            self._allowed = frozenset(self.candidates)
            waiting = [row.breaker.retry_at for row in usable if row.breaker.retry_at > now]
            self.warming = warm.enter(self.candidates, now, self.warm_up_s)
            self.until = min([*waiting, warm.ends(self.warming, self.warm_up_s)])
            self.epoch = epoch
        return self.candidates

    def full(self, now: float) -> list[Account]:
        """Return who of `warming` should get nothing more for now."""
        return warm.full(self.candidates, self.warming, now, self.warm_up_s)

    def ring(self, virtual_nodes: int) -> Ring:
        """Return the hash ring of all backends, eligible or not; made when first asked for."""
        ring = self._ring
        if ring is None or ring.virtual_nodes != virtual_nodes:
            ring = self._ring = Ring([row.name for row in self.rows], virtual_nodes)
        return ring

    def shortlist(self, held: Held, by_slot: dict[int, Account], now: float) -> list[Account]:
        """Return the eligible backends worth a full price: the longest hits, then the least loaded.

        `held` is the prefix index's answer. Call after `eligible`.
        """
        ordered = self._ordered
        for row in ordered:
            if now >= row.fresh_until:
                refresh(row, now)
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


def fill(rows: Sequence[Account], held: Held, demand: Demand) -> None:
    """Write each candidate's prefix figures: depth, hit, uncached tokens, seconds of prefill.

    `held` is the prefix index's answer: no backend is in two of its masks. What prices read of the
    books is brought up to date where it is stale.
    """
    now = demand.now
    chain = demand.chain
    prompt = demand.prompt_tokens
    length = float(prompt)
    blocks, mask = held[-1] if held else (0, 0)
    covered = chain.hit_tokens(blocks)
    shorter = held[:-1]
    for row in rows:
        if now >= row.fresh_until:
            refresh(row, now)
        depth = hit = 0
        if mask & row.bit:
            depth, hit = blocks, covered
        elif shorter:
            for fewer, some in shorter:
                if some & row.bit:
                    depth, hit = fewer, chain.hit_tokens(fewer)
        row.depth = depth
        if hit:
            if row.trust != 1.0:
                hit = int(hit * trust(row, now))
            row.uncached_tokens = uncached = prompt - hit if hit < prompt else 1
            left = float(uncached)
        else:
            row.uncached_tokens = prompt
            left = length
        row.hit_tokens = hit
        engine = row.engine
        row.prefill_s = left * (engine.prefill_token_s + engine.attention_s * (length - 0.5 * left))


def _slots(mask: int) -> list[int]:
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
