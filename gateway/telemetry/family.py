"""One metric on the `/metrics` page: its name, kind, labels and meaning. Data only."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(slots=True, frozen=True)
class Family:
    """One metric. `when` says what must be configured for it to be there at all."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    when: str = ""

    @property
    def head(self) -> str:
        """Return its HELP and TYPE lines."""
        return f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"
