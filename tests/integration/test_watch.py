import asyncio
import gc
import random
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

import orjson
import pytest

from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, ModelSpec
from gateway.core.types import Chain, Finish, Outcome, Query, Refusal, Ticket
from gateway.watch.catalog import Catalog
from gateway.watch.poller import Target
from tests.integration.watch_rig import FAST, HASTY, VLLM_PAGE, Backend, Recorder, running, watching


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


def page_of(**figures: float) -> bytes:
    return "".join(f"vllm:{name} {value}\n" for name, value in figures.items()).encode()


async def test_every_backend_is_probed_and_read(sink: Recorder) -> None:
    a, b = Backend("a"), Backend("b")
    async with running(a, b), watching(sink, a.target, b.target) as watch:
        assert await watch.first_round(30)
        assert sink.ups == {"a": [True], "b": [True]}
        await sink.until(lambda: sink.count("a") > 2 and sink.count("b") > 2)

    assert sink.snapshots["a"][0].waiting == 11
    assert a.keys == {"Bearer secret"}


async def test_models_are_known_before_the_first_round_ends(sink: Recorder) -> None:
    a = Backend("a")
    async with running(a), watching(sink, a.target, on_models=sink.on_models) as watch:
        assert await watch.first_round(30)
        assert sink.served[0] == {"m": ("a",)}


async def test_metrics_and_block_size_are_known_at_first_and_followed(
    sink: Recorder,
) -> None:
    a = Backend("a")
    told: list[int | None] = []

    def on_block_size() -> None:
        told.append(sink.snapshots["a"][-1].block_tokens)

    async with running(a), watching(sink, a.target, on_block_size=on_block_size) as watch:
        assert await watch.first_round(30)
        assert await watch.first_metrics(30)
        assert told == [sink.snapshots["a"][0].block_tokens] != [None]

        before = a.page
        a.page = VLLM_PAGE.replace(b'block_size="', b'block_size="2')
        assert a.page != before
        await sink.until(lambda: len(told) == 2)
        await sink.more_snapshots("a")

    assert told == [told[0], sink.snapshots["a"][-1].block_tokens]
    assert told[0] != told[1]


async def test_hanging_metrics_leave_the_backend_up_and_the_others_on_time(
    sink: Recorder,
) -> None:
    hung, fine = Backend("hung"), Backend("fine")
    hung.page = None
    pace = replace(FAST, timeout_s=0.1)
    async with running(hung, fine), watching(sink, hung.target, fine.target, pace=pace) as watch:
        assert await watch.first_round(30)
        await sink.until(lambda: hung.paths.count("/metrics") > 2)
        await sink.more_snapshots("fine", 20)
        assert sink.ups["hung"] == [True]
        assert sink.count("hung") == 0

        hung.page = VLLM_PAGE
        await sink.more_snapshots("hung")
        assert sink.ups["hung"] == [True]


@pytest.mark.parametrize("status", [404, 500, 501, 503])
async def test_refused_metrics_leave_the_backend_up(sink: Recorder, status: int) -> None:
    bad, fine = Backend("bad"), Backend("fine")
    bad.page_status = status
    async with running(bad, fine), watching(sink, bad.target, fine.target) as watch:
        assert await watch.first_round(30)
        await sink.more_snapshots("fine", 20)

    assert sink.ups["bad"] == [True]
    assert sink.count("bad") == 0


@pytest.mark.parametrize("page", [b"", b"\xff\x00{}", b"<html></html>", b"x" * (9 << 20)])
async def test_any_bytes_as_metrics_are_borne(sink: Recorder, page: bytes) -> None:
    odd, fine = Backend("odd"), Backend("fine")
    odd.page = page
    async with running(odd, fine), watching(sink, odd.target, fine.target) as watch:
        assert await watch.first_round(30)
        await sink.until(lambda: odd.paths.count("/metrics") > 0)
        await sink.more_snapshots("fine", 5)

    assert sink.ups["odd"] == [True]
    assert sink.count("odd") == 0


