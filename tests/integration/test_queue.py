"""The gateway's queue over real sockets: who waits, in which order they go, and what they are told."""

import asyncio
from typing import Any

import pytest

from tests.integration.rig import (
    Answer,
    Conn,
    Received,
    Rig,
    chat,
    eventually,
    ok_chat,
    post,
    running,
)

# 8 KB of text: about 0.06 s of prefill by the prior, so that one of them closes the backend.
TEXT = "word " * 1600
CHAT = "/v1/chat/completions"
TIGHT = (
    "queue.owed_s=0.01",
    "queue.steal_s=0.005",
    "classes.chat.default=true",
    "classes.chat.max_wait_s=30",
    "classes.coding.match=[{path: /v1/messages}]",
)


class Held:
    """A backend that answers a request when it is told to, and keeps the order they came in."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def saw(self, count: int) -> None:
        """Wait until so many requests have come."""
        await eventually(lambda: len(self.came) == count)

    async def __call__(self, conn: Conn, request: Received) -> None:
        self.came.append(request.header("x-request-id") or "")
        await self.go.acquire()
        await ok_chat(conn, request)


def ask(name: str, text: str = TEXT, *lines: str, **more: object) -> bytes:
    body = chat(f"{name} {text}", stream=True, **more)
    return post(CHAT, body, f"x-request-id: {name}", *lines)


def waiting(rig: Rig, cls: str = "chat") -> int:
    return int(rig.metric("gateway_queue_depth", **{"class": cls}))


class Ahead:
    """A loop whose clock is an hour ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.call_at, self.call_soon = loop.call_at, loop.call_soon

    def time(self) -> float:
        return self._loop.time() + 3600.0


def lapse(rig: Rig) -> None:
    """Let the time of all that wait be over, whatever it was."""
    parking: Any = rig.handler.parking
    if parking._timer is not None:
        parking._timer.cancel()
    loop = parking._loop
    parking._loop = Ahead(loop)
    parking._expire()
    parking._loop = loop


async def _more_live(rig: Rig, before: int) -> None:
    await eventually(lambda: len(rig.handler.live) > before)


async def begin(rig: Rig, *requests: bytes) -> list["asyncio.Task[Answer]"]:
    """Send each on a connection of its own, in order."""
    tasks = []
    for data in requests:
        before = len(rig.handler.live)
        tasks.append(asyncio.ensure_future(rig.ask(data)))
        await _more_live(rig, before)
    return tasks


async def test_r38_a_request_waits_at_the_gateway_while_its_backend_owes_too_much() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("a"), ask("b"), ask("c"))
        await eventually(lambda: backend.came == ["a"])
        assert waiting(rig) == 2

        for count in (2, 3):
            backend.go.release()
            await backend.saw(count)
        backend.go.release()
        answers = await asyncio.gather(*tasks)

        assert [answer.status for answer in answers] == [200, 200, 200]
        assert waiting(rig) == 0
        assert int(answers[0].header("x-gateway-queue-ms") or -1) == 0
        assert int(answers[2].header("x-gateway-queue-ms") or -1) > 0
        await rig.at_rest()


async def test_the_shortest_goes_first() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("first"), ask("long", TEXT * 3), ask("short", TEXT[:4000]))
        await eventually(lambda: waiting(rig) == 2)
        for _ in range(3):
            backend.go.release()
        await asyncio.gather(*tasks)

        assert backend.came == ["first", "short", "long"]


async def test_r32_a_client_that_leaves_frees_its_place_at_once_and_reaches_no_backend() -> None:
    backend = Held()
    settings = (*TIGHT, "classes.chat.max_waiting=1")
    async with running(backend, settings=settings) as rig:
        tasks = await begin(rig, ask("a"))
        client = await rig.connect()
        await client.send(ask("leaver"))
        await eventually(lambda: waiting(rig) == 1)
        refused = await rig.ask(ask("refused"))
        assert (refused.status, refused.code) == (429, "queue_full")

        client.reset()
        await eventually(lambda: waiting(rig) == 0)
        tasks += await begin(rig, ask("b"))
        for _ in range(2):
            backend.go.release()
        answers = await asyncio.gather(*tasks)

        assert [answer.status for answer in answers] == [200, 200]
        assert backend.came == ["a", "b"]
        assert rig.outcomes() == {"ok": 2, "client_closed": 1, "rejected_full": 1}
        await rig.at_rest()


