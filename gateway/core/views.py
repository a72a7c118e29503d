"""What can be read of the dispatcher: its settings, what it would decide, its figures.

The reading half of the facade (`core/dispatcher.py` adds what changes the books). Must never
change a book, count anything or move the random state; a decision shown to it is remembered.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from operator import attrgetter
from random import Random

from gateway.core import explain, status
from gateway.core.chooser import Chooser
from gateway.core.classes import Classes
from gateway.core.classify import Features
from gateway.core.fleet import Fleet, OnBreaker
from gateway.core.key_limits import Keys
from gateway.core.learn import OutputLengths
from gateway.core.ledger import STALE, Account, SilentPrefills
from gateway.core.policies import POLICIES, policy_named
from gateway.core.pool import JITTER_S
from gateway.core.settings import CoreSettings, ModelSpec
from gateway.core.shadow import Shadow, Tally
from gateway.core.types import (
    BackendScore,
    BackendStatus,
    ClassStatus,
    Decided,
    Explanation,
    HotPrefix,
    Query,
    Ticket,
)

_HOTTEST = 20  # prefixes shown
_LEAST_BLOCK = 8  # tokens: smaller blocks cost more to index than they tell


class Views:
    """One fleet of backends with its classes, books and memory of decisions, to look at."""

    def __init__(self, settings: CoreSettings, rng: Random, now: float) -> None:
        policy = policy_named(settings.routing.policy)
        self._rng = rng
        self._fleet = Fleet(settings, rng)
        self._chooser = Chooser(self._fleet, policy, rng)
        self._choose = self._chooser.choose  # what decides for live requests
        self._shadow: Shadow | None = None
        self._cast_shadow(settings)
        self._silent = SilentPrefills()
        self._refresh_all()
        self._classes = Classes(settings.classes, now)
        self._keys = Keys(settings.keys, now)
        self._outputs = OutputLengths()
        self._memory = explain.Memory()
        self._last_id = 0

    @property
    def settings(self) -> CoreSettings:
        """The settings in force."""
        return self._fleet.settings

    @property
    def policy(self) -> str:
        """Name of the policy in force."""
        return self._chooser.policy.name

    @property
    def shadow(self) -> Tally | None:
        """What the shadow policy would have done so far; None without one. Owned by the core."""
        return None if self._shadow is None else self._shadow.tally

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """Configured models."""
        return self._fleet.settings.models

    def resolve(self, model: str) -> str | None:
        """Return the configured name behind a model id or alias; None = nobody serves it."""
        return self._fleet.resolve(model)

    def classify(self, features: Features) -> tuple[str, str]:
        """Return (class name, the rule that decided, as text)."""
        return self._classes.classifier.classify(features)

    def expected_output(self, model: str, cls: str, max_tokens: int | None) -> int:
        """Return how many tokens the answer will likely have, learnt per model and class."""
        return self._outputs.expected(model, cls, max_tokens)

    def block_tokens(self, model: str) -> int | None:
        """Return the block size that fits all of a model's engines; None = none told its own.

        Blocks of different engines are whole numbers of it; below `_LEAST_BLOCK` the smallest is
        taken as it is.
        """
        pool = self._fleet.pools.get(model)
        rows = [] if pool is None else pool.rows
        told = [row.snapshot.block_tokens or 0 for row in rows if row.snapshot is not None]
        sizes = [size for size in told if size > 0]
        if not sizes:
            return None
        shared = gcd(*sizes)
        return shared if shared >= _LEAST_BLOCK else min(sizes)

    def tell_breakers(self, tell: OnBreaker) -> None:
        """Call `tell` with each change of a backend's breaker, inside the change."""
        self._fleet.on_breaker = tell

    # -- looking in -------------------------------------------------------------------------

    def explain(self, query: Query, now: float) -> Explanation:
        """Return what `admit` would decide now. Changes nothing, not even the random state."""
        state = self._rng.getstate()
        try:
            return self._explain(query, now)
        finally:
            self._rng.setstate(state)

    def remember(self, request_id: str, ticket: Ticket, now: float) -> None:  # noqa: ARG002
        """Keep the ticket's last decision for `decisions`; call again after a `reassign`."""
        self._memory.remember(request_id, ticket, POLICIES[ticket.policy])

    def decisions(self, request_id: str) -> Explanation | None:
        """Return the decision made for a request id, while it is among the last thousand."""
        return self._memory.recall(request_id)

    def latest(self, count: int) -> list[Decided]:
        """Return the last `count` decisions remembered, the newest first."""
        return self._memory.latest(count)

    def backends(self, now: float, model: str | None = None) -> list[BackendStatus]:
        """Return the figures of all backends, or of one model's."""
        if model is None:
            rows: Sequence[Account] = list(self._fleet.by_name.values())
        else:
            pool = self._fleet.pools.get(model)
            rows = [] if pool is None else pool.rows
        blocks = self._fleet.trie.blocks
        events = self._fleet.exactness.status
        return [status.backend_status(row, blocks(row.slot), now, events(row)) for row in rows]

    def classes(self, now: float) -> list[ClassStatus]:
        """Return the figures of all classes."""
        return [
            status.class_status(b.spec.name, b.bucket, b.admitted, b.rejected, now)
            for b in self._classes.all()
        ]

    def hot_prefixes(self, backend: str | None = None) -> list[HotPrefix]:
        """Return the prefixes asked for most of each model, a few; of one backend's homes only."""
        found = []
        for name, pool in self._fleet.pools.items():
            for key, ratio in pool.hot.hottest(_HOTTEST):
                depth, mask = pool.hot.where[key]
                homes = tuple(row.name for row in pool.rows if row.bit & mask)
                if backend is None or backend in homes:
                    found.append(HotPrefix(name, f"{key:016x}", depth, ratio, homes))
        found.sort(key=attrgetter("request_ratio"), reverse=True)
        return found[:_HOTTEST]

    def pools(self) -> list[tuple[str, float]]:
        """Return each model with how full its backends are; nothing without a queue."""
        return []

    @property
    def index_bytes(self) -> int:
        """Estimated memory of the prefix index, and of what engines told of theirs."""
        return self._fleet.trie.bytes + self._fleet.exactness.bytes

    @property
    def index_nodes(self) -> int:
        """Nodes of the prefix index."""
        return self._fleet.trie.nodes

    # -- inside ------------------------------------------------------------------------------

    def _catch_up(self, now: float) -> None:
        """Let time do what it does to the books: stale snapshots, prefills nobody will report."""
        if now >= self._fleet.fresh_until:
            self._fleet.expire_snapshots(now)
            self._refresh_all()
        self._silent.due(now)

    def _explain(self, query: Query, now: float) -> Explanation:
        pool = self._fleet.pools.get(query.model)
        if pool is None:
            return explain.explanation(query, self.policy, None, explain.NOBODY, [])
        slo = self._classes.named(query.cls).spec.slo
        self._catch_up(now)
        chooser = self._chooser
        winner = chooser.choose(pool, query, slo, now)
        table = {s.name: s for s in explain.scores(explain.trail_of(chooser.rows), chooser.used)}
        others = [row for row in pool.rows if row.name not in table]
        chooser.measure(others, query, now)
        table |= {row.name: explain.left_out(row, now) for row in others}
        return explain.explanation(
            query,
            chooser.used.name,
            None if winner is None else winner.name,
            chooser.reason,
            [self._with_belief(table[row.name], row, query, now) for row in pool.rows],
        )

    def _with_belief(
        self, score: BackendScore, row: Account, query: Query, now: float
    ) -> BackendScore:
        """Add what a backend's hit was looked up in, and why it is believed."""
        if not query.prefills:
            return score
        fleet = self._fleet
        exact = fleet.exactness.is_exact(row, query.model, query.chain)
        return replace(
            score,
            index="exact" if exact else "approximate",
            depth_blocks=row.depth,
            indexed_tokens=query.chain.hit_tokens(row.depth),
            why_hit=explain.why_hit(row, query, fleet.trie.blocks(row.slot), now, exact=exact),
        )

    def _cast_shadow(self, settings: CoreSettings) -> None:
        """Have live requests decided with a shadow or without, as the settings say."""
        name = settings.routing.shadow
        old = self._shadow
        self._shadow = None
        self._choose = self._chooser.choose
        if name is not None:
            self._shadow = Shadow(self._chooser, self._fleet, policy_named(name))
            self._choose = self._shadow.choose
            if old is not None and old.tally.policy == name:
                self._shadow.tally = old.tally

    def _refresh_all(self) -> None:
        for row in self._fleet.by_name.values():
            row.fresh_until = STALE
            row.jitter = self._rng.random() * JITTER_S
