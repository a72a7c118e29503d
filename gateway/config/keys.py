"""What the schema is made of: the `Key` beside each field says what it means."""

from dataclasses import dataclass
from typing import Any

NOT_YET = "Not in effect yet."
"""Ends the help of a key that is checked and kept but that nothing acts on so far."""


@dataclass(slots=True, frozen=True)
class Key:
    """What a key means. `form` names a text check of `forms.py`; `example` is for the reference."""

    help: str
    unit: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    form: str | None = None
    example: Any = None

    @property
    def in_effect(self) -> bool:
        """Whether setting it changes anything."""
        return not self.help.endswith(NOT_YET)
