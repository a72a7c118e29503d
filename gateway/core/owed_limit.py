"""W, the prefill seconds a backend may owe: fixed, or found from what its first tokens show.

Too large a W hides the queue inside the engine, where nobody can order it: then requests spend much
of their class's TTFT target there. Too small a W lets the engine run dry while requests wait here.
Without either sign W goes back to what is configured. Must never leave its bounds.
"""

from gateway.core.settings import QueueSpec

LEAST_S, MOST_S = 0.1, 2.0
# One look a second: a step must show in first tokens before the next one is taken.
LOOK_S = 1.0
# Part of the class's TTFT target spent waiting inside the engine from which W shrinks, and below
# which it may grow.
LATE, EARLY = 0.5, 0.25
_SHRINK, _GROW, _RETURN = 0.8, 1.25, 0.1
_WEIGHT = 0.1

FIXED = "fixed"
LATE_INSIDE = "requests wait too long inside the engine"
RAN_DRY = "the engine ran dry while requests waited"
CALM = "no sign against the configured value"


class OwedLimit:
    """W of one backend, in seconds, and why it is what it is.

    `inside` = mean part of the TTFT target that requests waited inside the engine.
    """

    __slots__ = ("_dry", "_looked_at", "_spec", "inside", "reason", "seconds")

    def __init__(self, spec: QueueSpec) -> None:
        self.inside = 0.0
        self._dry = False
        self._looked_at = 0.0
        self.apply(spec)

    def apply(self, spec: QueueSpec) -> None:
        """Begin again at what is configured."""
        self._spec = spec
        self.seconds = spec.owed_s
        self.reason = CALM if spec.adaptive else FIXED

    def first_token(self, waited_s: float, target_s: float, now: float, *, dry: bool) -> None:
        """Note a first token: its wait inside the engine besides its prefill, and its class's target.

        `dry` = nothing is left there to prefill, though requests wait here and the prompt that ends
        was shorter than W.
        """
        part = max(0.0, waited_s) / max(target_s, 1e-3)
        self.inside += _WEIGHT * (part - self.inside)
        self._dry = self._dry or dry
        if self._spec.adaptive and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._adjust()
            self._dry = False

    def _adjust(self) -> None:
        configured = self._spec.owed_s
        if self.inside > LATE:
            self.reason = LATE_INSIDE
            wanted = self.seconds * _SHRINK
        elif self._dry and self.inside < EARLY:
            self.reason = RAN_DRY
            wanted = self.seconds * _GROW
        else:
            self.reason = CALM
            wanted = self.seconds + _RETURN * (configured - self.seconds)
        self.seconds = min(max(wanted, min(LEAST_S, configured)), max(MOST_S, configured))
