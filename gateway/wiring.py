"""The configuration, names resolved, in the forms that the gateway's parts take.

Pure functions: nothing is opened, kept or decided here.
"""

import os
from operator import attrgetter

from gateway.config.backends import backends_of
from gateway.config.schema import Config
from gateway.config.secrets import backend_key
from gateway.edge.upstreams import UpstreamSpec
from gateway.tls import Certificates
from gateway.watch.member import Pace
from gateway.watch.poller import Target


def upstream_specs(config: Config, certificates: Certificates) -> list[UpstreamSpec]:
    """Return where each backend is reached, with its key from the environment or its file."""
    return [
        UpstreamSpec(
            backend.name or "",
            backend.url or "",
            backend_key(backend, os.environ),
            *certificates.of(backend),
        )
        for backend in backends_of(config)
    ]


def targets_of(config: Config, certificates: Certificates) -> list[Target]:
    """Return what is watched of each backend."""
    return [
        Target(spec.name, spec.url, spec.api_key, backend.engine, spec.tls, spec.server_name)
        for spec, backend in zip(
            upstream_specs(config, certificates), backends_of(config), strict=True
        )
    ]


def needs_restart(old: Config, new: Config) -> tuple[str, ...]:
    """Return the changed keys that only a start reads: the listeners' addresses."""
    keys = ("listen.host", "listen.port", "admin.host", "admin.port")
    return tuple(key for key in keys if attrgetter(key)(old) != attrgetter(key)(new))


def pace_of(config: Config) -> Pace:
    """Return how often and how patiently backends are asked."""
    poll, health = config.poll, config.health
    return Pace(
        interval_s=poll.interval_s,
        timeout_s=poll.timeout_s,
        probe_s=health.interval_s,
        probe_down_s=health.interval_s / 2,
        probe_timeout_s=health.timeout_s,
    )
