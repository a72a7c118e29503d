"""All backends and models that are configured: slots, books, pools, and what the engines report.

Live requests survive every change: a removed backend keeps its books, out of sight, until its last
request ended, and only then is its slot free. Must never choose a backend or touch a bucket.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from gateway.core import warm
from gateway.core.belief import claim_of, learn_cache
from gateway.core.breaker import Breaker, State
from gateway.core.counted import learn_counters
from gateway.core.engine_model import EngineModel
from gateway.core.exactness import Exactness
from gateway.core.ledger import Account
from gateway.core.pool import Pool
from gateway.core.settings import BackendSpec, CoreSettings
from gateway.core.trie import MAX_SLOTS, RadixTrie
from gateway.core.types import BackendId, Snapshot, Ticket

# Believed size of a block in tokens before the first prompt: 4 bytes per token.
_BYTES_PER_TOKEN = 4.0
# A ratio drifts a little with every prompt; the index is resized only for a change that matters.
_LEAST_FIT, _MOST_FIT = 0.9, 1.1
_TOKENS_PER_BLOCK_WEIGHT = 0.05
# The index share of a backend evicts with every prompt from here on.
_FULL = 0.98
# A target below this is no target: it must not make a class infinitely urgent.
_LEAST_TARGET_S = 0.01
# Same engine process if the start times it reports differ by no more than rounding.
_SAME_START_S = 1.0


OnBreaker = Callable[[str, State, str], None]
"""Takes a backend, its breaker's new state, and why."""


