"""What `tune` may change: configuration keys with the range that is searched.

Keys are those of the YAML file and, below it, the fields of `core.settings`; a default is what the
schema says. Pure values. Never a key that the core does not act on in a simulation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, TypeVar

from gateway.config.emit import emit
from gateway.config.schema import Config
from gateway.core.settings import CoreSettings

Values = tuple[tuple[str, float], ...]
"""Keys and their values, in the order of the search; hashable, and small enough to send around."""

_T = TypeVar("_T")
DIGITS = 3  # a fourth one is noise, and what is printed must be what was run


@dataclass(slots=True, frozen=True)
class Knob:
    """A key and the range searched; `log` = in steps of equal ratio; `own` = what a file has."""

    key: str
    low: float
    high: float
    log: bool = True
    own: float | None = None

    @property
    def default(self) -> float:
        """Return what the gateway runs with when nothing is changed."""
        return _value(Config(), self.key) if self.own is None else self.own

    def settled(self, value: float) -> float:
        """Return the value with the digits it is written with, within the range."""
        return min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))


# Ranges: from where a term hardly counts to where it outweighs the request's own prefill.
_QUEUE = (
    Knob("queue.owed_s", 0.1, 4.0),
    Knob("queue.steal_s", 0.02, 1.0),
    Knob("queue.kv_share", 0.6, 1.0, log=False),
    Knob("queue.overload_kv_share", 0.4, 1.0, log=False),
)
_COST = (
    Knob("routing.cost.congestion_weight", 0.1, 5.0),
    Knob("routing.cost.eviction_weight", 0.5, 50.0),
    Knob("routing.cost.eviction_age_s", 5.0, 600.0),
    Knob("routing.cost.stall_weight", 0.01, 1.0),
    Knob("routing.cost.decode_weight", 0.005, 0.5),
    Knob("routing.cost.hot_ratio", 1.0, 3.0, log=False),
)
# Searched when a key or pattern names them: the ablation found their effect within noise.
_MINOR = (
    Knob("routing.cost.congestion_window_s", 2.0, 30.0),
    Knob("routing.cost.max_congestion", 0.5, 0.97, log=False),
    Knob("routing.cost.tpot_share", 0.3, 1.5),
    Knob("routing.cost.tpot_weight", 0.01, 1.0),
    Knob("routing.cost.kv_full_ratio", 0.7, 1.1, log=False),
    Knob("routing.cost.slots_full_ratio", 0.6, 1.1, log=False),
    Knob("routing.cost.tie_ratio", 0.001, 0.1),
)
_OTHERS = (
    Knob("routing.weights.prefix", 0.3, 30.0),
    Knob("routing.weights.queue", 0.3, 30.0),
    Knob("routing.weights.kv", 0.1, 10.0),
    Knob("routing.affinity.hit_ratio", 0.1, 1.0, log=False),
    Knob("routing.affinity.penalty_s", 0.1, 60.0),
    Knob("routing.smg.match_ratio", 0.05, 0.95, log=False),
    Knob("routing.smg.imbalance_ratio", 1.0, 3.0, log=False),
    Knob("routing.dynamo.overlap_weight", 0.1, 10.0),
    Knob("routing.preble.redirect_ratio", 1.0, 8.0),
    Knob("routing.chwbl.load_ratio", 1.0, 3.0, log=False),
)
TUNABLE = tuple(dict.fromkeys(knob.key.split(".")[1] for knob in (*_COST, *_OTHERS)))
"""Policies that have anything to search."""


def knobs(
    policy: str, wanted: Sequence[str] = (), config: Config | None = None
) -> tuple[Knob, ...]:
    """Return what is searched for a policy: its keys, or those that match one of `wanted`.

    Each of `wanted` is a key or a pattern (`routing.cost.*`), and may say the range:
    `queue.owed_s=0.2:2`. `config` has the defaults, where they are not the schema's.

    Raises:
        ValueError: the policy has nothing to search, a pattern names nothing, or a range is none.
    """
    usual, all_ = (
        tuple(
            knob if config is None else replace(knob, own=_value(config, knob.key)) for knob in of
        )
        for of in _of(policy)
    )
    if not all_:
        raise ValueError(f"policy {policy} has nothing to tune: one of {', '.join(TUNABLE)}")
    if not wanted:
        return usual
    chosen: dict[str, Knob] = {}
    for want in wanted:
        pattern, _, span = want.partition("=")
        found = [knob for knob in all_ if fnmatchcase(knob.key, pattern)]
        if not found:
            keys = ", ".join(knob.key for knob in all_)
            raise ValueError(f"{pattern!r} names no key of policy {policy}: {keys}")
        chosen.update((knob.key, _ranged(knob, span) if span else knob) for knob in found)
    return tuple(knob for key in (k.key for k in all_) if (knob := chosen.get(key)))


def _of(policy: str) -> tuple[tuple[Knob, ...], tuple[Knob, ...]]:
    """Return what is searched unless told otherwise, and all there is."""
    if held(policy):
        return (*_COST, *_QUEUE), (*_COST, *_MINOR, *_QUEUE)
    own = tuple(knob for knob in _OTHERS if knob.key.split(".")[1] == policy)
    return own, own


def held(policy: str) -> bool:
    """Return whether it is simulated with the gateway's queue: others run as their authors run them."""
    return policy == Config().routing.policy


def _value(config: Config, key: str) -> float:
    return float(reduce(getattr, key.split("."), config))  # type: ignore[arg-type]


def _ranged(knob: Knob, span: str) -> Knob:
    try:
        low, high = (float(part) for part in span.split(":"))
    except ValueError:
        raise ValueError(f"{knob.key}={span}: expected LOW:HIGH") from None
    if not knob.low <= low < high <= knob.high:
        raise ValueError(f"{knob.key}={span}: expected a part of {knob.low:g}:{knob.high:g}")
    return replace(knob, low=low, high=high)


def apply(settings: CoreSettings, values: Values) -> CoreSettings:
    """Return the settings with the values in their places."""
    for key, value in values:
        settings = _put(settings, key.split("."), value)
    return settings


def _put(spec: _T, path: Sequence[str], value: float) -> _T:
    first, *rest = path
    below = _put(getattr(spec, first), rest, value) if rest else value
    return replace(spec, **{first: below})  # type: ignore[type-var]


def fragment(
    policy: str, values: Values, notes: Iterable[str] = (), config: Config | None = None
) -> str:
    """Return YAML that makes a gateway run as was simulated; what `config` has is left out.

    `config` None = the defaults. `notes` become comments above it.
    """
    defaults = config or Config()
    data: dict[str, Any] = {}
    if policy != defaults.routing.policy:
        data["routing"] = {"policy": policy}
    if defaults.queue.enabled and not held(policy):
        data["queue"] = {"enabled": False}
    for key, value in values:
        if value != _value(defaults, key):
            *sections, name = key.split(".")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
    lines = [f"# {note}" for note in notes]
    return "\n".join([*lines, *(line.text for line in emit(data))]) + "\n"


def as_values(searched: Sequence[Knob], drawn: Mapping[str, float]) -> Values:
    """Return what a search drew as the values that are run."""
    return tuple((knob.key, knob.settled(drawn[knob.key])) for knob in searched)
