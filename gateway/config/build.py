"""From the configuration to what the core is built from. Pure; the only place that maps the two."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import asdict

from gateway.config.backends import Names, backend_names, backends_of
from gateway.config.routing import RoutingConfig
from gateway.config.schema import (
    BUILTIN_CLASSES,
    BucketConfig,
    ClassConfig,
    Config,
    KeyConfig,
    MatchConfig,
    QueueConfig,
)
from gateway.core.settings import (
    AffinitySpec,
    BackendSpec,
    BucketSpec,
    ChwblSpec,
    ClassSpec,
    CoreSettings,
    CostSpec,
    DynamoSpec,
    KeySpec,
    MatchRule,
    ModelSpec,
    PrebleSpec,
    QueueSpec,
    RoutingSpec,
    Slo,
    SmgSpec,
    WeightsSpec,
)

__all__ = ["backends_of", "core_settings", "effective_classes"]

_STALE_INTERVALS = 3
"""A snapshot older than this many poll intervals says nothing any more (design, section 7)."""

_MIB = 1024 * 1024


def core_settings(config: Config, served: Mapping[str, tuple[str, ...]]) -> CoreSettings:
    """Return the core's settings.

    `served` maps model ids that top-level backends announced to those backends' names. An id that
    is configured, as a name or an alias, keeps its configured backends. Groups must have been
    spelled out before (`groups.expand`), else they count as one backend each.
    """
    backends = backends_of(config)
    return CoreSettings(
        models=_models(config, served, {backend.name or "" for backend in backends}),
        backends=tuple(BackendSpec(backend.name or "") for backend in backends),
        classes=_classes(effective_classes(config)),
        routing=_routing(config.routing),
        queue=_queue(config.queue),
        keys=tuple(_key(key) for key in config.keys),
        index_bytes=config.index.max_mib * _MIB,
        stale_after_s=_STALE_INTERVALS * config.poll.interval_s,
        warm_up_s=config.health.warm_up_s,
        block_bytes=config.index.block_bytes,
    )


def _routing(config: RoutingConfig) -> RoutingSpec:
    """Return the core's words for it; a section's keys are the fields of its spec."""
    return RoutingSpec(
        policy=config.policy,
        shadow=config.shadow,
        cost=CostSpec(**asdict(config.cost)),
        weights=WeightsSpec(**asdict(config.weights)),
        affinity=AffinitySpec(**asdict(config.affinity)),
        smg=SmgSpec(**asdict(config.smg)),
        dynamo=DynamoSpec(**asdict(config.dynamo)),
        preble=PrebleSpec(**asdict(config.preble)),
        chwbl=ChwblSpec(**asdict(config.chwbl)),
    )


def effective_classes(config: Config) -> dict[str, ClassConfig]:
    """Return the configured classes, or the built-in coding and chat; a single one is the default."""
    if len(config.classes) == 1:
        return {
            name: msgspec.structs.replace(cls, default=True) for name, cls in config.classes.items()
        }
    return config.classes or BUILTIN_CLASSES


def _models(
    config: Config, served: Mapping[str, tuple[str, ...]], known: set[str]
) -> tuple[ModelSpec, ...]:
    names = Names(config)
    models = [
        ModelSpec(model.name, backend_names(model, names), tuple(model.aliases))
        for model in config.models
    ]
    taken = {name for model in models for name in (model.name, *model.aliases)}
    for model_id, holders in served.items():
        alive = tuple(name for name in dict.fromkeys(holders) if name in known)
        if model_id not in taken and alive:
            models.append(ModelSpec(model_id, alive))
    return tuple(models)


def _classes(classes: Mapping[str, ClassConfig]) -> tuple[ClassSpec, ...]:
    unshared = sum(1 for cls in classes.values() if cls.share is None)
    left = max(0.0, 1.0 - sum(cls.share or 0.0 for cls in classes.values()))
    return tuple(
        ClassSpec(
            name=name,
            match=tuple(_rule(rule) for rule in cls.match),
            default=cls.default,
            bucket=_bucket(cls.bucket),
            share=left / unshared if cls.share is None else cls.share,
            max_wait_s=cls.max_wait_s,
            max_waiting=cls.max_waiting,
            max_waiting_bytes=cls.max_waiting_mib * _MIB,
            kv_reserve=cls.kv_reserve,
            slo=Slo(cls.slo.ttft_s, cls.slo.tpot_s),
            engine_priority=cls.engine_priority,
        )
        for name, cls in classes.items()
    )


def _queue(queue: QueueConfig) -> QueueSpec:
    return QueueSpec(
        enabled=queue.enabled,
        owed_s=queue.owed_s,
        adaptive=queue.adaptive,
        steal_s=queue.steal_s,
        kv_share=queue.kv_share,
        overload_kv_share=queue.overload_kv_share,
        long_prompt_tokens=float(queue.long_prompt_tokens),
    )


def _key(key: KeyConfig) -> KeySpec:
    return KeySpec(
        key.name,
        key.tokens_per_minute,
        key.requests_per_minute,
        key.tokens_per_day,
        key.streams,
    )


def _bucket(bucket: BucketConfig | None) -> BucketSpec | None:
    if bucket is None:
        return None
    return BucketSpec(bucket.tokens_per_second, bucket.burst_tokens, bucket.borrow)


def _rule(rule: MatchConfig) -> MatchRule:
    return MatchRule(
        path=rule.path,
        tools=rule.tools,
        suffix=rule.suffix,
        min_prompt_tokens=rule.min_prompt_tokens,
        max_prompt_tokens=rule.max_prompt_tokens,
        user_agent=rule.user_agent,
        key=rule.key,
        model=rule.model,
    )
