"""The keys under `routing`: which policy, and the parameters of those that have any.

A part of the schema (see `schema.py`), in a file of its own for its length.
"""

from typing import Annotated, Literal

import msgspec

from gateway.config.keys import Key

Policy = Literal[
    "cost",
    "weights",
    "affinity",
    "smg",
    "dynamo",
    "lmetric",
    "preble",
    "chwbl",
    "least_requests",
    "power_of_two",
    "round_robin",
    "random",
]


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class CostConfig(_Section, frozen=True):
    """Constants of `policy: cost`. A price is in predicted seconds; 0 takes a part out of it."""

    congestion_weight: Annotated[
        float, Key("Price of prefilling where much prefill was sent of late.", ge=0)
    ] = 1.0
    congestion_window_s: Annotated[
        float, Key("Time constant of that memory.", unit="s", gt=0, le=3_600)
    ] = 8.0
    max_congestion: Annotated[
        float,
        Key("Share of an engine's time that sent prefill is taken to fill at most.", ge=0, le=0.99),
    ] = 0.85
    followers_weight: Annotated[
        float,
        Key("Price of the wait of its class's requests that come during the prefill.", ge=0),
    ] = 2.0
    others_weight: Annotated[
        float,
        Key("The same of other classes, times own ttft target / theirs.", ge=0),
    ] = 0.0
    eviction_weight: Annotated[
        float, Key("Price of cache space, times the square of the recent hit rate.", ge=0)
    ] = 10.0
    eviction_age_s: Annotated[
        float,
        Key("Age at which what would be evicted is worth e times less.", unit="s", gt=0, le=86_400),
    ] = 60.0
    stall_weight: Annotated[
        float, Key("Price of a prefill second to each stream that runs there.", ge=0)
    ] = 0.1
    stall_floor: Annotated[
        float, Key("Share of it that counts however far TPOT is from its target.", ge=0, le=1)
    ] = 0.0
    decode_weight: Annotated[
        float, Key("Price of the answer's own time and what it adds to others'.", ge=0)
    ] = 0.05
    tpot_share: Annotated[
        float, Key("Share of slo.tpot_s from which streams count in full.", gt=0, le=10)
    ] = 0.7
    tpot_weight: Annotated[float, Key("Price of each second beyond that share.", ge=0)] = 0.1
    kv_full_ratio: Annotated[
        float, Key("Share of the KV cache from which it counts as full.", gt=0, le=2)
    ] = 0.95
    slots_full_ratio: Annotated[
        float, Key("Share of the sequence slots from which they count as taken.", gt=0, le=2)
    ] = 0.9
    tie_ratio: Annotated[
        float, Key("Prices this close to the lowest are equal: one of them is drawn.", ge=0, le=1)
    ] = 0.01
    hot_ratio: Annotated[
        float,
        Key(
            "How much busier than the mean the homes of a popular prefix are before it gets one more.",
            ge=0,
        ),
    ] = 1.2


class WeightsConfig(_Section, frozen=True):
    """Weights of `policy: weights`; only their proportion counts."""

    prefix: Annotated[float, Key("Share of the prompt already cached there.", ge=0)] = 3.0
    queue: Annotated[float, Key("Shortness of the engine's queue.", ge=0)] = 5.0
    kv: Annotated[float, Key("Free part of the KV cache.", ge=0)] = 2.0
    index_tokens: Annotated[
        int,
        Key("Leading tokens of a prompt its prefix share is about; 0 = all.", unit="tokens", ge=0),
    ] = 0


class AffinityConfig(_Section, frozen=True):
    """Parameters of `policy: affinity`."""

    hit_ratio: Annotated[
        float, Key("Share of the prompt that a home of it has cached.", gt=0, le=1)
    ] = 0.8
    penalty_s: Annotated[
        float, Key("How much later than the others a home may answer.", unit="s", ge=0)
    ] = 18.0


class SmgConfig(_Section, frozen=True):
    """Parameters of `policy: smg`; SGLang's router had 0.5, 32 and 1.1, SMG 0.3, 64 and 1.5."""

    match_ratio: Annotated[
        float, Key("A longer match than this share of the prompt is followed.", ge=0, le=1)
    ] = 0.5
    imbalance_requests: Annotated[
        int, Key("Unless loads differ by more requests than this ...", unit="requests", ge=0)
    ] = 32
    imbalance_ratio: Annotated[float, Key("... and by more than this factor.", ge=1)] = 1.1
    guard: Annotated[
        Literal["pool", "backend"],
        Key("What is compared: the most and least loaded, or the match and the mean (SMG 1.13)."),
    ] = "pool"


class DynamoConfig(_Section, frozen=True):
    """Parameters of `policy: dynamo`."""

    overlap_weight: Annotated[
        float, Key("Credit for a cached block, in blocks of prefill.", ge=0)
    ] = 1.0
    block_tokens: Annotated[int, Key("Size of its blocks.", unit="tokens", ge=1)] = 16


class PrebleConfig(_Section, frozen=True):
    """Parameters of `policy: preble`."""

    redirect_ratio: Annotated[
        float, Key("A home with more than this many times the least load is left.", ge=1)
    ] = 2.0


class ChwblConfig(_Section, frozen=True):
    """Parameters of `policy: chwbl`."""

    virtual_nodes: Annotated[
        int, Key("Points of each backend on the hash ring.", ge=1, le=1_024)
    ] = 256
    load_ratio: Annotated[float, Key("Load a backend may carry, in means of the pool.", ge=1)] = (
        1.25
    )


class RoutingConfig(_Section, frozen=True):
    """How a backend is chosen."""

    policy: Annotated[Policy, Key("Routing policy; cost = cheapest in predicted seconds.")] = "cost"
    shadow: Annotated[
        Policy | None,
        Key(
            "A second policy to score beside it: how often it would choose otherwise, and for how "
            "many predicted seconds. None = no cost.",
        ),
    ] = None
    cost: Annotated[CostConfig, Key("Used by policy: cost only.")] = CostConfig()
    weights: Annotated[WeightsConfig, Key("Used by policy: weights only.")] = WeightsConfig()
    affinity: Annotated[AffinityConfig, Key("Used by policy: affinity only.")] = AffinityConfig()
    smg: Annotated[SmgConfig, Key("Used by policy: smg only.")] = SmgConfig()
    dynamo: Annotated[DynamoConfig, Key("Used by policy: dynamo only.")] = DynamoConfig()
    preble: Annotated[PrebleConfig, Key("Used by policy: preble only.")] = PrebleConfig()
    chwbl: Annotated[ChwblConfig, Key("Used by policy: chwbl only.")] = ChwblConfig()
