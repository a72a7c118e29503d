"""A token bucket counted in LLM tokens: reserve at entry, settle with what was really used.

Must never refuse for ever: a request larger than the whole bucket passes when the bucket is full
and leaves a debt. Nothing but `now` moves time here.
"""

from gateway.core.settings import BucketSpec

MAX_RETRY_AFTER_S = 60.0
# What an answer may round a wait up to, so that "retry now" is never said of an empty bucket.
MIN_RETRY_AFTER_S = 1e-3
# Refill arithmetic in binary fractions loses less than this; a wait that was served must pass.
_SLACK_TOKENS = 1e-6


class Bucket:
    """Tokens available to one class (or key). `level` may be negative: a debt time pays back."""

    __slots__ = ("at", "level", "spec")

    def __init__(self, spec: BucketSpec, now: float) -> None:
        self.spec = spec
        self.level = float(spec.burst_tokens)
        self.at = now

    def available(self, now: float) -> float:
        """Return the level at `now` without touching the bucket."""
        earned = max(0.0, now - self.at) * self.spec.tokens_per_second
        return min(self.spec.burst_tokens, self.level + earned)

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until `tokens` could be reserved if nobody else came; 0 = at once."""
        needed = min(tokens, self.spec.burst_tokens) - self.available(now)
        if needed <= _SLACK_TOKENS:
            return 0.0
        return needed / self.spec.tokens_per_second

    def reserve(self, tokens: float, now: float) -> float:
        """Take `tokens` and return 0, or take nothing and return the seconds to wait."""
        wait = self.wait_s(tokens, now)
        if not wait:
            self._advance(now)
            self.level -= tokens
        return wait

    def settle(self, reserved: float, used: float, now: float) -> None:
        """Replace an earlier reservation by what was used (0 = it never ran)."""
        self._advance(now)
        self.level = min(self.spec.burst_tokens, self.level + reserved - used)

    def resize(self, spec: BucketSpec, now: float) -> None:
        """Take new limits, keeping what was spent: the debt and, at most, the new burst."""
        self._advance(now)
        missing = self.spec.burst_tokens - self.level
        self.spec = spec
        self.level = min(spec.burst_tokens, spec.burst_tokens - missing)

    def _advance(self, now: float) -> None:
        self.level = self.available(now)
        self.at = max(self.at, now)


def clamp_retry_after(wait_s: float) -> float:
    """Return `wait_s` within (0, 60]: what a Retry-After may say."""
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))
