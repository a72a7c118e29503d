"""Chains of long prompts without hashing again what an earlier prompt began with.

Turn n+1 of a conversation repeats turn n. Chaining it costs a Python step per block; one plain hash
over everything up to each checkpoint costs a tenth, and finds the chain that is known up to there.
Gives exactly what `chain_bytes` gives. Bounded in entries; holds hashes only, no text.
"""

from array import array
from collections import OrderedDict
from typing import Final

from xxhash import xxh3_64

from gateway.core.chain import chain_blocks, chain_bytes, narrow_blocks

CHECKPOINT_BLOCKS: Final = 64
MAX_ENTRIES: Final = 2048
"""Checkpoints remembered. Each refers to a chain of at most 8 KiB: 16 MiB at the very most."""


class ChainMemo:
    """`chain` is `chain_bytes` with a memory."""

    def __init__(self, salt: int, block_bytes: int) -> None:
        self._salt = salt
        self._block_bytes = block_bytes
        self._stride = CHECKPOINT_BLOCKS * block_bytes
        self._border = narrow_blocks(block_bytes) * block_bytes
        self._known: OrderedDict[int, array[int]] = OrderedDict()

    def chain(self, data: bytes) -> "array[int]":
        """Return the chained hashes of all full blocks of `data`."""
        size = len(data)
        if size < self._stride:
            return chain_bytes(data, self._salt, self._block_bytes)
        narrow = data if size <= self._border else data[: self._border]
        chain = self._narrow(narrow)
        if size > self._border:
            chain += chain_blocks(data[self._border :], chain[-1], 2 * self._block_bytes)
        return chain

    def _narrow(self, data: bytes) -> "array[int]":
        marks = self._marks(data)
        known = self._known
        depth = len(marks)
        while depth and marks[depth - 1] not in known:
            depth -= 1
        if depth:
            mark = marks[depth - 1]
            known.move_to_end(mark)
            chain = known[mark][: depth * CHECKPOINT_BLOCKS]
            chain += chain_blocks(data[depth * self._stride :], chain[-1], self._block_bytes)
        else:
            chain = chain_blocks(data, self._salt, self._block_bytes)
        self._remember(marks[depth:], chain)
        return chain[:]  # the caller may own its copy; ours must stay as it is

    def _marks(self, data: bytes) -> list[int]:
        """Return the hash of everything up to each checkpoint."""
        state = xxh3_64(seed=self._salt)
        view = memoryview(data)
        stride = self._stride
        marks = []
        for start in range(0, len(data) - stride + 1, stride):
            state.update(view[start : start + stride])
            marks.append(state.intdigest())
        return marks

    def _remember(self, marks: list[int], chain: "array[int]") -> None:
        for mark in marks:
            self._known[mark] = chain
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)