class Fleet:
    """Accounts by name and slot, pools by model. `epoch` grows with every change of eligibility."""

    def __init__(self, settings: CoreSettings, rng: Random) -> None:
        check(settings)
        self._rng = rng
        self.trie = RadixTrie(settings.index_bytes)
        self.exactness = Exactness(self.trie)
        self.settings = settings
        self.epoch = 0
        self.by_name: dict[str, Account] = {}
        self.by_slot: dict[int, Account] = {}
        self.pools: dict[str, Pool] = {}
        self.names: dict[str, str] = {}
        self.fresh_until = float("inf")
        self.on_breaker: OnBreaker | None = None
        self.apply(settings)
        for row in self.by_name.values():
            row.warm_from = None  # nothing is known of how long they run

    def apply(self, settings: CoreSettings) -> None:
        """Take new settings; ValueError, and nothing changed, when they contradict themselves."""
        check(settings)
        wanted = {spec.name: spec for spec in settings.backends}
        removed = [row for name, row in self.by_name.items() if name not in wanted]
        added = [spec for spec in settings.backends if self._account(spec.name) is None]
        busy = sum(1 for row in self.by_slot.values() if row.in_flight and row.name not in wanted)
        if len(wanted) + busy > MAX_SLOTS:
            raise ValueError(f"more than {MAX_SLOTS} backends, those still draining included")
        self.settings = settings
        self.trie.max_bytes = settings.index_bytes
        for row in removed:
            self._retire(row)
        for spec in added:
            self._add(spec)
        self.by_name = {name: self._revive(spec) for name, spec in wanted.items()}
        urgency = {
            spec.name: 1.0 / max(spec.slo.ttft_s, _LEAST_TARGET_S) for spec in settings.classes
        }
        for row in self.by_slot.values():
            row.constants = settings.routing.cost
            row.arrivals.apply(urgency)
        self._forget_replaced(settings)
        self._rebuild_pools(settings)
        self.epoch += 1

    def resolve(self, model: str) -> str | None:
        """Return the configured name behind a model id or alias."""
        return self.names.get(model)

    def set_up(self, row: Account, *, up: bool) -> None:
        """Note what the health checks say; coming back clears the breaker."""
        if row.up != up:
            row.up = up
            if up:
                row.breaker.reset()
                warm.begin(row)
                if not is_identified(row.snapshot):
                    self.forget(row)
            self.epoch += 1

    def drain(self, backend: str, *, draining: bool) -> bool:
        """Take a backend out of choice (or back), whatever its health; False = none of that name."""
        row = self.by_name.get(backend)
        if row is None:
            return False
        row.draining = draining
        self.epoch += 1
        return True

    def observe(self, row: Account, snapshot: Snapshot) -> None:
        """Correct the books by what the engine reports: others' load, capacity, a restart."""
        if restarted(row.snapshot, snapshot):
            self.forget(row)
            warm.begin(row)
            self.epoch += 1
        row.snapshot = snapshot
        row.kv_utilization = snapshot.kv_utilization
        capacity = snapshot.kv_capacity_tokens
        if capacity and capacity != row.engine.kv_tokens:
            row.engine.kv_tokens = capacity
            self.fit_index(row)
        self.exactness.note_capacity(row)
        if not row.exact and learn_counters(row, self.trie, snapshot):
            self.fit_index(row)
        self._add_others(row, snapshot)
        self.fresh_until = min(self.fresh_until, snapshot.at + self.settings.stale_after_s)

    def learn(
        self,
        row: Account,
        ticket: Ticket,
        cached_tokens: int | None,
        now: float,
    ) -> None:
        """Take in what an answer showed of the backend's cache."""
        trie = self.trie
        if cached_tokens is not None:
            row.belief.told_at = now
            if row.exact and ticket.query.chain.exact:  # the trie was not what predicted
                row.hit_tokens_predicted += ticket.hit_tokens
                row.hit_tokens_reported += cached_tokens
                row.belief.count(ticket.hit_tokens, cached_tokens)
                self.exactness.judge(row, ticket.hit_tokens, cached_tokens)
            elif learn_cache(row, trie, claim_of(ticket), cached_tokens, now):
                self.fit_index(row)
        trie.settle(row.slot)
        row.oldest_use = trie.oldest_use(row.slot, row.full_blocks)

    def forget(self, row: Account) -> None:
        """Forget what the backend holds: it is another process, its cache is empty."""
        self.trie.drop(row.slot)
        self.exactness.restart_told(row)
        row.oldest_use = None
        row.trust = 1.0
        row.belief.clear()
        row.belief.counted = None

    def expire_snapshots(self, now: float) -> None:
        """Fall back to our own books where the last snapshot is too old to say anything.

        With no load of others on it, such a backend would look better than those that tell of theirs:
        it is taken to have what the fresh ones of its model have on average.
        """
        limit = self.settings.stale_after_s
        self.fresh_until = float("inf")
        stale = set()
        for row in self.by_name.values():
            if row.snapshot is None:
                continue
            if now >= row.snapshot.at + limit:
                stale.add(row)
                row.kv_utilization = None
                row.other_in_flight = row.other_context_tokens = row.reported_waiting = 0
                row.other_owed_s = 0.0
            else:
                self.fresh_until = min(self.fresh_until, row.snapshot.at + limit)
        for pool in self.pools.values() if stale else ():
            fresh = [row for row in pool.rows if row.snapshot is not None and row not in stale]
            for row in stale.intersection(pool.rows) if fresh else ():
                row.other_in_flight = sum(r.other_in_flight for r in fresh) // len(fresh)
                row.other_context_tokens = sum(r.other_context_tokens for r in fresh) // len(fresh)
                row.other_owed_s = sum(r.other_owed_s for r in fresh) / len(fresh)

    def note_block_size(self, row: Account, tokens_per_block: float) -> None:
        """Keep the index's capacity in step with how many tokens a block of it stands for."""
        known = row.tokens_per_block
        drift = tokens_per_block - known
        if -0.5 * known <= drift <= 0.5 * known:
            row.tokens_per_block = mean = known + _TOKENS_PER_BLOCK_WEIGHT * drift
        else:  # another way of hashing, not drift
            row.tokens_per_block = mean = tokens_per_block
        fitting = row.index_share * row.engine.kv_tokens / mean
        capacity = row.index_capacity_blocks
        if not _LEAST_FIT * capacity <= fitting <= _MOST_FIT * capacity:
            self.fit_index(row)

    def fit_index(self, row: Account) -> None:
        """Size the backend's share of the index to its KV cache."""
        blocks = int(row.index_share * row.engine.kv_tokens / row.tokens_per_block)
        row.index_capacity_blocks = blocks
        row.full_blocks = _FULL * blocks
        self.trie.set_capacity(row.slot, blocks)

    def settle(self, row: Account) -> None:
        """Free the slot of a removed backend whose last request just ended."""
        if row.retired and not row.in_flight:
            self.by_slot.pop(row.slot, None)

    def spares(self, row: Account, now: float) -> bool:
        """Return whether a backend that is being let in has enough for now."""
        for pool in self.pools.values():
            pool.eligible(now, self.epoch)
            if row in pool.warming and row in pool.full(now):
                return True
        return False

    def _breaker_told(self, row: Account, state: State, why: str) -> None:
        if state is State.CLOSED:
            warm.begin(row)
        if self.on_breaker is not None:
            self.on_breaker(row.name, state, why)

    def _account(self, name: str) -> Account | None:
        """Return the account of that name, retired ones included."""
        row = self.by_name.get(name)
        if row is None:
            row = next((r for r in self.by_slot.values() if r.name == name), None)
        return row

    def _add(self, spec: BackendSpec) -> None:
        slot = next(s for s in range(MAX_SLOTS) if s not in self.by_slot)
        row = Account(BackendId(slot), spec.name, EngineModel(spec.profile), Breaker(self._rng))
        row.breaker.tell = partial(self._breaker_told, row)
        self.by_slot[slot] = row
        warm.begin(row)
        self._index(row)

    def _revive(self, spec: BackendSpec) -> Account:
        row = self._account(spec.name)
        assert row is not None
        if row.engine.profile != spec.profile:
            row.engine = EngineModel(spec.profile)
            told = None if row.snapshot is None else row.snapshot.kv_capacity_tokens
            row.engine.kv_tokens = told or spec.profile.kv_tokens
            if not row.retired:
                self.fit_index(row)
        if row.retired:
            row.retired = False
            row.up = True
            row.draining = False
            row.breaker.reset("it is configured again")
            warm.begin(row)
            self._index(row)
        return row

    def _index(self, row: Account) -> None:
        row.tokens_per_block = self.settings.block_bytes / _BYTES_PER_TOKEN
        row.index_share = 1.0
        self.trie.add_backend(row.slot, 0)
        self.fit_index(row)

    def _retire(self, row: Account) -> None:
        self.trie.remove_backend(row.slot)
        self.exactness.leave(row)
        row.retired = True
        row.snapshot = row.oldest_use = None
        self.settle(row)

    def _rebuild_pools(self, settings: CoreSettings) -> None:
        old = self.pools
        self.pools = {}
        self.names = {}
        for model in settings.models:
            pool = Pool(model, [self.by_name[name] for name in model.backends], settings.warm_up_s)
            if model.name in old:
                pool.inherit(old[model.name])
            self.pools[model.name] = pool
            self.names[model.name] = model.name
        for model in settings.models:
            for alias in model.aliases:
                self.names.setdefault(alias, model.name)

    def _forget_replaced(self, settings: CoreSettings) -> None:
        """Forget backends that serve none of the models they served: other processes by now.

        One that serves nothing is down or has not said yet; adapters come and go beside a model.
        """
        for name, row in self.by_name.items():
            serves = frozenset(model.name for model in settings.models if name in model.backends)
            if serves:
                if row.serves and row.serves.isdisjoint(serves):
                    self.forget(row)
                row.serves = serves

    def _add_others(self, row: Account, snapshot: Snapshot) -> None:
        """Others' load = what the engine has beyond the most we had there since the last scrape."""
        others = max(0, snapshot.running + snapshot.waiting - row.peak_in_flight)
        row.peak_in_flight = row.in_flight
        row.other_in_flight = others
        row.reported_waiting = snapshot.waiting
        row.other_context_tokens = 0
        row.other_owed_s = 0.0
        if not others:
            return
        if snapshot.kv_utilization is not None:
            used = int(snapshot.kv_utilization * row.engine.kv_tokens)
            row.other_context_tokens = max(0, used - row.kv_tokens)
        waiting = min(others, snapshot.waiting)
        mean_context = row.other_context_tokens // others
        row.other_owed_s = waiting * row.engine.prefill_s(mean_context, mean_context)


