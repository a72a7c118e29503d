"""Seconds an engine needs for a prefill or a step: priors first, then what the backend showed.

The form is results.md's linear step-time model. Only its scale is learnt, per backend and
separately for prefill (from first tokens that had the engine to themselves) and decode (from TPOT).
Must never learn from a request that shared its prefill, or let one sample move a price.
"""

from collections.abc import Sequence
from statistics import median

from gateway.core.saved import SavedEngine
from gateway.core.settings import EngineProfile

# Samples before a backend's own figures are believed, and the weight of each later one.
MIN_SAMPLES = 8
_WEIGHT = 0.1
# A prompt shorter than this has a first token made of overheads, not of prefill.
MIN_PREFILL_TOKENS = 256
# With more streams than this beside it a prefill shares its steps and tells too little.
MAX_BESIDE = 4
# Differences below a quarter are noise (results.md: slow_i applies above 1.25, at most 6).
_SAME = 1.25
_MAX_SLOW = 6.0
# Load the model does not see makes samples longer, never shorter: scales follow the low end of what
# was seen (about the lowest tenth), and the pool's decode scale moves only when clearly wrong.
_MAX_JUMP = 4.0
_DOWN_WEIGHT, _UP_WEIGHT = 0.2, 0.02
_POOL_SAME = 2.0
# Share of a backend's believed slowness that is left after each calibration without a sample of it.
_DOUBT = 0.25
# From a laptop CPU (prefill 500 times slower than the prior's GPU) to hardware ten times faster.
_MIN_SCALE, _MAX_SCALE = 0.05, 2000.0