async def test_page_of_5000_series_is_read_and_delays_nobody(sink: Recorder) -> None:
    big, fine = Backend("big"), Backend("fine")
    big.page = VLLM_PAGE + b"".join(b'vllm:filler{n="%d"} 1.0\n' % n for n in range(5_000))
    async with running(big, fine), watching(sink, big.target, fine.target):
        await sink.more_snapshots("big")
        await sink.more_snapshots("fine")

    assert sink.snapshots["big"][0].waiting == 11


async def test_only_the_wanted_series_are_asked_for_where_that_tells_the_same(
    sink: Recorder,
) -> None:
    a = Backend("a")
    async with running(a), watching(sink, a.target):
        await sink.until(lambda: a.filtered > 3)
        await sink.more_snapshots("a")

    first, last = sink.snapshots["a"][0], sink.snapshots["a"][-1]
    assert replace(last, at=first.at) == first


async def test_whole_page_is_read_where_names_cannot_be_asked_for(sink: Recorder) -> None:
    a = Backend("a")
    a.filters = False
    async with running(a), watching(sink, a.target):
        await sink.more_snapshots("a", 10)

    assert sink.ups["a"] == [True]
    first, last = sink.snapshots["a"][0], sink.snapshots["a"][-1]
    assert replace(last, at=first.at) == first


async def test_backend_that_dies_goes_down_and_comes_back(sink: Recorder) -> None:
    a = Backend("a")
    catalog = Catalog(lambda: 1.0)
    catalog.configure([ModelSpec("m", ("a",)), ModelSpec("new", ("a",))], ())
    async with running(a), watching(sink, a.target, catalog=catalog, on_models=sink.on_models):
        await sink.until(lambda: sink.is_up("a"))
        assert b'"m"' in catalog.body()
        await a.stop()
        await sink.until(lambda: not sink.is_up("a"))
        assert orjson.loads(catalog.body())["data"] == []
        assert catalog.served() == {"m": ("a",)}

        a.models = [{"id": "new"}]
        await a.start()
        await sink.until(lambda: sink.is_up("a"))
        assert sink.ups["a"] == [True, False, True]
        assert sink.served[-1] == {"new": ("a",)}
        await sink.more_snapshots("a")


async def test_refused_scrape_brings_the_next_probe_forward(sink: Recorder) -> None:
    a = Backend("a")
    async with running(a), watching(sink, a.target, pace=replace(FAST, probe_s=3_600.0)):
        await sink.until(lambda: sink.is_up("a") and sink.count("a") > 0)
        await a.stop()
        await sink.until(lambda: not sink.is_up("a"))


async def test_loading_backend_is_down_until_it_has_loaded(sink: Recorder) -> None:
    a = Backend("a")
    a.health = 503
    async with running(a), watching(sink, a.target, on_models=sink.on_models) as watch:
        assert await watch.first_round(30)
        assert sink.ups["a"] == [False]
        assert sink.served == []

        a.health = 200
        await sink.until(lambda: sink.is_up("a"))
        assert sink.served == [{"m": ("a",)}]


async def test_r29_an_added_backend_counts_as_down_until_its_first_probe_while_others_serve(
    sink: Recorder,
) -> None:
    there, added = Backend("a"), Backend("b")
    added.health = None  # its first probe does not end
    async with running(there, added), watching(sink, there.target) as watch:
        assert await watch.first_round(30)
        watch.set_targets([there.target, added.target])
        assert sink.ups == {"a": [True], "b": [False]}


