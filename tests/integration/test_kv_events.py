"""KV events over real ZMQ sockets: gaps, replays, dead and restarted publishers, slow readers."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import zmq

from gateway.watch import kv_events
from gateway.watch.kv_events import EventSource, EventWatch
from tests.integration.kv_rig import ANY, Reading, Source, reading, until
from tests.kv_kit import chain


@pytest.fixture
async def read() -> AsyncIterator[Reading]:
    async with reading() as made:
        yield made


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    made = Source()
    yield made
    made.publisher.close()


async def test_a_reader_there_from_the_start_knows_the_cache(read: Reading, source: Source) -> None:
    read.follow(source)
    await until(read.exact)
    source.work(50)
    await read.caught_up(source)

    assert read.feed.gaps == read.feed.losses == read.feed.malformed == 0
    assert read.feed.events > 25


async def test_a_reader_that_comes_later_replays_what_it_missed(
    read: Reading, source: Source
) -> None:
    source.work(300)
    read.follow(source)
    await read.caught_up(source)

    source.work(20)
    await read.caught_up(source)
    assert read.feed.losses == 0


async def test_batches_lost_on_the_way_are_replayed(read: Reading, source: Source) -> None:
    read.follow(source)
    source.work(10)
    await read.caught_up(source)
    source.publisher.losing = True
    source.work(5)
    source.publisher.losing = False
    source.work(1)
    await until(lambda: read.feed.gaps == 1)
    await read.caught_up(source)

    assert read.feed.losses == 0
    assert read.changes == [True]  # it stayed exact all the while


async def test_a_gap_without_a_replay_socket_ends_exactness(read: Reading, source: Source) -> None:
    read.follow(source, replay=False)
    await until(lambda: read.feed._linked)
    source.work(10)
    await read.caught_up(source)
    source.publisher.losing = True
    source.work(5)
    source.publisher.losing = False
    source.work(1)
    await until(lambda: read.feed.losses == 1)
    assert not read.exact()

    source.engine.clear()
    source.work(3)
    await read.caught_up(source)


async def test_a_replay_that_is_never_answered_is_given_up(
    read: Reading, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.05)
    source.work(3)
    nobody = "tcp://127.0.0.1:1"
    where = EventSource("b", source.publisher.endpoint, nobody)
    read.hub.set_sources([(where, read.feed)])
    await until(lambda: read.feed._linked and not read.feed._filling)
    source.work(1)
    await until(lambda: read.feed.events)

    assert not read.exact()


async def test_a_replay_that_was_not_answered_is_asked_for_again(
    read: Reading, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(kv_events, "RETRY_S", 0.05)
    source.work(5)
    serve, source.publisher._serve = source.publisher._serve, lambda: None  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    router = source.publisher._router.getsockopt(zmq.FD)
    loop.remove_reader(router)
    read.follow(source)
    await until(lambda: read.feed._linked and not read.feed._filling)
    assert not read.exact()

    source.publisher._serve = serve  # type: ignore[method-assign]
    loop.add_reader(router, serve)
    serve()
    await read.caught_up(source)


async def test_a_dead_publisher_is_noticed_and_its_successor_followed(read: Reading) -> None:
    first = Source()
    try:
        read.follow(first)
        first.work(20)
        await read.caught_up(first)
    finally:
        first.publisher.close()
    await until(lambda: not read.exact())

    second = Source(endpoint=first.publisher.endpoint, replay=first.publisher.replay_endpoint)
    try:
        second.work(5)
        await read.caught_up(second)
        assert read.feed.restarts == 1
        second.work(5)
        await read.caught_up(second)
    finally:
        second.publisher.close()


async def test_nobody_listening_disturbs_nobody(source: Source) -> None:
    async with reading() as lonely:
        quiet = EventSource("quiet", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
        other = Reading(lonely.hub)
        where = EventSource("b", source.publisher.endpoint, source.publisher.replay_endpoint)
        lonely.hub.set_sources([(quiet, lonely.feed), (where, other.feed)])
        source.work(10)
        await other.caught_up(source)
        assert not lonely.exact()


async def test_a_reader_slower_than_its_engine_catches_up_by_replay(
    read: Reading, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_BACKLOG_BYTES", 20_000)
    read.follow(source)
    await until(read.exact)
    for _ in range(200):  # without a turn of the loop in between
        source.engine.run([source.rng.randrange(200_000) for _ in range(16 * 20)])
        source.tell()
    await until(lambda: read.feed.backlog_bytes == 0 and read.feed.events > 0)
    source.work(1)
    await read.caught_up(source)

    assert read.feed.gaps >= 1
    assert read.feed.losses == 0


async def test_replays_take_turns(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_REPLAYS", 1)
    source.work(30)
    async with reading() as first:
        others = [first, *(Reading(first.hub) for _ in range(4))]
        publisher = source.publisher
        first.hub.set_sources(
            (EventSource(f"b{i}", publisher.endpoint, publisher.replay_endpoint), other.feed)
            for i, other in enumerate(others)
        )
        for other in others:
            await other.caught_up(source)


async def test_all_readers_together_keep_to_their_share_of_a_turn(source: Source) -> None:
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        handle[0] = asyncio.get_running_loop().call_soon(count)

    async with reading() as read:
        source.engine = type(source.engine)(source.rng, blocks=20_000)
        for _ in range(100):
            source.engine.run([source.rng.randrange(200_000) for _ in range(16 * 100)])
            source.tell()
        handle = [asyncio.get_running_loop().call_soon(count)]
        gc.disable()
        try:
            read.follow(source)
            await until(lambda: read.feed.exact and read.feed.holdings.blocks == 100 * 100)
        finally:
            gc.enable()
            handle[0].cancel()

    assert turns > 3  # others had their turns meanwhile


async def test_what_is_no_event_costs_only_that_backends_trust(
    read: Reading, source: Source
) -> None:
    read.follow(source)
    await until(read.exact)
    pub = source.publisher._pub
    pub.send_multipart([b"only one frame"])
    pub.send_multipart([b"topic", b"short", b"payload"])
    await until(lambda: read.feed.malformed == 2)
    pub.send_multipart([b"topic", (0).to_bytes(8, "big"), b"\xc1"])
    await until(lambda: read.feed.malformed == 3)

    assert not read.exact()


async def test_a_changed_endpoint_is_followed_and_the_old_one_left(read: Reading) -> None:
    one, two = Source(), Source()
    try:
        read.follow(one)
        one.work(3)
        await read.caught_up(one)
        other = Reading(read.hub)
        other.follow(two)
        assert not read.exact()
        two.work(3)
        await other.caught_up(two)
        events = read.feed.events
        one.work(3)
        await other.caught_up(two)
        assert read.feed.events == events
    finally:
        one.publisher.close()
        two.publisher.close()


async def test_an_unchanged_source_is_not_disturbed_by_a_reload(
    read: Reading, source: Source
) -> None:
    read.follow(source)
    source.work(3)
    await read.caught_up(source)
    read.follow(source)
    source.work(3)
    await read.caught_up(source)

    assert read.changes == [True]


async def test_closing_the_hub_leaves_no_descriptor_open(source: Source) -> None:
    hub = EventWatch()
    read = Reading(hub)
    read.follow(source)
    source.work(3)
    await read.caught_up(source)
    hub.close()

    assert not read.exact()
    source.work(3)
    hub.close()


async def test_an_ipc_endpoint_works(tmp_path: object, read: Reading) -> None:
    source = Source(endpoint=f"ipc://{tmp_path}/kv", replay=ANY)
    try:
        read.follow(source)
        source.work(5)
        await read.caught_up(source)
        assert read.index.depth(0, chain(source.said[-1])) == len(source.said[-1]) // 16
    finally:
        source.publisher.close()