def is_identified(snapshot: Snapshot | None) -> bool:
    """Return whether the engine's reports would show that it is another process."""
    if snapshot is None:
        return False
    known = (snapshot.start_time, snapshot.prompt_tokens, snapshot.prefix_queries)
    return any(value is not None for value in known)


def restarted(old: Snapshot | None, new: Snapshot) -> bool:
    """Return whether the engine process is another one: its cache is empty."""
    if old is None:
        return False
    if old.start_time is not None and new.start_time is not None:
        return abs(new.start_time - old.start_time) > _SAME_START_S
    pairs = ((old.prompt_tokens, new.prompt_tokens), (old.prefix_queries, new.prefix_queries))
    return any(a is not None and b is not None and b < a for a, b in pairs)


def check(settings: CoreSettings) -> None:
    """Raise ValueError for settings that name what does not exist, or twice what must be once."""
    names = [spec.name for spec in settings.backends]
    if len(set(names)) != len(names):
        raise ValueError("two backends have the same name")
    if len({model.name for model in settings.models}) != len(settings.models):
        raise ValueError("two models have the same name")
    if len({spec.name for spec in settings.classes}) != len(settings.classes):
        raise ValueError("two classes have the same name")
    known = set(names)
    for model in settings.models:
        for name in model.backends:
            if name not in known:
                raise ValueError(f"model {model.name}: unknown backend {name!r}")