async def test_r33_the_queue_is_bounded_by_bytes() -> None:
    backend = Held()
    settings = (*TIGHT, "classes.chat.max_waiting_mib=1")
    async with running(backend, settings=settings) as rig:
        big = "x" * 600_000
        tasks = await begin(rig, ask("a"), ask("b", big))
        assert waiting(rig) == 1
        refused = await rig.ask(ask("c", big))
        assert (refused.status, refused.code) == (429, "queue_full")
        assert 0 < int(refused.header("retry-after-ms") or -1) <= 60_000

        for _ in range(2):
            backend.go.release()
        await asyncio.gather(*tasks)
        await rig.at_rest()


async def test_nobody_waits_longer_than_the_class_allows() -> None:
    backend = Held()
    settings = (*TIGHT, "classes.chat.max_wait_s=0.2")
    async with running(backend, settings=settings) as rig:
        tasks = await begin(rig, ask("a"))
        answer = await rig.ask(ask("late"))

        assert (answer.status, answer.code) == (429, "queue_timeout")
        assert 1 <= int(answer.header("retry-after") or -1) <= 60
        backend.go.release()
        await asyncio.gather(*tasks)
        assert rig.outcomes() == {"ok": 1, "expired": 1}
        assert rig.metric("gateway_admission_total", result="expired") == 1
        await rig.at_rest()


async def test_the_clients_own_patience_bounds_its_wait() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("a"))
        answer = await rig.ask(ask("hurried", TEXT, "x-stainless-read-timeout: 0.2"))

        assert (answer.status, answer.code) == (429, "queue_timeout")
        backend.go.release()
        await asyncio.gather(*tasks)


async def test_r29_requests_wait_for_a_backend_to_come_up_and_are_then_served() -> None:
    async with running(ok_chat, settings=TIGHT) as rig:
        dispatcher, clock = rig.handler.dispatcher, rig.handler.clock
        name = dispatcher.backends(clock())[0].name
        dispatcher.set_up(name, False, clock())
        tasks = await begin(rig, *[ask(f"r{i}") for i in range(5)])
        await eventually(lambda: waiting(rig) == 5)

        dispatcher.set_up(name, True, clock())
        answers = await asyncio.gather(*tasks)

        assert {answer.status for answer in answers} == {200}
        await rig.at_rest()


async def test_r29_without_any_backend_the_wait_ends_in_503() -> None:
    settings = (*TIGHT, "classes.chat.max_wait_s=0.2")
    async with running(ok_chat, settings=settings) as rig:
        dispatcher, clock = rig.handler.dispatcher, rig.handler.clock
        dispatcher.set_up(dispatcher.backends(clock())[0].name, False, clock())
        answer = await rig.ask(ask("a"))

        assert (answer.status, answer.code) == (503, "no_backend")
        assert int(answer.header("retry-after") or -1) >= 1


async def test_r35_an_unknown_model_is_refused_before_any_queue() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("a"), ask("b"))
        answer = await rig.ask(ask("c", TEXT, model="nobody"))

        assert (answer.status, answer.code) == (404, "model_not_found")
        for _ in range(2):
            backend.go.release()
        await asyncio.gather(*tasks)


