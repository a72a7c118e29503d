"""What the schema is made of: the `Key` beside each field says what it means."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Key:
    """What a key means. `form` names a text check of `forms.py`; `example` is for the reference.

    `apart`: it excludes other keys, so that the reference shows it in an item of its own.
    """

    help: str
    unit: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    form: str | None = None
    example: Any = None
    apart: bool = False
