"""Which optional packages a configuration needs that are not installed here.

Only looks for them; whoever uses one imports it and says so if it is missing (`gateway.extras`).
"""

from collections.abc import Iterator, Mapping

from gateway.config.backends import occurrences
from gateway.config.problems import Report, Where
from gateway.config.schema import Config
from gateway.extras import is_missing


def warn_of_missing(
    config: Config, places: Mapping[str, Where], top: Where, report: Report
) -> None:
    """Warn once per extra, where the configuration first asks for it."""
    told: set[str] = set()
    for key, extra in _wanted(config):
        if extra not in told and is_missing(extra):
            told.add(extra)
            message = f"needs the extra `{extra}`, which is not installed here"
            allowed = f"expected pip install '.[{extra}]' (in the clone) where the gateway runs"
            report.warn(places.get(key, top), key, message, allowed)


def _wanted(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, the extra that it needs)."""
    for index, model in enumerate(config.models):
        if model.tokenizer is not None:
            yield f"models[{index}].tokenizer", "tokens"
    for path, backend in occurrences(config):
        if backend.kv_events is not None:
            yield f"{path}.kv_events", "events"
        if backend.srv is not None:
            yield f"{path}.srv", "discovery"
    if config.discovery.nameservers:
        yield "discovery.nameservers", "discovery"
    if config.traces.endpoint is not None:
        yield "traces.endpoint", "otel"
