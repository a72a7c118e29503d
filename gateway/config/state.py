"""Configuration of what is kept over a restart; part of `config/schema.py`.

Nothing here reads or writes the file.
"""

from typing import Annotated

import msgspec

from gateway.config.keys import Key


class StateConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The index and what was learnt, kept over a restart."""

    path: Annotated[
        str | None,
        Key(
            "File that is written with every stop and every interval_s, and read at the start: "
            "salted block hashes and learnt speeds, no text; only its owner may read it. One file "
            "per gateway. None = off.",
            form="text",
        ),
    ] = None
    max_age_s: Annotated[float, Key("An older file is not used.", unit="s", gt=0, le=86_400)] = (
        600.0
    )
    interval_s: Annotated[
        float, Key("Pause between two writes of the file.", unit="s", ge=1, le=86_400)
    ] = 60.0
