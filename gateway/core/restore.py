"""What an earlier process wrote down, believed again backend by backend.

A backend's part is taken when its engine turns out to be the same process, its prompts are chained
in the same way and it holds nothing yet that contradicts it; else it is dropped. The youngest
visits first, until the backend has room for no more. Every step is bounded work. Must never believe
an engine that does not say which process it is, nor wait for one.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import Final

import msgspec

from gateway.core.engine_model import restore_scales
from gateway.core.fleet import Fleet, is_identified, restarted
from gateway.core.learn import OutputLengths
from gateway.core.ledger import STALE, Account
from gateway.core.saved import Learnt, Piece, Ratios, SavedBackend, SavedVisit, Visits, Way
from gateway.core.types import Snapshot

SLICE_BLOCKS: Final = 20_000  # of one step of `Restoration.step`: under 3 ms
_LEAST_SLICE: Final = 20  # a visit counts as so many blocks at least

_OVER: Final = object()

_decode = msgspec.msgpack.Decoder(Piece).decode


class SavedFault(ValueError):
    """What was written down cannot be read."""


class Saved:
    """The pieces, read.

    Raises:
        SavedFault: they are not what `export` writes.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.visits: dict[str, list[SavedVisit]] = {}
        self.ratios: list[Ratios] = []
        self._anchors: dict[int, tuple[int, bytes]] = {}
        learnt: Learnt | None = None
        for raw in pieces:
            try:
                piece = _decode(raw)
            except msgspec.MsgspecError as error:
                raise SavedFault(str(error)) from error
            if isinstance(piece, Visits):
                self.visits.setdefault(piece.backend, []).extend(piece.visits)
                self._note(piece.visits)
            elif isinstance(piece, Ratios):
                self.ratios.append(piece)
            else:
                learnt = piece
        if learnt is None:
            raise SavedFault("nothing learnt is in it")
        self.learnt = learnt

    def chain(self, visit: SavedVisit) -> "array[int]":
        """Return a visit's whole chain."""
        _, anchor, blocks, _ = visit
        parts = [blocks]
        while anchor:
            anchor, before = self._anchors[anchor]
            parts.append(before)
        parts.reverse()
        return array("Q", b"".join(parts))

    def _note(self, visits: list[SavedVisit]) -> None:
        """Keep where the anchors of later visits are. Earlier ones must be known: so no ring."""
        anchors = self._anchors
        for _, anchor, blocks, marks in visits:
            if len(blocks) % 8 or (anchor and anchor not in anchors):
                raise SavedFault("a prompt's beginning is missing")
            start, above = 0, anchor
            for mark in marks:
                end = 8 * mark
                if not start < end <= len(blocks):
                    raise SavedFault("a prompt's part is outside of it")
                (last,) = array("Q", blocks[end - 8 : end])
                anchors.setdefault(last, (above, blocks[start:end]))
                start, above = end, last


class Restoration:
    """What is still to be believed. `waiting` are the backends whose process is not known yet.

    `shift` is added to the writer's clock to get this process's.
    """

    def __init__(
        self,
        saved: Saved,
        fleet: Fleet,
        outputs: OutputLengths,
        way: Way,
        shift: float,
    ) -> None:
        self.blocks = 0
        self.restored: list[str] = []
        self.dropped: list[str] = []
        self._saved = saved
        self._fleet = fleet
        self._way = way
        self._shift = shift
        self._doing: Iterator[None] | None = None
        self._learn_models(outputs)
        self.waiting: dict[str, SavedBackend] = {}
        for backend in saved.learnt.backends:
            self._drain(backend)
            if _tells(backend):
                self.waiting[backend.name] = backend

    def step(self) -> bool:
        """Do a slice of what can be done now; return whether there is more."""
        if self._doing is None:
            backend = next(filter(self._is_known, self.waiting.values()), None)
            if backend is None:
                return False
            del self.waiting[backend.name]
            row = self._fleet.by_name[backend.name]
            if not self._is_same(row, backend):
                self.dropped.append(backend.name)
                self._saved.visits.pop(backend.name, None)
                return True
            self.restored.append(backend.name)
            self._doing = self._restore(row, backend)
        if next(self._doing, _OVER) is _OVER:
            self._doing = None
        return True

    @property
    def awaits(self) -> bool:
        """Whether a backend that is up has yet to say which process it is."""
        rows = [self._fleet.by_name.get(name) for name in self.waiting]
        return any(row is not None and row.up for row in rows)

    @property
    def idle(self) -> bool:
        """Whether no backend is half restored."""
        return self._doing is None

    # -- inside -----------------------------------------------------------------------------

    def _learn_models(self, outputs: OutputLengths) -> None:
        for model in self._saved.learnt.models:
            pool = self._fleet.pools.get(model.name)
            if pool is not None and not pool.prompt_tokens:
                pool.hit_tokens, pool.prompt_tokens = model.hit_tokens, model.prompt_tokens
            outputs.restore(model.name, model.outputs)

    def _drain(self, backend: SavedBackend) -> None:
        """Keep the operator's wish, whatever process runs there by now."""
        if backend.draining:
            self._fleet.drain(backend.name, draining=True)

    def _is_known(self, backend: SavedBackend) -> bool:
        """Whether the fleet knows enough of a backend to decide about its part."""
        row = self._fleet.by_name.get(backend.name)
        return row is not None and is_identified(row.snapshot) and bool(row.serves)

    def _is_same(self, row: Account, backend: SavedBackend) -> bool:
        """Whether the same process serves the same models, their prompts chained as before."""
        assert row.snapshot is not None
        then = Snapshot(
            0.0,
            start_time=backend.start_time,
            prompt_tokens=backend.prompt_tokens,
            prefix_queries=backend.prefix_queries,
        )
        if restarted(then, row.snapshot) or (then.start_time is None) != (
            row.snapshot.start_time is None
        ):
            return False
        both = row.serves & backend.serves.keys()  # adapters come and go beside a model
        return bool(both) and all(self._way(n) == backend.serves[n] for n in both)

    def _restore(self, row: Account, backend: SavedBackend) -> Iterator[None]:
        self._learn(row, backend)
        trie = self._fleet.trie
        visits = self._saved.visits.pop(backend.name, [])
        left = SLICE_BLOCKS
        while visits:
            visit = visits.pop()
            chain = self._saved.chain(visit)
            if row.retired or not trie.restore(row.slot, chain, visit[0] + self._shift):
                return
            left -= len(chain) + _LEAST_SLICE
            if left <= 0:
                left = SLICE_BLOCKS
                yield
        row.oldest_use = trie.oldest_use(row.slot, row.full_blocks)

    def _learn(self, row: Account, backend: SavedBackend) -> None:
        engine, belief = backend.engine, backend.belief
        if engine.profile == tuple(map(float, astuple(row.engine.profile))):
            restore_scales(row.engine, engine)
        row.index_share = belief.index_share
        row.tokens_per_block = belief.tokens_per_block or row.tokens_per_block
        row.trust = belief.trust
        row.trust_at = self._saved.learnt.at + self._shift
        row.belief.step, row.belief.grew = belief.step, belief.grew
        row.belief.fits, row.belief.over = belief.fits, belief.over
        row.fresh_until = STALE
        self._fleet.fit_index(row)


def _tells(backend: SavedBackend) -> bool:
    told = (backend.start_time, backend.prompt_tokens, backend.prefix_queries)
    return any(value is not None for value in told)
