"""What one engine holds, kept from its KV events: its own names of blocks turned into our hashes.

The prefix index is told in our hashes only. Here is what it does not need to know: copies of a
block, several media, groups of hybrid models, block sizes other than ours, what besides tokens
went into a block. Everything is capped. Must never read a clock or a socket, and never raise for
what an engine says: what cannot be used is counted.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gateway.core.chain import ID_BYTES, chain_tokens, hash_block, token_packer
from gateway.core.exact_index import ENGINE_BLOCK_BYTES, ExactIndex, Meaning, Table, Uneven, ours
from gateway.core.kv_events import Cleared, EngineHash, Event, Removed, Stored

MAX_BLOCKS: Final = 1 << 21  # of one engine: 33 M tokens in blocks of 16
MAX_MEDIA: Final = 8
MAX_ADAPTERS: Final = 256
_GPU_NAMES: Final = (None, "GPU")
# Groups of hybrid models whose blocks alone prove no prefix: windows, states, other inputs.
_PARTIAL_KINDS: Final = ("sliding", "mamba", "chunked", "cross", "encoder", "sink")

Seed = Callable[[str | None, str], int]
"""Where a chain starts, by LoRA adapter (None = the base model) and cache salt."""

_UNKNOWN: Final = object()


class _Medium:
    """Blocks on one medium. `copies` counts those beyond the first of a block: engines keep some."""

    __slots__ = ("copies", "table")

    def __init__(self) -> None:
        self.table: Table = {}
        self.copies: dict[EngineHash, int] = {}


class Holdings:
    """One engine's blocks. `block_tokens` is the size of ours; the engine's may be another.

    Counters are in engine blocks: `stored` and `removed` as told, `unknown` follow or are blocks
    never told of, `foreign` depend on more than tokens, `broken` contradict themselves. `lost` are the
    stored ones among them whose place in a prompt cannot be told. `full` =
    the engine claims more than `max_blocks`: its word is not kept any more until `clear`.
    """

    def __init__(
        self,
        index: ExactIndex,
        slot: int,
        seed: Seed,
        block_tokens: int,
        *,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.slot = slot
        self.adapters: set[str] = set()
        self.stored = self.removed = self.unknown = self.foreign = self.broken = self.lost = 0
        self.full = False
        self._index = index
        self._lane = index.take(slot)
        self._seed = seed
        self.block_tokens = block_tokens
        self._pack = token_packer(block_tokens)
        self._max_blocks = max_blocks
        self._group: int | None = None
        self._gpu = _Medium()
        self._others: dict[str, _Medium] = {}
        self._twice: dict[int, int] = {}  # of ours, under further `Uneven` names: how many

    @property
    def blocks(self) -> int:
        """Engine blocks held; one on two media counts twice, copies on one do not."""
        return len(self._gpu.table) + sum(len(other.table) for other in self._others.values())

    @property
    def bytes(self) -> int:
        """Estimated memory of the engine's side."""
        return self.blocks * ENGINE_BLOCK_BYTES

    def apply(self, event: Event) -> None:
        """Take in one event, in the order the engine sent them."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            if event.group_idx is None or self._group in (None, event.group_idx):
                self._remove(event)
        elif isinstance(event, Cleared):
            self.clear()

    def store_each(self, events: Iterable[Stored]) -> None:
        """Take in events of one block each, as `apply` does one by one.

        What decoding sequences tell all the time: a plain block after one that is held is a fifth of
        the price of `_store`.
        """
        table = self._gpu.table
        get, add, lane = table.get, self._index.add, self._lane
        size, most, pack = self.block_tokens, self._max_blocks, self._pack
        group, plain = self._group, not (self._others or self.full)
        for event in events:
            link = get(event.parent_block_hash)  # type: ignore[arg-type] # None is no key
            engine = event.block_hashes[0]
            keys = event.extra_keys
            if (
                plain
                and isinstance(link, int)
                and event.block_size == size
                and event.group_idx == group
                and event.medium in _GPU_NAMES
                and not (keys and keys[0])
                and engine not in table
                and len(table) < most
            ):
                try:
                    own = hash_block(pack(*event.token_ids), link)
                except struct.error:
                    pass  # `_store` says what is wrong with it
                else:
                    self.stored += 1
                    table[engine] = own
                    add(lane, own, link)
                    continue
            self._store(event)
            group, plain = self._group, not (self._others or self.full)

    def clear(self) -> None:
        """Forget everything at once; the index gives the memory back by its `sweep`."""
        self.close()
        self._gpu = _Medium()
        self._others = {}
        self._twice = {}
        self._group = None
        self.full = False
        self._lane = self._index.take(self.slot)

    def sweep(self, blocks: int) -> bool:
        """Give back up to `blocks` of what was cleared anywhere; return whether more is left."""
        return self._index.sweep(blocks)

    def close(self) -> None:
        """Leave the index for good."""
        self._index.bury(self.slot, [m.table for m in (self._gpu, *self._others.values())])

    # -- stored -----------------------------------------------------------------------------

    def _store(self, event: Stored) -> None:
        count = len(event.block_hashes)
        medium = self._medium(event.medium)
        if medium is None or not self._is_main(event):
            return
        if self.full or self.blocks + count > self._max_blocks:
            self.full = True
            return
        self.stored += count
        if not event.token_ids:
            self._copy(medium, event.block_hashes)
            return
        ids = _packed(event.token_ids)
        if ids is None or len(ids) != count * event.block_size:
            self.broken += count
            return
        start = self._start(event, medium)
        if start is _UNKNOWN:
            self.unknown += count
            self.lost += count
            return
        own = 0 if start is None else _plain_blocks(event)
        if own:
            self._put(medium, event, ids, start, own)
        if own < count:
            self.foreign += count - own
            self._put_again(medium, event.block_hashes[own:], [None] * (count - own))

    def _is_main(self, event: Stored) -> bool:
        """Whether the event is about the one group of layers that is followed."""
        if event.group_idx is None:
            return True
        if self._group is None:
            kind = event.kv_cache_spec_kind or ""
            if kind.startswith(_PARTIAL_KINDS):
                return False
            self._group = event.group_idx
        return event.group_idx == self._group

    def _medium(self, name: str | None) -> _Medium | None:
        """Return the medium's blocks; None for one too many."""
        if name in _GPU_NAMES:
            return self._gpu
        medium = self._others.get(name)
        if medium is None and len(self._others) < MAX_MEDIA:
            medium = self._others[name] = _Medium()
        return medium

    def _start(self, event: Stored, medium: _Medium) -> Any:
        """Return the meaning of what the blocks follow; None, foreign; _UNKNOWN, never told of."""
        parent = event.parent_block_hash
        if parent is not None:
            found = medium.table.get(parent, _UNKNOWN)
            return self._anywhere(parent) if found is _UNKNOWN else found
        adapter = event.lora_name
        if adapter is None and event.lora_id is not None:
            return None  # an adapter without a name: whose prompts match is unknown
        if adapter is not None and adapter not in self.adapters:
            if len(self.adapters) >= MAX_ADAPTERS:
                return None
            self.adapters.add(adapter)
        return self._seed(adapter, _cache_salt(event))

    def _anywhere(self, engine: EngineHash) -> Any:
        for medium in (self._gpu, *self._others.values()):
            found = medium.table.get(engine, _UNKNOWN)
            if found is not _UNKNOWN:
                return found
        return _UNKNOWN

    def _copy(self, medium: _Medium, hashes: list[EngineHash]) -> None:
        """Enter blocks told of without their tokens: copies of blocks held elsewhere."""
        for engine in hashes:
            found = self._anywhere(engine)
            if found is _UNKNOWN:
                self.unknown += 1
            elif engine in medium.table:
                medium.copies[engine] = medium.copies.get(engine, 0) + 1
            else:
                medium.table[engine] = found

    def _put(
        self, medium: _Medium, event: Stored, ids: "array[int]", start: int | Uneven, own: int
    ) -> None:
        size = event.block_size
        hashes = event.block_hashes if own == len(event.block_hashes) else event.block_hashes[:own]
        if isinstance(start, int) and size == self.block_tokens:
            link = start
            owns = chain_tokens(ids[: own * size], link, size).tolist()
            if medium.table.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
                medium.table.update(zip(hashes, owns, strict=True))
                self._index.extend(self._lane, owns, link)
            else:
                self._put_again(medium, hashes, owns, link)
        else:
            at = (start, b"", ()) if isinstance(start, int) else start
            self._put_again(medium, hashes, self._uneven(ids[: own * size], at, size), at[0])

    def _put_again(
        self,
        medium: _Medium,
        hashes: Sequence[EngineHash],
        meanings: Sequence[Meaning],
        before: int | None = None,
    ) -> None:
        """Enter blocks of which some are held already; `before` = our block before them.

        A name that stands for something else already names nothing: old SGLang's tell a block's own
        tokens only. What it stood for first is all that its removal could take back.
        """
        table, copies = medium.table, medium.copies
        for engine, meaning in zip(hashes, meanings, strict=True):
            owns = ours(meaning)
            held = table.get(engine, _UNKNOWN)
            if held is _UNKNOWN:
                if isinstance(meaning, tuple) and self._anywhere(engine) is _UNKNOWN:
                    self._count(owns)
                table[engine] = meaning
                self._index.extend(self._lane, owns, before)
            else:
                copies[engine] = copies.get(engine, 0) + 1
                if held != meaning:
                    self.broken += 1
                    self.lost += 1
            before = owns[-1] if owns else before

    def _count(self, owns: Iterable[int]) -> None:
        """Note which of our blocks another engine's block stands for too: they differ after it."""
        for own in owns:
            if self._index.holds(self._lane, own):
                self._twice[own] = self._twice.get(own, 0) + 1

    def _uneven(self, ids: "array[int]", start: Uneven, size: int) -> list[Meaning]:
        """Return what each of these engine blocks means: among others, which of ours end in it."""
        link, tail, _ = start
        data = array("I", tail)
        data.extend(ids)
        own = self.block_tokens
        owns = chain_tokens(data, link, own).tolist()
        meanings: list[Meaning] = []
        before = 0
        for end in range(len(tail) // ID_BYTES + size, len(data) + 1, size):
            after = end // own
            last = owns[after - 1] if after else link
            open_ids = data[after * own : end].tobytes()
            meanings.append((last, open_ids, tuple(owns[before:after])))
            before = after
        return meanings

    # -- removed ----------------------------------------------------------------------------

    def _remove(self, event: Removed) -> None:
        medium = self._medium(event.medium)
        if medium is None:
            return
        self.removed += len(event.block_hashes)
        table, copies = medium.table, medium.copies
        others = self._others
        gone: list[int] = []
        for engine in event.block_hashes:
            if copies and engine in copies:
                left = copies[engine] - 1
                if left:
                    copies[engine] = left
                else:
                    del copies[engine]
                continue
            meaning: Any = table.pop(engine, _UNKNOWN)
            if meaning is _UNKNOWN:
                self.unknown += 1
            elif others and self._anywhere(engine) is not _UNKNOWN:
                continue
            elif isinstance(meaning, int):
                gone.append(meaning)
            else:
                gone += [own for own in ours(meaning) if not self._is_left(own)]
        self._index.shrink(self._lane, gone)

    def _is_left(self, own: int) -> bool:
        """Note that an engine's block with this one of ours went; return whether another has it."""
        left = self._twice.pop(own, 0)
        if left > 1:
            self._twice[own] = left - 1
        return left > 0


def _packed(token_ids: list[int]) -> "array[int] | None":
    try:
        return array("I", token_ids)
    except OverflowError:
        return None


def _cache_salt(event: Stored) -> str:
    """Return the salt that the first block of a sequence was hashed with, "" for none.

    Its keys are the adapter's name, if any, then strings and media: `_plain_blocks` has seen that
    there is one string at most.
    """
    every = event.extra_keys
    keys: list[Any] = (every[0] if every else None) or []
    if event.lora_name is not None:
        keys = keys[1:]
    return keys[0] if keys and isinstance(keys[0], str) else ""


def _plain_blocks(event: Stored) -> int:
    """Return how many leading blocks depend on nothing but tokens, adapter and cache salt."""
    every = event.extra_keys
    if not every or not any(every):
        return len(event.block_hashes)
    adapter = [] if event.lora_name is None else [event.lora_name]
    for at, keys in enumerate(every[: len(event.block_hashes)]):
        if keys is None or keys == adapter:
            continue
        salted = at == 0 and event.parent_block_hash is None
        if not (salted and len(keys) == len(adapter) + 1 and keys[:-1] == adapter):
            return at
        if not isinstance(keys[-1], str):
            return at
    return len(event.block_hashes)
