"""The keys of TLS, on the data listener and towards backends.

A part of the schema (see `schema.py`). Names files only: nothing here opens one.
"""

from typing import Annotated

import msgspec

from gateway.config.keys import Key


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class ListenTlsConfig(_Section, frozen=True):
    """TLS of the data listener, 1.2 and later. Changed files are taken without a restart."""

    cert: Annotated[
        str,
        Key(
            "PEM file with the certificate and its chain.",
            form="text",
            example="/etc/radixgate/tls.crt",
        ),
    ]
    key: Annotated[
        str | None,
        Key("PEM file with the private key, unencrypted. None = it is in cert.", form="text"),
    ] = None
    client_ca: Annotated[
        str | None,
        Key(
            "PEM file with the authorities whose client certificates are required (mTLS). None = "
            "clients need no certificate.",
            form="text",
        ),
    ] = None


class BackendTlsConfig(_Section, frozen=True):
    """TLS towards one backend, whose url begins with https (or which is given by dns)."""

    ca: Annotated[
        str | None,
        Key("PEM file with the authorities believed instead of the system's.", form="text"),
    ] = None
    cert: Annotated[
        str | None, Key("PEM file with the certificate shown to the backend.", form="text")
    ] = None
    key: Annotated[
        str | None, Key("PEM file with its key, unencrypted. None = it is in cert.", form="text")
    ] = None
    server_name: Annotated[
        str | None,
        Key(
            "Name asked for (SNI) and expected in its certificate. None = the host of the url, the "
            "name of dns.",
            form="host",
        ),
    ] = None
    verify: Annotated[
        bool, Key("Whether its certificate is checked. false talks to anyone who answers there.")
    ] = True
