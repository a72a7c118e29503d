"""Which bit of the trie's masks stands for which backend.

A bit is a lane. A slot's lane has its number, unless that lane still holds what the slot's last
engine had: then the slot moves to a clean lane, at once, and the old one is cleared in slices.
Must never give out a lane that is not clean.
"""

from gateway.core.runs import slots_of

__all__ = ["Lanes"]


class Lanes:
    """`live` = the lanes that count; `moved` = lane -> slot where the numbers differ."""

    __slots__ = ("_dirty", "_floor", "live", "moved")

    def __init__(self, slots: int) -> None:
        self.live = 0
        self.moved: dict[int, int] = {}
        self._dirty = 0
        self._floor = slots

    def take(self, slot: int) -> int:
        """Return a clean lane for `slot`: its own, or the lowest one that is no slot's own."""
        lane = slot
        taken = self.live | self._dirty
        if taken >> slot & 1:
            above = taken >> self._floor
            lane = self._floor + (~above & (above + 1)).bit_length() - 1
            self.moved[lane] = slot
        self.live |= 1 << lane
        return lane

    def retire(self, lane: int) -> None:
        """Stop counting a lane that is not clean."""
        self.live &= ~(1 << lane)
        self._dirty |= 1 << lane
        self.moved.pop(lane, None)

    def free(self, lane: int) -> None:
        """Note that a lane is clean and nobody's."""
        self.live &= ~(1 << lane)
        self._dirty &= ~(1 << lane)
        self.moved.pop(lane, None)

    def by_slot(self, held: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return a lookup's `(depth, mask)` pairs with slots for bits instead of lanes."""
        moved = self.moved
        lanes = 0
        for lane in moved:
            lanes |= 1 << lane
        told = []
        for depth, mask in held:
            away = mask & lanes
            home = mask ^ away
            for lane in slots_of(away):
                home |= 1 << moved[lane]
            told.append((depth, home))
        return told
