"""The synthetic workloads by name: what `synthetic:NAME` means."""

from collections.abc import Callable
from functools import partial
from random import Random

from gateway.sim.generators import sessions, singles
from gateway.sim.traffic import CHAT_SLO, CODING_SLO, Dialogue, Traffic, Workload

Maker = Callable[[Random, float, float], list[Dialogue]]

MAKERS: dict[str, Maker] = {
    "coding": partial(sessions.coding, shape=sessions.Coding()),
    "chat": partial(sessions.chat, shape=sessions.Chat()),
    "mix": partial(sessions.mix, shape=sessions.Mix()),
    "hot": partial(singles.hot, shape=singles.Hot()),
    "groups": partial(singles.groups, shape=singles.Groups()),
    "unique": partial(singles.unique, shape=singles.Unique()),
    "short": partial(singles.unique, shape=singles.SHORT),
    "agents": partial(sessions.agents, shape=sessions.Agents()),
}

# Enough of each for a 95th percentile, and long enough for sessions to come and go several times.
REQUESTS = 4_000
LEAST_S = {"coding": 600.0, "mix": 600.0, "agents": 200.0, "chat": 90.0, "short": 60.0}
_LEAST_S = 120.0  # a queue that grows shows itself
# Caches fill and sessions reach their steady number in the first part of a run.
WARM_SHARE = 0.25


def synthetic(name: str, *, requests: int = REQUESTS, maker: Maker | None = None) -> Traffic:
    """Return the traffic called `name`; `requests` is about how many one workload has.

    Raises:
        ValueError: no such name; the message lists those there are.
    """
    make = maker or MAKERS.get(name)
    if make is None:
        raise ValueError(f"unknown synthetic workload {name!r}: one of {', '.join(MAKERS)}")

    def traffic(rate: float, seed: int) -> Workload:
        least = LEAST_S.get(name, _LEAST_S) * min(1.0, requests / REQUESTS)
        seconds = max(least, requests / rate)
        rng = Random(f"{name} {seed}")  # noqa: S311 - reproducible traffic, not secrets
        dialogues = make(rng, rate, seconds)
        return Workload(
            f"synthetic:{name}",
            dialogues,
            seconds,
            seconds * WARM_SHARE,
            {"coding": CODING_SLO, "chat": CHAT_SLO},
            rate,
        )

    return traffic
