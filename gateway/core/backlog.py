"""What waits for a backend, by size: what one more request would wait for, and hold up, in line.

The line lets the shorter prefill go first, so a newcomer waits for the shorter ones and holds up the
longer ones: with each it costs the shorter of the two prefills. Must never hold a request.
"""

from math import frexp

# Sizes a factor of two apart, from under a millisecond to over half a minute.
_SIZES = 16
_FIRST = -9


class Backlog:
    """How many prefills wait, and their nanoseconds, by size."""

    __slots__ = ("_counts", "_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * _SIZES
        self._ns = [0] * _SIZES

    def add(self, pf_s: float) -> None:
        """Count a prefill that begins to wait."""
        size = _size(pf_s)
        self.count += 1
        self._counts[size] += 1
        self._ns[size] += int(pf_s * 1e9)

    def remove(self, pf_s: float) -> None:
        """Take out one that was added with the same seconds."""
        size = _size(pf_s)
        self.count -= 1
        self._counts[size] -= 1
        self._ns[size] -= int(pf_s * 1e9)

    def price_s(self, pf_s: float) -> float:
        """Return the sum over all that wait of the shorter of their prefill and `pf_s`.

        Those of about the same size count in full: who of them goes first is open.
        """
        size = _size(pf_s) + 1
        shorter = sum(self._ns[:size]) * 1e-9
        return shorter + pf_s * sum(self._counts[size:])


def _size(pf_s: float) -> int:
    return min(_SIZES - 1, max(0, frexp(pf_s)[1] - _FIRST))