async def test_a_new_process_behind_the_address_is_asked_for_its_models_at_once(
    sink: Recorder,
) -> None:
    """It may serve another model, and be back before a probe missed it."""
    backend = Backend("a")
    pace = replace(FAST, models_s=3600.0, probe_s=3600.0)
    async with (
        running(backend),
        watching(sink, backend.target, on_models=sink.on_models, pace=pace) as watch,
    ):
        assert await watch.first_round(30)
        await sink.more_snapshots("a")
        asked = backend.paths.count("/v1/models")
        backend.models = [{"id": "other"}]
        started = b"\nprocess_start_time_seconds "
        page, _, rest = VLLM_PAGE.partition(started)
        backend.page = page + started + b"2e9" + rest[rest.index(b"\n") :]
        await sink.until(lambda: sink.served[-1] == {"other": ("a",)})
        await sink.more_snapshots("a")
        assert backend.paths.count("/v1/models") == asked + 1


async def test_changed_models_and_lora_ids_are_told(sink: Recorder) -> None:
    a, b = Backend("a"), Backend("b")
    catalog = Catalog(lambda: 1.0)

    def routed(served: Mapping[str, tuple[str, ...]]) -> None:
        catalog.configure([ModelSpec(name, backends) for name, backends in served.items()], ())
        sink.on_models(served)

    async with (
        running(a, b),
        watching(sink, a.target, b.target, catalog=catalog, on_models=routed) as watch,
    ):
        assert await watch.first_round(30)
        b.models = [*b.models, {"id": "lora", "parent": "m", "root": "/adapters/lora"}]
        await sink.until(lambda: "lora" in sink.served[-1])
        assert sink.served[-1] == {"m": ("a", "b"), "lora": ("b",)}
        assert orjson.loads(catalog.one("lora") or b"")["parent"] == "m"

        b.models = b.models[:1]
        await sink.until(lambda: "lora" not in sink.served[-1])
        assert catalog.one("lora") is None


async def test_configured_model_that_the_engine_does_not_list_is_told_once(
    sink: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    a = Backend("a")
    a.models = [{"id": f"m{number}\n"} for number in range(7)]
    catalog = Catalog(lambda: 1.0)
    catalog.configure([ModelSpec("coder", ("a",)), ModelSpec("m1\n", ("a",))], ("coder", "m1\n"))
    async with running(a), watching(sink, a.target, catalog=catalog) as watch:
        assert await watch.first_round(30)
        a.models = [*a.models, {"id": "another"}]
        await sink.until(lambda: "another" in catalog.served())
        a.models = [{"id": "coder"}, {"id": "m1\n"}]
        await sink.until(lambda: "coder" in catalog.served())

    told = [record.getMessage() for record in caplog.records if "configured" in record.msg]
    names = r"'m0\n', 'm1\n', 'm2\n', 'm3\n', 'm4\n', ..."
    assert told == [f"backend a does not list the configured model 'coder'; it lists {names}"]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"data":3}', b"[" * 2000, b"x" * (5 << 20)])
async def test_unreadable_models_keep_the_known_ones(sink: Recorder, body: bytes) -> None:
    a = Backend("a")
    catalog = Catalog(lambda: 1.0)
    async with running(a), watching(sink, a.target, catalog=catalog, on_models=sink.on_models):
        await sink.until(lambda: sink.is_up("a"))
        a.models_body = body
        asked = a.paths.count("/v1/models")
        await sink.until(lambda: a.paths.count("/v1/models") > asked + 2)

    assert catalog.served() == {"m": ("a",)}
    assert sink.ups["a"] == [True]


async def test_one_missed_probe_is_forgiven_and_a_dead_loop_is_not(sink: Recorder) -> None:
    a = Backend("a")
    async with running(a), watching(sink, a.target):
        await sink.until(lambda: sink.is_up("a"))
        a.health = 500
        asked = a.paths.count("/health")
        await sink.until(lambda: not sink.is_up("a"))

    assert a.paths.count("/health") - asked >= 3
    assert sink.ups["a"] == [True, False]


