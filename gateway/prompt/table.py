"""Runs of parts by digest: the conversation cache's memory, bounded by bytes.

What was used longest ago goes first. Must never hold text.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

CACHE_BYTES: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 400  # the struct, two array headers, key and table entry, as measured


class Known(msgspec.Struct, gc=False):
    """What a run of parts adds, or (`tail` None) only that it depends on the phase, or its length.

    `tokens` is the whole up to its end; `tail` are those after the last full block. `sensitive` =
    another one stands where a question follows. A tip has the hashes of the whole, and the `phase`.
    """

    hashes: "array[int]"
    tail: "array[int] | None"
    tokens: int
    sensitive: bool = False
    parts: int = 1
    phase: int = 0


class Table:
    """Entries by key, the youngest last."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._table: OrderedDict[int, Known] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._table)

    def get(self, key: int) -> Known | None:
        """Return an entry; `touch` it when it was of use."""
        return self._table.get(key)

    def touch(self, keys: Sequence[int]) -> None:
        """Make entries the youngest, the first of them youngest of all: an end goes before it."""
        move = self._table.move_to_end
        for key in reversed(keys):
            move(key)

    def drop(self, key: int) -> None:
        """Forget an entry, if it is there."""
        known = self._table.pop(key, None)
        if known is not None:
            self.bytes -= _size(known)

    def put(self, key: int, known: Known) -> None:
        """Keep an entry; the oldest make room."""
        table = self._table
        old = table.pop(key, None)
        if old is not None:
            self.bytes -= _size(old)
        table[key] = known
        self.bytes += _size(known)
        while self.bytes > self.max_bytes and table:
            self.bytes -= _size(table.popitem(last=False)[1])


def _size(known: Known) -> int:
    tail = 0 if known.tail is None else len(known.tail) * 4
    return _ENTRY_BYTES + len(known.hashes) * 8 + tail
