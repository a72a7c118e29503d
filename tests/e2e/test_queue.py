"""A burst that the queue has no room for: nobody is lost, refused clients come back and are served."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.fleet import MODEL, Fleet, Gateway, eventually, start_gateway
from tests.e2e.talk import prose

BURST = 300
ROOM = 24


@pytest.fixture(scope="module")
def tight(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run a gateway that lets little in at once and has places for few."""
    arguments = [word for url in fleet.urls for word in ("--backend", url)]
    for one in (
        "queue.owed_s=0.05",
        f"classes.chat.max_waiting={ROOM}",
        "classes.chat.max_wait_s=60",
    ):
        arguments += ["--set", one]
    with start_gateway(arguments, tmp_path_factory.mktemp("tight")) as running:
        eventually(lambda: len(running.backends()) == 2, what="both backends in /status")
        yield running


async def _served(sdk: openai.AsyncOpenAI, number: int) -> int:
    """Return how many events one client read to the end of its answer."""
    events = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prose(number)[: 200 + 40 * (number % 50)]}],
        max_tokens=4,
        stream=True,
    )
    return sum([1 async for _ in events])


async def _burst(url: str) -> list[int]:
    async with openai.AsyncOpenAI(
        base_url=url + "/v1", api_key="none", max_retries=100, timeout=120
    ) as sdk:
        return await asyncio.gather(*[_served(sdk, number) for number in range(BURST)])


@pytest.mark.timeout(240)
def test_a_burst_of_300_loses_nobody_and_every_refusal_is_retried_with_success(
    tight: Gateway, fleet: Fleet
) -> None:
    read = asyncio.run(_burst(tight.url))

    assert len(read) == BURST
    assert min(read) > 0
    outcomes: Counter[str] = Counter()
    for row, count in tight.metrics()["gateway_requests_total"]:
        outcomes[row["outcome"]] += int(count)
    outcomes = +outcomes
    assert outcomes["ok"] == BURST
    assert set(outcomes) - {"upstream_error"} <= {"ok", "rejected_full"}
    # llama.cpp closes one connection in some 2,000 under this burst with a request on it: that one
    # is not ours to run twice, is told 502 and served when its client comes back
    broken_off = sum(
        int(count)
        for row, count in tight.metrics()["gateway_upstream_attempts_total"]
        if row["result"] == "reset"
    )
    assert outcomes["upstream_error"] <= (broken_off if fleet.engine == "llamacpp" else 0)
    waiting = sum(value for _, value in tight.metrics()["gateway_queue_depth"])
    assert waiting == 0
    assert not any(row["in_flight"] for row in tight.backends().values())
    served = {
        row["backend"]: count
        for row, count in tight.metrics()["gateway_upstream_attempts_total"]
        if count
    }
    assert len(served) == 2