async def test_hanging_health_takes_a_backend_down(sink: Recorder) -> None:
    a = Backend("a")
    async with running(a), watching(sink, a.target, pace=HASTY):
        await sink.until(lambda: sink.is_up("a"))
        a.health = None
        await sink.until(lambda: not sink.is_up("a"))
        a.health = 200
        await sink.until(lambda: sink.is_up("a"))


async def test_engine_without_a_health_route_is_asked_for_its_models(sink: Recorder) -> None:
    a = Backend("a")
    a.health = 404
    async with running(a), watching(sink, a.target) as watch:
        assert await watch.first_round(30)

    assert sink.ups["a"] == [True]


async def test_redirect_is_not_followed(sink: Recorder) -> None:
    a = Backend("a")
    a.health = 307
    async with running(a), watching(sink, a.target) as watch:
        assert await watch.first_round(30)

    assert sink.ups["a"] == [False]
    assert "/v1/models" not in a.paths


async def test_black_hole_holds_nobody(sink: Recorder) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fine = Backend("fine")
    hole = Target("hole", f"http://127.0.0.1:{port}")
    async with running(fine), watching(sink, hole, fine.target, pace=HASTY) as watch:
        await sink.more_snapshots("fine")
        assert await watch.first_round(30)

    assert sink.ups["hole"] == [False]
    server.close()
    await server.wait_closed()


async def test_first_metrics_are_not_waited_for_where_they_hang(sink: Recorder) -> None:
    a = Backend("a")
    a.page = None
    async with running(a), watching(sink, a.target) as watch:
        assert await watch.first_round(30)
        assert not await watch.first_metrics(0.01)


async def test_first_round_gives_up_in_time(sink: Recorder) -> None:
    a = Backend("a")
    a.health = None
    pace = replace(FAST, probe_timeout_s=30.0)
    async with running(a), watching(sink, a.target, pace=pace) as watch:
        assert not await watch.first_round(0.01)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:80"])
async def test_nobody_there_is_down(sink: Recorder, url: str) -> None:
    async with watching(sink, Target("a", url)) as watch:
        assert await watch.first_round(30)

    assert sink.ups["a"] == [False]


async def test_removed_backend_is_heard_no_more_and_a_new_one_is(sink: Recorder) -> None:
    a, b = Backend("a"), Backend("b")
    catalog = Catalog(lambda: 1.0)
    async with running(a, b), watching(sink, a.target, catalog=catalog) as watch:
        await sink.until(lambda: sink.is_up("a") and sink.count("a") > 0)
        watch.set_targets([b.target])
        told = sink.count("a")
        assert catalog.served() == {}
        await sink.until(lambda: sink.is_up("b") and sink.count("b") > 3)
        assert sink.count("a") == told
        asked = len(a.paths)
        await sink.more_snapshots("b", 20)
        assert len(a.paths) <= asked + 1


async def test_unchanged_backend_goes_on_undisturbed(sink: Recorder) -> None:
    a, b = Backend("a"), Backend("b")
    async with running(a, b), watching(sink, a.target) as watch:
        await sink.until(lambda: sink.is_up("a"))
        watch.set_targets([a.target, b.target], replace(FAST, interval_s=0.02))
        await sink.until(lambda: sink.is_up("b"))
        await sink.more_snapshots("a")

    assert sink.ups["a"] == [True]


async def test_moved_backend_is_watched_at_its_new_address(sink: Recorder) -> None:
    old, new = Backend("a"), Backend("a")
    new.page = page_of(num_requests_waiting=77)
    catalog = Catalog(lambda: 1.0)
    async with running(old, new), watching(sink, old.target, catalog=catalog) as watch:
        await sink.until(lambda: sink.is_up("a"))
        watch.set_targets([new.target])
        assert catalog.served() == {"m": ("a",)}
        await sink.until(lambda: any(s.waiting == 77 for s in sink.snapshots.get("a", ())))