async def test_an_idle_backend_takes_over_what_waits_for_another() -> None:
    """Two prompts with the same long prefix: the second is bound to the home, then stolen."""
    home, other = Held(), Held()
    async with running(home, other, settings=TIGHT) as rig:
        warm = await begin(rig, ask("warm", TEXT * 4))
        await eventually(lambda: len(home.came) + len(other.came) == 1)
        busy, idle = (home, other) if home.came else (other, home)
        held = await begin(rig, ask("filler", TEXT), ask("next", TEXT))
        await eventually(lambda: len(idle.came) == 1)
        assert waiting(rig) == 1

        idle.go.release()  # it is idle again, the other backend still owes all it has
        await eventually(lambda: len(idle.came) == 2)
        assert len(busy.came) == 1
        idle.go.release()
        busy.go.release()
        answers = await asyncio.gather(*warm, *held)
        assert {answer.status for answer in answers} == {200}
        await rig.at_rest()


async def test_what_waits_for_a_drained_backend_is_served_by_another() -> None:
    first, second = Held(), Held()
    async with running(first, second, settings=TIGHT) as rig:
        tasks = await begin(rig, *[ask(f"r{i}", TEXT) for i in range(6)])
        await eventually(lambda: len(first.came) == len(second.came) == 1)
        dispatcher = rig.handler.dispatcher
        names = {row.name: row for row in dispatcher._fleet.by_name.values()}
        drained = next(name for name, row in names.items() if row.live)
        dispatcher.drain(drained, rig.handler.clock())
        for _ in range(6):
            first.go.release()
            second.go.release()
        answers = await asyncio.gather(*tasks)

        assert {answer.status for answer in answers} == {200}
        assert 1 in (len(first.came), len(second.came))
        await rig.at_rest()


async def test_a_reload_loses_nobody_that_waits() -> None:
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, *[ask(f"r{i}") for i in range(4)])
        await eventually(lambda: waiting(rig) == 3)
        result = await rig.app.reload()
        assert result.ok
        assert waiting(rig) == 3
        for _ in range(4):
            backend.go.release()
        answers = await asyncio.gather(*tasks)

        assert {answer.status for answer in answers} == {200}
        await rig.at_rest()


async def test_the_gateways_end_is_told_to_those_that_wait() -> None:
    backend = Held()
    async with running(backend, settings=(*TIGHT, "timeouts.drain_s=0")) as rig:
        tasks = await begin(rig, ask("a"), ask("b"))
        await eventually(lambda: waiting(rig) == 1)
        await rig.app.stop()
        answers = await asyncio.gather(*tasks)

        assert [answer.code for answer in answers] == ["draining", "draining"]


@pytest.mark.parametrize("backends", [1, 2])
async def test_a_burst_of_300_is_served_whole(backends: int) -> None:
    async with running(*[ok_chat] * backends, settings=TIGHT) as rig:
        answers = await asyncio.gather(
            *[asyncio.ensure_future(rig.ask(ask(f"r{i}", TEXT[: 10 * i]))) for i in range(300)]
        )

        assert {answer.status for answer in answers} == {200}
        assert rig.outcomes() == {"ok": 300}
        assert waiting(rig) == 0
        await rig.at_rest()


async def test_with_the_queue_off_everything_is_sent_at_once() -> None:
    backend = Held()
    async with running(backend, settings=(*TIGHT, "queue.enabled=false")) as rig:
        tasks = await begin(rig, ask("a"), ask("b"), ask("c"))
        await eventually(lambda: len(backend.came) == 3)
        for _ in range(3):
            backend.go.release()
        await asyncio.gather(*tasks)


async def test_a_fault_in_starting_one_leaves_the_others_to_start() -> None:
    """What is let go in one turn is independent: one that cannot be sent costs itself alone."""
    backend = Held()
    async with running(backend, settings=TIGHT) as rig:
        tasks = await begin(rig, ask("a"), ask("b"), ask("c"))
        await eventually(lambda: waiting(rig) == 2)
        exchanges = {x.record.request_id: x for x in rig.handler.live}
        exchanges["b"]._body = None  # a fault of ours: there is nothing to send
        for _ in range(2):
            backend.go.release()
        answers = await asyncio.gather(*tasks)

        assert sorted(answer.status for answer in answers) == [200, 200, 500]
        assert waiting(rig) == 0
        assert rig.outcomes() == {"ok": 2, "internal_error": 1}
        await rig.at_rest()
