"""The keys of discovery and reload: where backends are found, and what a change of a file does.

A part of the schema (see `schema.py`), in a file of its own for its length.
"""

from typing import Annotated, Literal

import msgspec

from gateway.config.keys import Key

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class KubernetesConfig(_Section, frozen=True):
    """A Service whose ready endpoints are all backends, watched through its EndpointSlices."""

    service: Annotated[str, Key("Name of the Service.", form="host", example="vllm")]
    namespace: Annotated[
        str | None, Key("Its namespace. None = the gateway's own.", form="host")
    ] = None
    port: Annotated[
        str | None,
        Key("Name or number of the endpoints' port. None = the only one.", form="port"),
    ] = None


class KubernetesApiConfig(_Section, frozen=True):
    """The API server. The defaults are those of a pod with a service account."""

    url: Annotated[
        str | None,
        Key(
            "Its root. None = from KUBERNETES_SERVICE_HOST and _PORT, which every pod has.",
            form="url",
        ),
    ] = None
    token_file: Annotated[
        str | None, Key("Bearer token; read again for every request.", form="text")
    ] = f"{_SERVICE_ACCOUNT}/token"
    ca_file: Annotated[
        str | None, Key("CA of its certificate. None = the system's.", form="text")
    ] = f"{_SERVICE_ACCOUNT}/ca.crt"
    namespace_file: Annotated[str | None, Key("Namespace of entries without one.", form="text")] = (
        f"{_SERVICE_ACCOUNT}/namespace"
    )


class DiscoveryConfig(_Section, frozen=True):
    """How backends are found that are given by dns, srv, file or kubernetes."""

    interval_s: Annotated[
        float, Key("Pause between two look-ups of a dns or srv name.", unit="s", ge=0.05, le=3_600)
    ] = 10.0
    file_interval_s: Annotated[
        float,
        Key(
            "Pause between two looks at a file; it is read once it looked the same twice.",
            unit="s",
            ge=0.01,
            le=3_600,
        ),
    ] = 1.0
    family: Annotated[
        Literal["any", "ipv4", "ipv6"],
        Key("Which addresses of a name are taken; any counts an engine with both twice."),
    ] = "any"
    nameservers: Annotated[
        list[str],
        Key(
            "ADDRESS or ADDRESS:PORT of the name servers asked (extra `discovery`). None given = "
            "the system's.",
            form="address",
        ),
    ] = []
    kubernetes: Annotated[KubernetesApiConfig, Key("The Kubernetes API server.")] = (
        KubernetesApiConfig()
    )


class ReloadConfig(_Section, frozen=True):
    """When the configuration is read again, beside SIGHUP and POST /reload."""

    watch: Annotated[
        bool, Key("When the configuration file was changed; a mistake keeps the old one in force.")
    ] = True
    interval_s: Annotated[
        float,
        Key(
            "Pause between two looks at it; it is read once it looked the same twice.",
            unit="s",
            ge=0.01,
            le=3_600,
        ),
    ] = 1.0
