"""An engine that publishes over real sockets, the hub that reads it, and what should come of it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.core.event_feed import Feed
from gateway.core.exact import Holdings
from gateway.sim.publish import Publisher
from gateway.watch.kv_events import EventSource, EventWatch
from tests.kv_kit import SeenIndex, ToyEngine, chain, seed, talk

ANY = "tcp://127.0.0.1:*"


async def until(condition: Callable[[], Any], *, within_s: float = 60.0) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - sockets have no event for "applied"
            await asyncio.sleep(0.002)


class LossyPublisher(Publisher):
    """Loses on the way what `losing` says; its replay buffer has it all the same."""

    losing = False

    def publish(self, events: Any) -> None:
        if not self.losing:
            super().publish(events)
            return
        pub, self._pub = self._pub, _Nowhere()
        super().publish(events)
        self._pub = pub


class _Nowhere:
    def send_multipart(self, *_: Any) -> None:
        pass


class Source:
    """A toy engine behind a publisher."""

    def __init__(self, *, endpoint: str = ANY, replay: str | None = ANY, **options: Any) -> None:
        self.rng = random.Random(11)
        self.publisher = LossyPublisher(endpoint, replay, topic="kv@somewhere", **options)
        self.said: list[list[int]] = []
        self.restart()

    def restart(self) -> None:
        """Begin with an empty cache, as another process would."""
        self.engine = ToyEngine(random.Random(self.rng.random()), blocks=200, wide=True)

    def work(self, batches: int = 1) -> None:
        for _ in range(batches):
            self.engine.run(talk(self.rng, self.said))
            self.tell()

    def tell(self) -> None:
        """Publish the engine's events since the last time."""
        events, self.engine.events = self.engine.events, []
        self.publisher.publish(events)


class Reading:
    """One backend's feed, read by a hub."""

    def __init__(self, hub: EventWatch) -> None:
        self.hub = hub
        self.index = SeenIndex()
        self.changes: list[bool] = []
        self.feed = Feed(
            Holdings(self.index, 0, seed, 16), lambda: self.changes.append(self.feed.exact)
        )

    def follow(self, source: Source, *, replay: bool = True) -> None:
        publisher = source.publisher
        where = publisher.replay_endpoint if replay else None
        self.hub.set_sources([(EventSource("b", publisher.endpoint, where), self.feed)])

    def exact(self) -> bool:
        return self.feed.exact

    def equals(self, source: Source) -> bool:
        """Whether the index holds what the engine's cache holds."""
        held = {own for ids in source.engine.prompts() for own in chain(ids)}
        return self.index.held.get(0, set()) == held

    async def caught_up(self, source: Source) -> None:
        await until(lambda: self.feed.exact and self.equals(source))


@asynccontextmanager
async def reading() -> AsyncIterator[Reading]:
    hub = EventWatch()
    try:
        yield Reading(hub)
    finally:
        hub.close()
