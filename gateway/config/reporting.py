"""The configuration of logs and traces: what is told of a request after it."""

from typing import Annotated, Literal

import msgspec

from gateway.config.keys import Key


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class LogConfig(_Section, frozen=True):
    """Logs on standard error. Prompts and keys are never logged."""

    format: Annotated[Literal["json", "console"], Key("Shape of a line.")] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Key("Least severity that is written; lines of requests are info."),
    ] = "info"
    requests: Annotated[bool, Key("One line per request.")] = True
    sample: Annotated[
        float,
        Key(
            "Share of the requests that get their line, chosen by request id; those that ended in "
            "an error or a refusal always do.",
            ge=0,
            le=1,
        ),
    ] = 1.0


class TracesConfig(_Section, frozen=True):
    """OpenTelemetry traces, one span per phase of a request (extra `otel`)."""

    endpoint: Annotated[
        str | None,
        Key(
            "Root of a collector's OTLP/HTTP server. None = the OTEL_EXPORTER_OTLP_ENDPOINT and "
            "other OTEL_* variables; without those, off.",
            form="url",
            example="http://otel:4318",
        ),
    ] = None
    sample: Annotated[
        float | None,
        Key(
            "Share of the traces begun here that is kept; a client's traceparent decides about its "
            "own. None = OTEL_TRACES_SAMPLER; without it, all.",
            ge=0,
            le=1,
        ),
    ] = None
    service_name: Annotated[
        str | None,
        Key(
            "The gateway's service.name. None = OTEL_SERVICE_NAME; without it, radixgate.",
            form="text",
        ),
    ] = None
