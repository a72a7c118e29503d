"""What an engine says about its KV cache: batches of events, decoded from msgpack.

vLLM and SGLang publish the same three events in two encodings, arrays with a tag in front (older)
and maps with a `type` (newer); hashes are integers or bytes. Must never raise anything but
`Malformed`, whatever the bytes are: they come from another process.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

EngineHash = int | bytes
"""An engine's own name of a block: opaque, comparable, of one kind within one process."""

SLICE_BYTES: Final = 128 * 1024
"""Read at one time: 0.6 ms."""

_TYPES: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class Malformed(ValueError):
    """A batch that cannot be read; what it said is lost."""


class Stored(msgspec.Struct, gc=False):
    """Blocks that follow each other were cached.

    `block_hashes[i]` is `token_ids[i * block_size : (i + 1) * block_size]`, after everything up to
    `parent_block_hash` (None = the sequence begins here). `extra_keys[i]` is what besides tokens
    went into block i's hash: LoRA name, media, cache salt. No token ids = a copy on another medium
    of blocks told of before.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, gc=False):
    """One copy of each of these blocks was evicted from `medium`."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, gc=False):
    """The cache holds nothing any more."""


Event = Stored | Removed | Cleared


class _StoredMap(Stored, tag="BlockStored"):
    pass


class _RemovedMap(Removed, tag="BlockRemoved"):
    pass


class _ClearedMap(Cleared, tag="AllBlocksCleared"):
    pass


class _StoredArray(Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    rank: int | None = None


class _Unread(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: msgspec.Raw = msgspec.Raw(b"\xc0")


class Batch(msgspec.Struct, gc=False):
    """What one engine step did. `rank` is the data-parallel rank; `unknown` events were left out."""

    ts: float
    events: Sequence[Event]
    rank: int | None = None
    unknown: int = 0


_FIELDS: Final = {
    kind: msgspec.structs.fields(struct)
    for kind, struct in (
        ("BlockStored", Stored),
        ("BlockRemoved", Removed),
        ("AllBlocksCleared", Cleared),
    )
}
_STRUCTS: Final[dict[str, type[Event]]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}


class Decoder:
    """Decodes one engine's batches. Remembers which encoding it uses: one process has one."""

    def __init__(self) -> None:
        self._typed: list[msgspec.msgpack.Decoder[_Maps] | msgspec.msgpack.Decoder[_Arrays]] = [
            msgspec.msgpack.Decoder(_Maps),
            msgspec.msgpack.Decoder(_Arrays),
        ]

    def decode(self, payload: bytes) -> Batch:
        """Return the batch.

        Raises:
            Malformed: it is no batch, or a known event in it is broken.
        """
        typed = self._typed
        for decoder in typed:
            try:
                batch = decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError):
                continue
            if decoder is not typed[0]:
                typed.reverse()
            return Batch(batch.ts, batch.events, batch.rank)
        return _read_loosely(payload)

    def slices(self, payload: bytes) -> Iterator[Batch]:
        """Yield the batch; a long one as several, each read when it is asked for, the first empty.

        Raises:
            Malformed: as `decode`; what was yielded before was as sent.
        """
        if len(payload) <= SLICE_BYTES:
            yield self.decode(payload)
            return
        try:
            whole = msgspec.msgpack.decode(payload, type=_Unread)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Malformed(f"no batch of KV events: {error}") from None
        part: list[msgspec.Raw] = []
        size = 0
        yield Batch(whole.ts, ())
        for event in whole.events:
            part.append(event)
            size += len(bytes(event))
            if size >= SLICE_BYTES:
                yield self.decode(_packed(whole, part))
                part = []
                size = 0
        if part:
            yield self.decode(_packed(whole, part))


def _packed(whole: _Unread, events: list[msgspec.Raw]) -> bytes:
    return msgspec.msgpack.encode((whole.ts, events, whole.rank))


def _read_loosely(payload: bytes) -> Batch:
    """Read a batch that holds events of a kind unknown here, or both encodings."""
    try:
        whole = msgspec.msgpack.decode(payload)
        head, events, *rest = whole
        found = [_event(item) for item in events]
        return Batch(
            ts=float(head),
            events=[event for event in found if event is not None],
            rank=msgspec.convert(rest[0] if rest else None, int | None),
            unknown=found.count(None),
        )
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError, LookupError) as error:
        raise Malformed(f"no batch of KV events: {error}") from None


def _event(item: Any) -> Event | None:
    """Return one event; None = of a kind unknown here."""
    if isinstance(item, Mapping):
        values = dict(item)
        kind = values.pop("type")
    else:
        kind, *given = item
        names = [field.name for field in _FIELDS.get(kind, ())]
        values = dict(zip(names, given, strict=False))
    if kind not in _TYPES:
        return None
    return msgspec.convert(values, _STRUCTS[kind])
