"""The one interface of everything that finds backends.

A source reports the whole list as often as it likes and never ends by itself. It holds no list:
what was known stays known while it fails, which is its listener's business.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from gateway.config.discovery import DiscoveryConfig
from gateway.config.groups import Members

Settings = Callable[[], DiscoveryConfig]
"""What is in force now: a reload changes it under a running source."""


class Told(Protocol):
    """Who listens to a source."""

    def found(self, members: Members) -> None:
        """Take the list as it is now, changed or not."""

    def failed(self, reason: str) -> None:
        """Take that nothing is known at present, and why."""


class Source(Protocol):
    """Something that knows which backends there are."""

    async def follow(self, told: Told) -> None:
        """Report to `told`, at once and then whenever there may be news, until cancelled."""


async def pause(seconds: float, rng: random.Random) -> None:
    """Wait about `seconds`: many gateways must not ask in step."""
    await asyncio.sleep(seconds * rng.uniform(0.9, 1.1))