class EngineModel:
    """Current coefficients of one backend, already scaled by what was learnt."""

    __slots__ = (
        "attention_s",
        "context_token_s",
        "kv_tokens",
        "max_sequences",
        "own",
        "prefill_ratio",
        "prefill_samples",
        "prefill_token_s",
        "profile",
        "sequence_s",
        "slow",
        "step_s",
        "tpot_floor",
        "tpot_heard",
        "tpot_ratio",
        "tpot_samples",
        "unseen",
    )

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.kv_tokens = profile.kv_tokens
        self.max_sequences = profile.max_sequences
        self.prefill_ratio = self.tpot_ratio = self.tpot_floor = 1.0
        self.prefill_samples = self.tpot_samples = 0
        self.slow = 1.0
        self.own = (1.0, 1.0)  # scales its own samples justify
        self.unseen = 0  # calibrations in a row that found no new prefill sample
        self.tpot_heard = 0  # TPOT samples at the last calibration
        self.step_s = self.sequence_s = self.context_token_s = 0.0
        self.prefill_token_s = self.attention_s = 0.0
        self.rescale(1.0, 1.0)

    @property
    def samples(self) -> int:
        """Return how many samples of either kind were learnt from."""
        return self.prefill_samples + self.tpot_samples

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the prefill speed its own samples justify, at short contexts."""
        return 1.0 / (self.profile.prefill_token_s * self.own[0])

    def rescale(self, prefill: float, decode: float) -> None:
        """Set the coefficients to the priors times these scales."""
        prior = self.profile
        self.prefill_token_s = prior.prefill_token_s * prefill
        self.attention_s = prior.attention_s * prefill
        self.step_s = prior.step_s * decode
        self.sequence_s = prior.sequence_s * decode
        self.context_token_s = prior.context_token_s * decode
        self.slow = decode

    def prefill_s(self, uncached: int, prompt: int) -> float:
        """Return the engine seconds of prefilling the last `uncached` of `prompt` tokens."""
        return uncached * (self.prefill_token_s + self.attention_s * (prompt - 0.5 * uncached))

    def step(self, sequences: float, context_tokens: float) -> float:
        """Return the seconds of one decode step over `sequences` holding `context_tokens`."""
        return self.step_s + self.sequence_s * sequences + self.context_token_s * context_tokens

    def saw_prefill(self, took_s: float, uncached: int, prompt: int, sequences: int) -> bool:
        """Learn from a prefill nobody else's ran beside; return whether it was fit to learn from.

        `took_s` is dispatch to first token: the prefill and a step or two of `sequences` streams.
        """
        if uncached < MIN_PREFILL_TOKENS or took_s <= 0.0 or sequences > MAX_BESIDE:
            return False
        prior = self.profile
        expected = uncached * (
            prior.prefill_token_s + prior.attention_s * (prompt - 0.5 * uncached)
        )
        overhead = min(1.5 * self.step(sequences, 0), 0.5 * took_s)
        ratio = _clamp((took_s - overhead) / expected)
        if self.unseen > 0:
            # It was offered cheaper to hear from it. A fast answer proves a fast engine: load makes
            # samples longer, never shorter; a slow one only confirms.
            heard = _tame(self.prefill_ratio, ratio, MIN_SAMPLES)
            self.prefill_ratio = min(self.prefill_ratio, heard)
            self.own = min(self.own[0], self.prefill_ratio), self.own[1]
            self.rescale(*self.own)
        else:
            self.prefill_ratio = _low(self.prefill_ratio, ratio, self.prefill_samples)
        self.prefill_samples += 1
        self.unseen = -1
        return True

    def saw_tpot(
        self, tpot_s: float, sequences: float, context_tokens: float, stretch: float
    ) -> bool:
        """Learn from a finished stream, given the load it ran under (`stretch` = 1/(1 - rho))."""
        if tpot_s <= 0.0:
            return False
        prior = self.profile
        expected = stretch * (
            prior.step_s + prior.sequence_s * sequences + prior.context_token_s * context_tokens
        )
        ratio = _clamp(tpot_s / expected)
        self.tpot_ratio = _mix(self.tpot_ratio, ratio, self.tpot_samples)
        self.tpot_floor = _low(self.tpot_floor, ratio, self.tpot_samples)
        self.tpot_samples += 1
        return True


def calibrate(engines: Sequence[EngineModel]) -> None:
    """Turn what the engines of one pool showed into their coefficients.

    One that has shown nothing yet is taken for a typical one. Near-equal engines get exactly equal
    prices, so that measuring noise cannot attract traffic.
    """
    prefill = [e.prefill_ratio for e in engines if e.prefill_samples >= MIN_SAMPLES]
    tpot = [e.tpot_ratio for e in engines if e.tpot_samples >= MIN_SAMPLES]
    floors = [e.tpot_floor for e in engines if e.tpot_samples >= MIN_SAMPLES]
    pool_prefill = median(prefill) if prefill else 1.0
    typical_tpot = median(tpot) if tpot else 1.0
    pool_decode = median(floors) if floors else 1.0
    if 1 / _POOL_SAME < pool_decode < _POOL_SAME:
        pool_decode = 1.0
    for engine in engines:
        slow = 1.0
        if engine.tpot_samples >= MIN_SAMPLES and engine.tpot_ratio > _SAME * typical_tpot:
            slow = min(_MAX_SLOW, engine.tpot_ratio / typical_tpot)
        own = pool_prefill * slow
        if engine.prefill_samples >= MIN_SAMPLES:
            relative = engine.prefill_ratio / pool_prefill
            own = pool_prefill if 1 / _SAME < relative < _SAME else engine.prefill_ratio
        engine.own = own, pool_decode * slow
    best = min(engine.own[0] for engine in engines)
    for engine in engines:
        engine.unseen += 1
        prefill_scale, decode_scale = engine.own
        slow = decode_scale / pool_decode
        engine.rescale(_doubted(engine, prefill_scale, best, slow), decode_scale)
        engine.tpot_heard = engine.tpot_samples


def restore_scales(engine: EngineModel, saved: SavedEngine) -> None:
    """Go on from what an earlier process had learnt of the same engine."""
    engine.prefill_ratio = _clamp(saved.prefill_ratio)
    engine.tpot_ratio, engine.tpot_floor = _clamp(saved.tpot_ratio), _clamp(saved.tpot_floor)
    engine.prefill_samples = max(0, saved.prefill_samples)
    engine.tpot_samples = engine.tpot_heard = max(0, saved.tpot_samples)
    engine.own = _clamp(saved.own[0]), _clamp(saved.own[1])
    engine.unseen = 0
    engine.rescale(*engine.own)


def _doubted(engine: EngineModel, scale: float, best: float, slow: float) -> float:
    """Return the prefill scale to go by, when it is some time since a prefill showed it.

    A backend thought slow gets no requests that could prove otherwise: its price sinks towards the
    best until one is sent there (R05), and what that shows counts at once. While its streams show
    that it is `slow` times a typical one, it is not offered for less than that.
    """
    least = best
    if engine.tpot_samples > engine.tpot_heard:
        least = min(scale, best * slow)
    if engine.unseen <= 0 or scale <= least:
        return scale
    return least + (scale - least) * _DOUBT**engine.unseen


def _mix(old: float, new: float, samples: int) -> float:
    """Plain mean of the first samples, then an exponential average."""
    return old + max(_WEIGHT, 1.0 / (samples + 1)) * (_tame(old, new, samples) - old)


def _low(old: float, new: float, samples: int) -> float:
    """Follow the low end of the samples; the first ones count as they come."""
    weight = _DOWN_WEIGHT if new < old else _UP_WEIGHT
    return old + max(weight, 1.0 / (samples + 1)) * (_tame(old, new, samples) - old)


def _tame(old: float, new: float, samples: int) -> float:
    """Bound what a sample can say once there is something to compare it with."""
    if samples < MIN_SAMPLES:
        return new
    return min(old * _MAX_JUMP, max(old / _MAX_JUMP, new))


def _clamp(ratio: float) -> float:
    return min(_MAX_SCALE, max(_MIN_SCALE, ratio))
