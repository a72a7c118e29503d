"""A burst on simulated replicas over sockets: nobody is lost, the order is the specified one."""

import asyncio
from contextlib import AsyncExitStack

import openai
import pytest

from gateway.core.waiting import AGING
from tests.integration.rig import chat, eventually, gateway, post, running
from tests.integration.sim_rig import live_replica
from tests.integration.test_queue import CHAT, TIGHT, Held, ask, begin, lapse, waiting

BURST = 300
MODEL = "tiny"


def prompt(number: int) -> str:
    return f"{number} " + "word " * (200 + 37 * number % 2000)


async def served(sdk: openai.AsyncOpenAI, number: int, *, stream: bool) -> str:
    """Return how one client's answer ended; the SDK comes back by itself when it is refused."""
    completions = sdk.chat.completions
    if not stream:
        answer = await completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt(number)}], max_tokens=4
        )
        return str(answer.choices[0].finish_reason)
    reason = ""
    events = await completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt(number)}],
        max_tokens=4,
        stream=True,
    )
    async for event in events:
        for choice in event.choices:
            reason = choice.finish_reason or reason
    return reason


@pytest.mark.timeout(120)
async def test_a_burst_of_300_on_two_replicas_loses_nobody_and_every_refusal_is_retried() -> None:
    """Room for 20 waiters only: many are refused first, and the `openai` SDK does as it is told."""
    settings = ("classes.chat.max_waiting=20", "queue.owed_s=0.05", "classes.chat.max_wait_s=30")
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(live_replica(time_scale=0.1)) for _ in range(2)]
        rig = await stack.enter_async_context(gateway(replicas, settings, None, None))  # type: ignore[arg-type]
        sdk = openai.AsyncOpenAI(
            base_url=f"{rig.app.url}/v1", api_key="k", max_retries=60, timeout=60
        )
        await stack.enter_async_context(sdk)
        reasons = await asyncio.gather(
            *[served(sdk, number, stream=number % 2 == 0) for number in range(BURST)]
        )

        assert set(reasons) <= {"stop", "length"}
        assert len(reasons) == BURST
        outcomes = rig.outcomes()
        assert outcomes.pop("ok") == BURST
        assert set(outcomes) == {"rejected_full"}  # R36: nothing else, and never a 500
        admitted = rig.metric("gateway_admission_total", result="admitted")
        assert admitted == BURST
        shares = [
            rig.metric("gateway_upstream_attempts_total", backend=f"backend-{n}") for n in (1, 2)
        ]
        assert sum(shares) == BURST
        assert min(shares) > BURST / 5  # both worked
        assert waiting(rig) == 0
        await rig.at_rest()


async def test_what_waits_goes_in_the_specified_order() -> None:
    """Least prefill seconds, less what waiting outweighs, one at a time."""
    backend = Held()
    async with running(backend, settings=(*TIGHT, "queue.owed_s=0")) as rig:
        tasks = await begin(rig, ask("first"))
        await backend.saw(1)
        tasks += await begin(rig, *[ask(f"r{n}", prompt(n)) for n in range(60)])
        await eventually(lambda: waiting(rig) == 60)
        (line,) = rig.handler.dispatcher._queue.room.lines.values()
        due = sorted(line.all(), key=lambda held: held.pf_s + AGING * held.since)
        parked = rig.handler.parking._parked
        names = {ident: exchange.record.request_id for ident, exchange in parked.items()}
        expected = [names[held.ticket.id] for held in due]
        assert expected != [f"r{n}" for n in range(60)]
        for count in range(61):
            backend.go.release()
            await backend.saw(min(count + 2, 61))
        await asyncio.gather(*tasks)

        assert backend.came == ["first", *expected]
        await rig.at_rest()


async def test_r36_every_denial_of_admission_is_a_429_or_503_that_says_when() -> None:
    backend = Held()
    settings = (*TIGHT, "classes.chat.max_waiting=1")
    async with running(backend, settings=settings) as rig:
        tasks = await begin(rig, ask("a"), ask("waits"))
        full = await rig.ask(ask("full"))
        lapse(rig)
        late = await tasks.pop()
        backend.go.release()
        await asyncio.gather(*tasks)
        dispatcher, clock = rig.handler.dispatcher, rig.handler.clock
        dispatcher.set_up(dispatcher.backends(clock())[0].name, False, clock())
        (vain,) = await begin(rig, post(CHAT, chat("hi")))
        await eventually(lambda: waiting(rig) == 1)
        lapse(rig)
        nobody = await vain

        assert [(a.status, a.code) for a in (full, late, nobody)] == [
            (429, "queue_full"),
            (429, "queue_timeout"),
            (503, "no_backend"),
        ]
        for answer in (full, late, nobody):
            assert 1 <= int(answer.header("retry-after") or -1) <= 60
            assert 0 < int(answer.header("retry-after-ms") or -1) <= 60_000