async def test_llamacpps_start_time_comes_from_its_header(sink: Recorder) -> None:
    a = Backend("a")
    a.page = b"llamacpp:requests_processing 1\n"
    a.page_headers = {"Process-Start-Time-Unix": "1495300834"}
    async with running(a), watching(sink, a.target):
        await sink.more_snapshots("a", 1)

    assert sink.snapshots["a"][0].start_time == 1495300834.0


class Refusing(Recorder):
    """A dispatcher with a fault."""

    def observe(self, backend: str, snapshot: object, now: float) -> None:
        raise RuntimeError(f"{backend} {snapshot} {now}")

    def set_up(self, backend: str, up: bool, now: float) -> None:
        super().set_up(backend, up, now)
        raise RuntimeError("no")


async def test_fault_in_who_takes_the_reports_does_not_end_the_watching(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Refusing()
    a = Backend("a")

    def refuse(_served: object) -> None:
        raise RuntimeError("no")

    async with running(a), watching(sink, a.target, on_models=refuse):
        await sink.until(lambda: sink.is_up("a"))
        await a.stop()
        await sink.until(lambda: not sink.is_up("a"))
        await a.start()
        await sink.until(lambda: sink.is_up("a"))

    assert "was not taken" in caplog.text


async def test_stop_leaves_no_task_and_no_connection(sink: Recorder) -> None:
    a, b = Backend("a"), Backend("b")
    async with running(a, b):
        before = asyncio.all_tasks()
        async with watching(sink, a.target, b.target) as watch:
            await sink.until(lambda: sink.count("a") > 0)
            watch.set_targets([a.target])
        ours = {
            task for task in asyncio.all_tasks() - before if task.get_name().startswith("watch")
        }
        assert ours == set()
        told = sink.count("a")
    gc.collect()  # an unclosed session would warn, and warnings are errors

    assert sink.count("a") == told


def _query(tokens: int) -> Query:
    return Query("m", "chat", Chain(hashes=[], tokens_per_block=64.0, tokens=tokens), 10)  # type: ignore[arg-type]


async def test_traffic_goes_on_by_own_counts_when_every_metrics_page_dies() -> None:
    settings = CoreSettings(
        models=(ModelSpec("m", ("a", "b")),),
        backends=(BackendSpec("a"), BackendSpec("b")),
        classes=(ClassSpec("chat", default=True),),
        stale_after_s=0.1,
    )
    dispatcher = Dispatcher(settings, random.Random(1), monotonic())
    sink = Recorder()

    class Both:
        def observe(self, backend: str, snapshot: object, now: float) -> None:
            dispatcher.observe(backend, snapshot, now)  # type: ignore[arg-type]
            sink.observe(backend, snapshot, now)  # type: ignore[arg-type]

        def set_up(self, backend: str, up: bool, now: float) -> None:
            dispatcher.set_up(backend, up, now)
            sink.set_up(backend, up, now)

    a, b = Backend("a"), Backend("b")
    a.page = page_of(num_requests_running=1)
    b.page = page_of(num_requests_running=1)
    async with running(a, b), watching(Both(), a.target, b.target):
        await sink.until(lambda: sink.count("a") > 0 and sink.count("b") > 0)
        a.page_status = b.page_status = 500
        later = monotonic() + 10
        ages = [status.snapshot_age_s for status in dispatcher.backends(later)]
        tickets = [dispatcher.admit(_query(1_000), later) for _ in range(40)]

    assert all(age is not None and age > 9 for age in ages)
    assert all(not isinstance(ticket, Refusal) for ticket in tickets)
    used = [ticket.backend for ticket in tickets if isinstance(ticket, Ticket)]
    assert min(used.count("a"), used.count("b")) >= 15
    for ticket in tickets:
        assert isinstance(ticket, Ticket)
        dispatcher.finish(ticket, Finish(Outcome.OK, prefilled=True), later + 1)
    assert all(status.in_flight == 0 for status in dispatcher.backends(later + 1))
