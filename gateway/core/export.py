"""The index and what was learnt, written down in slices while both go on changing.

A slice is bounded work, a millisecond or so, so that the loop is never held up. A backend's visits
are read oldest first: one that is used again meanwhile comes once more at the end, so the reader,
who goes from the youngest back, believes the later. A chain is told from the last node on that was
told before, by its hash: equal hashes prove equal prompts, whatever became of the nodes between.
Must never change a book.
"""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Final

import msgspec

from gateway.core.fleet import Fleet, is_identified
from gateway.core.learn import OutputLengths
from gateway.core.ledger import Account
from gateway.core.runs import FAN_PARTS, NOBODY, Share, Visit
from gateway.core.saved import (
    Learnt,
    Piece,
    SavedBackend,
    SavedBelief,
    SavedEngine,
    SavedModel,
    SavedVisit,
    Visits,
    Way,
)

# A slice is over after so many nodes or blocks: under 2 ms of either.
SLICE_NODES: Final = 500
SLICE_BLOCKS: Final = 100_000

_encode = msgspec.msgpack.Encoder().encode


def export(fleet: Fleet, outputs: OutputLengths, way: Way, now: float) -> Iterator[bytes]:
    """Yield the pieces, each in a step that takes a millisecond or two.

    `way` says how a model's prompts are chained (`core/restore.py` compares it).
    """
    rows = [row for row in fleet.by_name.values() if is_identified(row.snapshot)]
    shares = [(row, fleet.trie.share(row.slot)) for row in rows]
    yield _piece(_learnt(fleet, outputs, way, now))
    told = Told()
    for row, share in shares:
        if share is not None:
            for visits in _slices(share, told):
                yield _piece(Visits(row.name, visits))
                if row.retired or fleet.trie.share(row.slot) is not share:
                    break  # it was dropped meanwhile: what it held is void


class Told:
    """The hashes that paths may go on from; cut up, as a set that grows copies itself."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[set[int]] = [set() for _ in range(FAN_PARTS)]

    def __contains__(self, key: int) -> bool:
        return key in self._parts[key % FAN_PARTS]

    def add(self, key: int) -> None:
        """Note a hash."""
        self._parts[key % FAN_PARTS].add(key)


def _piece(piece: Piece) -> bytes:
    return _encode(piece)


def _slices(share: Share, told: Told) -> Iterator[list[SavedVisit]]:
    visits: list[SavedVisit] = []
    nodes = blocks = 0
    for visit in walk(share):
        saved, steps = _saved(visit, told)
        visits.append(saved)
        nodes += steps
        blocks += len(saved[2]) >> 3
        if nodes >= SLICE_NODES or blocks >= SLICE_BLOCKS:
            yield visits
            visits = []
            nodes = blocks = 0
    if visits:
        yield visits


def walk(share: Share) -> Iterator[Visit]:
    """Yield a share's visits, oldest first, whatever is added or leaves between two steps."""
    past: list[Visit] = []
    while True:
        while past and past[-1].newer is NOBODY:
            past.pop()
        visit = (past[-1] if past else share.visits).newer
        if visit is share.visits:
            return
        past.append(visit)
        yield visit


def _saved(visit: Visit, told: Told) -> tuple[SavedVisit, int]:
    """Return a visit with its chain from the last anchor on, and how many nodes that took."""
    runs = []
    shared = []  # whether other paths may go on from each run
    anchor = 0
    node = visit.leaf
    while node.parent is not None:
        last = node.run[-1]
        if last in told:
            anchor = last
            break
        runs.append(node.run)
        shared.append(bool(node.kids) or isinstance(node.used, dict))
        if shared[-1]:
            told.add(last)
        node = node.parent
    marks = []
    length = 0
    for run, mark in zip(reversed(runs), reversed(shared), strict=True):
        length += len(run)
        if mark:
            marks.append(length)
    blocks = b"".join([run.tobytes() for run in reversed(runs)])
    return (visit.at, anchor, blocks, marks), len(runs) + 1


def _learnt(fleet: Fleet, outputs: OutputLengths, way: Way, now: float) -> Learnt:
    serves: dict[str, dict[str, str]] = {}
    models = []
    for name, pool in fleet.pools.items():
        models.append(SavedModel(name, pool.hit_tokens, pool.prompt_tokens, outputs.of_model(name)))
        for row in pool.rows:
            serves.setdefault(row.name, {})[name] = way(name)
    backends = [_backend(row, serves.get(row.name, {})) for row in fleet.by_name.values()]
    return Learnt(now, backends, models)


def _backend(row: Account, serves: dict[str, str]) -> SavedBackend:
    engine, belief, snapshot = row.engine, row.belief, row.snapshot
    return SavedBackend(
        row.name,
        row.draining,
        None if snapshot is None else snapshot.start_time,
        None if snapshot is None else snapshot.prompt_tokens,
        None if snapshot is None else snapshot.prefix_queries,
        serves,
        SavedEngine(
            tuple(map(float, astuple(engine.profile))),
            engine.prefill_ratio,
            engine.tpot_ratio,
            engine.tpot_floor,
            engine.prefill_samples,
            engine.tpot_samples,
            engine.own,
        ),
        SavedBelief(
            row.index_share,
            row.tokens_per_block,
            row.trust,
            belief.step,
            belief.grew,
            belief.fits,
            belief.over,
        ),
    )
