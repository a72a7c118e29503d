"""W, the prefill seconds a backend may owe: fixed, or found from what its first tokens show.

Too large a W hides the queue inside the engine, where nobody can order it: then requests spend much
of their class's TTFT target there. Too small a W holds requests here though the engine answers early,
and it works with small batches or runs dry. So W is what keeps the wait inside between a quarter and
half of the target. Without either sign it goes back to what is configured. Must never leave its bounds.
"""

from gateway.core.settings import QueueSpec

# Half and twice the default: a W beyond them did worse in every simulation (docs/admission.md).
LEAST_S, MOST_S = 0.25, 1.0
# One look a second: a step must show in first tokens before the next one is taken.
LOOK_S = 1.0
# Part of the class's TTFT target spent waiting inside the engine from which W shrinks, and below
# which it may grow.
LATE, EARLY = 0.5, 0.25
_SHRINK, _GROW, _RETURN = 0.8, 1.25, 0.1
_WEIGHT = 0.1

FIXED = "fixed"
LATE_INSIDE = "requests wait too long inside the engine"
HELD_BACK = "requests wait here though the engine answers early"
CALM = "no sign against the configured value"


class OwedLimit:
    """W of one backend, in seconds, and why it is what it is.

    `inside` = mean part of the TTFT target that requests waited inside the engine.
    """

    __slots__ = ("_held", "_looked_at", "_spec", "inside", "reason", "seconds")

    def __init__(self, spec: QueueSpec) -> None:
        self.inside = 0.0
        self._held = False
        self._looked_at = 0.0
        self.apply(spec)

    def apply(self, spec: QueueSpec) -> None:
        """Begin again at what is configured."""
        self._spec = spec
        self.seconds = spec.owed_s
        self.reason = CALM if spec.adaptive else FIXED

    def first_token(self, waited_s: float, target_s: float, now: float, *, held: bool) -> None:
        """Note a first token: its wait inside the engine besides its prefill, and its class's target.

        `held` = requests wait here for this backend.
        """
        part = max(0.0, waited_s) / max(target_s, 1e-3)
        self.inside += _WEIGHT * (part - self.inside)
        self._held = self._held or held
        if self._spec.adaptive and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._adjust()
            self._held = False

    def _adjust(self) -> None:
        configured = self._spec.owed_s
        if self.inside > LATE:
            self.reason = LATE_INSIDE
            wanted = self.seconds * _SHRINK
        elif self._held and self.inside < EARLY:
            self.reason = HELD_BACK
            wanted = self.seconds * _GROW
        else:
            self.reason = CALM
            wanted = self.seconds + _RETURN * (configured - self.seconds)
        self.seconds = min(max(wanted, min(LEAST_S, configured)), max(MOST_S, configured))
