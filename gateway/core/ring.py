"""A consistent hash ring of backends: which of them a key belongs to, and in what order it moves on.

Points depend on names alone, so every gateway and every restart agree. Must never know about load.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest


class Ring:
    """`virtual_nodes` points of each name; a backend that goes moves only its own keys."""

    __slots__ = ("_owners", "_points", "virtual_nodes")

    def __init__(self, names: Sequence[str], virtual_nodes: int) -> None:
        self.virtual_nodes = virtual_nodes
        points = sorted(
            (xxh3_64_intdigest(f"{name}{node}".encode()), name)
            for name in names
            for node in range(virtual_nodes)
        )
        self._points = [point for point, _ in points]
        self._owners = [name for _, name in points]

    def walk(self, key: int) -> Iterator[str]:
        """Yield the owners of the points from `key` on, once around; names come up repeatedly."""
        start = bisect_left(self._points, key)
        yield from self._owners[start:]
        yield from self._owners[:start]
