"""Where a gateway's configuration comes from, to read the same places again at a reload.

Must never keep what it read: whoever reloads wants what stands there now.
"""

import os
from dataclasses import dataclass

from gateway.config.load import Loaded, load


@dataclass(slots=True, frozen=True)
class Source:
    """Where the configuration came from, so that a reload reads the same places again."""

    path: str | None = None
    backends: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def load(self) -> Loaded:
        """Read and check it.

        Raises:
            ConfigErrors: it has mistakes.
        """
        return load(
            self.path, backends=self.backends, overrides=self.overrides, env=dict(os.environ)
        )
