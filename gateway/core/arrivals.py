"""How many requests a second each class has sent to one backend of late.

What a long prefill costs those that come while it runs is this rate times its length. Must never know
more classes than are configured.
"""

from collections.abc import Mapping


class Arrivals:
    """An exponential average by class. `urgent` = their sum, each divided by its TTFT target.

    Fading is the caller's: `left` is what remains of older counts, by the clock of its own average.
    """

    __slots__ = ("_urgency", "rates", "urgent")

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        self.urgent = 0.0
        self._urgency: Mapping[str, float] = {}

    def apply(self, urgency: Mapping[str, float]) -> None:
        """Take the classes there are now, and 1 / TTFT target of each."""
        self._urgency = urgency
        self.rates = {cls: self.rates.get(cls, 0.0) for cls in urgency}
        self._add_up()

    def note(self, cls: str, share: float, left: float) -> None:
        """Count one request as `share`: 1 / window."""
        rates = self.rates
        if left != 1.0:
            self.urgent *= left
            for name in rates:
                rates[name] *= left
        if cls in rates:
            rates[cls] += share
            self.urgent += share * self._urgency[cls]

    def take_back(self, cls: str, share: float, left: float) -> None:
        """Undo a `note` of which `share` remains by now."""
        for name, rate in self.rates.items():
            kept = rate * left
            self.rates[name] = max(0.0, kept - share) if name == cls else kept
        self._add_up()

    def _add_up(self) -> None:
        urgency = self._urgency
        self.urgent = sum([rate * urgency[cls] for cls, rate in self.rates.items()])
