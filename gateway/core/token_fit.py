"""How many tokens so many bytes are: tokens = overhead + bytes / ratio, learnt from reports.

Short prompts show what a chat template adds, long ones what a token is; each learns from its own
kind, so that no number of short ones can turn the estimate of a long one. Knows nothing of text.
"""

from typing import Final

DEFAULT_RATIO: Final = 4.0
"""Bytes per token of English and code in current vocabularies, until an engine says otherwise."""

LONG_BYTES: Final = 4096
"""From here on a template's tokens are less than what one text's ratio differs from another's."""

_SHORT_BYTES: Final = 512
MAX_OVERHEAD: Final = 64.0
"""Tokens: chat templates add 5 to 50. More beside a short text is no template (an image is not)."""

_WEIGHT: Final = 0.1
_LEAST_SLOPE: Final = 1 / 64

_Mean = tuple[float, float]  # bytes, tokens
_NOTHING: Final[_Mean] = (0.0, 0.0)


class TokenFit:
    """One model's estimate: `overhead` tokens of an empty prompt, and `slope` tokens per byte.

    Keeps the running means of short, middling and long prompts. The overhead is what the shortest
    kind seen has beyond its text, the slope what the longest kind has without it. While the true
    overhead is within 0..`MAX_OVERHEAD`, no step makes the slope's error larger: it is multiplied
    by (shorter mean / longer mean) at most.
    """

    __slots__ = ("_long", "_middle", "_short", "overhead", "slope")

    def __init__(self) -> None:
        self.overhead = 0.0
        self.slope = 1.0 / DEFAULT_RATIO
        self._short: _Mean | None = None
        self._middle: _Mean | None = None
        self._long: _Mean | None = None

    def learn(self, size: float, tokens: float) -> None:
        """Take in a prompt of `size` bytes that an engine counted: a token per 64 at least."""
        if size >= LONG_BYTES:
            old = self._long
            if old is not None:
                mean, count = old
                size = mean + _WEIGHT * (size - mean)
                tokens = count + _WEIGHT * (tokens - count)
            self._long = size, tokens
        else:
            size, tokens = self._learn_shorter(size, tokens)
        overhead = self.overhead
        shortest = self._short or self._middle
        if shortest is not None:
            mean, count = shortest
            overhead = count - self.slope * mean
            if overhead < 0.0:
                overhead = 0.0
            elif overhead > MAX_OVERHEAD:
                overhead = MAX_OVERHEAD
        if size:
            most = tokens - _LEAST_SLOPE * size
            if overhead > most:  # noqa: PLR1730 - a third of the price of min
                overhead = most
            self.slope = (tokens - overhead) / size
        self.overhead = overhead

    @property
    def state(self) -> tuple[float, float, _Mean | None, _Mean | None, _Mean | None]:
        """All there is to it, for `of_state`."""
        return self.overhead, self.slope, self._short, self._middle, self._long

    @classmethod
    def of_state(
        cls,
        overhead: float,
        slope: float,
        short: _Mean | None,
        middle: _Mean | None,
        long: _Mean | None,
    ) -> "TokenFit":
        """Return the estimate whose `state` this was."""
        fit = cls()
        fit.overhead = min(MAX_OVERHEAD, max(0.0, overhead))
        fit.slope = max(_LEAST_SLOPE, slope)
        fit._short, fit._middle, fit._long = short, middle, long
        return fit

    def _learn_shorter(self, size: float, tokens: float) -> _Mean:
        """Return the longest kind's mean after a prompt that is not long.

        Short prompts are no such kind: they alone say nothing of the slope.
        """
        if size >= _SHORT_BYTES:
            self._middle = middle = _mean(self._middle, size, tokens)
            return self._long or middle
        self._short = _mean(self._short, size, tokens)
        return self._long or self._middle or _NOTHING


def _mean(old: _Mean | None, size: float, tokens: float) -> _Mean:
    if old is None:
        return size, tokens
    mean, count = old
    return mean + _WEIGHT * (size - mean), count + _WEIGHT * (tokens - count)
