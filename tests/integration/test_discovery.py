"""Backends that are found: added ones get a share, removed ones drain, and nothing of them stays."""

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import reloaded, source
from gateway.config.discovery import DiscoveryConfig
from gateway.config.load import load
from gateway.config.schema import BackendConfig, Config
from gateway.discovery import discovery
from gateway.discovery.discovery import Discovery
from tests.integration.discovery_rig import SRV, ApiServer, event, naming, serving, slice_of
from tests.integration.rig import (
    Backend,
    Client,
    Conn,
    Received,
    Rig,
    Script,
    chat,
    chat_event,
    eventually,
    gateway,
    ok_chat,
    post,
)

CHAT = "/v1/chat/completions"
QUICK = (
    "discovery.file_interval_s=0.02",
    "discovery.interval_s=0.05",
    "routing.policy=round_robin",
)
LONG_S = 60.0


@asynccontextmanager
async def engines(*scripts: Script) -> AsyncIterator[list[Backend]]:
    made = [await Backend(script).start() for script in scripts]
    try:
        yield made
    finally:
        for backend in made:
            await backend.stop()
    assert not [failure for backend in made for failure in backend.failures]


def listed(file: Path, **backends: Backend) -> None:
    """Write the list of backends as a careful program does: whole, then renamed."""
    rows = [f"- {{name: {name}, url: '{one.url}'}}\n" for name, one in backends.items()]
    beside = file.with_suffix(".new")
    beside.write_text("".join(rows) or "[]")
    beside.replace(file)


@asynccontextmanager
async def found_in(tmp_path: Path, *settings: str, **backends: Backend) -> AsyncIterator[Rig]:
    """Run a gateway whose backends are those of a file."""
    listed(tmp_path / "backends.yaml", **backends)
    config = tmp_path / "g.yaml"
    entry = f"{{name: pool, file: '{tmp_path / 'backends.yaml'}'}}"
    config.write_text(f"models: [{{name: m, backends: [{entry}]}}]\n")
    async with gateway([], (*QUICK, *settings), str(config), None) as rig:
        yield rig


def up(rig: Rig) -> set[str]:
    """Return the names of the backends that are up."""
    now = rig.app._clock()
    return {backend.name for backend in rig.app.dispatcher.backends(now) if backend.up}


async def are_up(rig: Rig, *names: str) -> None:
    await eventually(lambda: up(rig) == set(names), LONG_S)


async def asked_of(rig: Rig, count: int) -> set[str | None]:
    """Send requests; return who answered."""
    answers = [await rig.ask(post(CHAT, chat(f"q{n}"))) for n in range(count)]
    assert {answer.status for answer in answers} == {200}
    return {answer.header("x-gateway-backend") for answer in answers}


class Held:
    """A stream that sends one chunk and ends when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, conn: Conn, request: Received) -> None:
        if b"hold" not in request.body:
            await ok_chat(conn, request)
            return
        await conn.sse(chat_event("a"))
        await self.go.wait()
        await conn.chunk(chat_event("b"))
        await conn.chunk(b"data: [DONE]\n\n")
        await conn.end()


async def hold(rig: Rig) -> Client:
    """Begin a stream; return its client once the first chunk is there."""
    client = await rig.connect()
    await client.send(post(CHAT, chat("hold", stream=True)))
    await client.head()
    assert b'"a"' in await client.chunk()
    return client


async def rest_of(client: Client) -> bytes:
    parts = []
    while part := await client.chunk():
        parts.append(part)
    return b"".join(parts)


async def test_d58_who_leaves_the_list_gets_nothing_new_and_its_sockets_close(
    tmp_path: Path,
) -> None:
    async with engines(ok_chat, ok_chat) as (a, b), found_in(tmp_path, a=a, b=b) as rig:
        await are_up(rig, "a", "b")
        assert await asked_of(rig, 4) == {"a", "b"}
        assert a.open_connections

        listed(tmp_path / "backends.yaml", b=b)
        await are_up(rig, "b")
        seen = len(a.received)
        assert await asked_of(rig, 4) == {"b"}
        assert len(a.received) == seen
        await eventually(lambda: not a.open_connections, LONG_S)


async def test_d58_an_address_that_moved_is_another_socket(tmp_path: Path) -> None:
    async with engines(ok_chat, ok_chat) as (old, new), found_in(tmp_path, a=old) as rig:
        await are_up(rig, "a")
        assert await asked_of(rig, 2) == {"a"}

        listed(tmp_path / "backends.yaml", a=new)
        await eventually(lambda: not old.open_connections, LONG_S)
        assert await asked_of(rig, 2) == {"a"}
        assert (len(old.received), len(new.received)) == (2, 2)


async def test_a_request_in_progress_on_a_removed_backend_ends_as_if_nothing_was(
    tmp_path: Path,
) -> None:
    held = Held()
    async with engines(held, ok_chat) as (a, b), found_in(tmp_path, a=a) as rig:
        await are_up(rig, "a")
        client = await hold(rig)
        listed(tmp_path / "backends.yaml", b=b)
        await are_up(rig, "b")
        assert await asked_of(rig, 2) == {"b"}

        held.go.set()
        assert (await rest_of(client)).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: not a.open_connections, LONG_S)
        assert rig.outcomes() == {"ok": 3}


def tasks_of(name: str) -> list[str]:
    names = (task.get_name() for task in asyncio.all_tasks())
    return [task for task in names if task.endswith(f":{name}")]


async def test_r24_nothing_of_a_removed_backend_is_left(tmp_path: Path) -> None:
    async with engines(ok_chat, ok_chat) as (a, b), found_in(tmp_path, a=a, b=b) as rig:
        await are_up(rig, "a", "b")
        text = "word " * 2_000
        for number in range(4):
            await rig.ask(post(CHAT, chat(f"{number} {text}")))
        blocks = {row.name: row.index_blocks for row in rig.app.dispatcher.backends(0.0)}
        assert blocks["a"]
        assert blocks["b"]
        assert 'backend="a"' in rig.metrics()

        listed(tmp_path / "backends.yaml", b=b)
        await are_up(rig, "b")
        assert 'backend="a"' not in rig.metrics()
        assert [row.name for row in rig.app.dispatcher.backends(0.0)] == ["b"]
        await eventually(lambda: not tasks_of("a"), LONG_S)

        listed(tmp_path / "backends.yaml", a=a, b=b)  # it comes back and knows nothing
        await are_up(rig, "a", "b")
        rows = {row.name: row.index_blocks for row in rig.app.dispatcher.backends(0.0)}
        assert (rows["a"], rows["b"] > 0) == (0, True)
        assert await asked_of(rig, 4) == {"a", "b"}


async def test_r29_a_rolling_update_under_load_costs_nobody_an_answer(tmp_path: Path) -> None:
    async def ask_on(rig: Rig, done: asyncio.Event, who: int) -> list[int]:
        statuses: list[int] = []
        while not done.is_set():
            body = chat(f"{who}", stream=bool(len(statuses) % 2))
            statuses.append((await rig.ask(post(CHAT, body))).status)
        return statuses

    async with (
        engines(*[ok_chat] * 6) as all_six,
        found_in(tmp_path, v0=all_six[0], v1=all_six[1], v2=all_six[2]) as rig,
    ):
        serving_now = {f"v{number}": all_six[number] for number in range(3)}
        await are_up(rig, *serving_now)
        done = asyncio.Event()
        load = [asyncio.ensure_future(ask_on(rig, done, who)) for who in range(4)]
        for number in range(3):  # one new, then one old less, as a Deployment does
            serving_now[f"v{number + 3}"] = all_six[number + 3]
            listed(tmp_path / "backends.yaml", **serving_now)
            await are_up(rig, *serving_now)
            gone = serving_now.pop(f"v{number}")
            listed(tmp_path / "backends.yaml", **serving_now)
            await are_up(rig, *serving_now)
            await eventually(lambda gone=gone: not gone.open_connections, LONG_S)  # type: ignore[misc]
            await gone.stop()
        finished = len(all_six[5].received)
        await eventually(lambda: len(all_six[5].received) > finished, LONG_S)
        done.set()
        statuses = [status for one in load for status in await one]

    assert set(statuses) == {200}


async def test_while_the_list_is_empty_requests_wait(tmp_path: Path) -> None:
    async with engines(ok_chat) as (a,), found_in(tmp_path) as rig:
        asked = asyncio.ensure_future(rig.ask(post(CHAT, chat())))
        await eventually(lambda: bool(rig.metric("gateway_queue_depth")), LONG_S)
        listed(tmp_path / "backends.yaml", a=a)

        assert (await asked).status == 200


async def test_a_broken_file_keeps_the_backends_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixgate.discovery")
    file = tmp_path / "backends.yaml"
    async with engines(ok_chat, ok_chat) as (a, b), found_in(tmp_path, a=a) as rig:
        await are_up(rig, "a")
        (status,) = rig.app._discovery.statuses()
        assert (status.name, status.kind, status.backends, status.failing) == (
            *("pool", "file", 1),
            False,
        )
        for half in (
            f"- {{name: a, url: '{a.url}'}}\n- {{na",
            f"- {{name: a, url: '{a.url}'}}\n- {{n",
        ):
            failures = rig.app._discovery.statuses()[0].failures
            file.write_text(half)
            await eventually(
                lambda had=failures: rig.app._discovery.statuses()[0].failures > had,  # type: ignore[misc]
                LONG_S,
            )
        assert rig.app._discovery.statuses()[0].failing
        assert rig.metric("gateway_discovery_failing") == 1
        assert rig.metric("gateway_discovery_backends") == 1
        assert rig.metric("gateway_discovery_failures_total") >= 2
        assert await asked_of(rig, 2) == {"a"}
        listed(file, a=a, b=b)
        await are_up(rig, "a", "b")
        assert rig.metric("gateway_discovery_failing") == 0

    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "keeping the 1 known" in line]) == 1
    assert "backends of pool are found again" in told


async def test_names_services_and_files_may_be_mixed(tmp_path: Path) -> None:
    slices = [slice_of("s", "pod-1=127.0.0.1")]
    async with (
        engines(*[ok_chat] * 4) as (static, named, pod, filed),
        naming() as names,
        serving(ApiServer(slices)) as api,
    ):
        slices[0]["ports"] = [{"name": "http", "port": pod.port}]
        names.records[SRV, "SRV"] = [f"0 0 {named.port} one.internal."]
        names.has("one.internal.", "127.0.0.1")
        listed(tmp_path / "backends.yaml", filed=filed)
        config = tmp_path / "g.yaml"
        config.write_text(f"""\
models:
  - name: m
    backends:
      - {{name: static, url: "{static.url}"}}
      - {{name: srv, srv: {SRV.rstrip(".")}}}
      - {{name: pods, kubernetes: {{service: vllm, namespace: prod, port: http}}}}
      - {{name: file, file: "{tmp_path}/backends.yaml"}}
discovery:
  nameservers: ["127.0.0.1:{names.port}"]
  kubernetes: {{url: "{api.url}", token_file: null, ca_file: null}}
""")
        async with gateway([], QUICK, str(config), None) as rig:
            await eventually(lambda: len(up(rig)) == 4, LONG_S)
            assert {"static", "pod-1", "filed"} < up(rig)
            assert len(await asked_of(rig, 8)) == 4
            assert "127.0.0.1" not in rig.metrics()

            names.records[SRV, "SRV"] = ["0 0 0 ."]
            api.events.put_nowait(event("DELETED", slices[0]))
            await are_up(rig, "static", "filed")


@pytest.mark.parametrize("wrong", [99_999, -1, True, 0])
async def test_addresses_that_can_be_none_cost_nobody_else_anything(
    wrong: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the start, nor the backends that are known, nor those told of beside them."""
    async with engines(ok_chat) as (pod,), serving(ApiServer()) as api:
        bad = slice_of("bad", "pod-9=127.0.0.1", ports=[{"name": "http", "port": wrong}])
        good = slice_of("good", "pod-1=127.0.0.1", ports=[{"name": "http", "port": pod.port}])
        api.slices = [bad]
        config = tmp_path / "g.yaml"
        config.write_text(f"""\
models: [{{name: m, backends: [{{name: p, kubernetes: {{service: s, namespace: n, port: http}}}}]}}]
discovery: {{kubernetes: {{url: "{api.url}", token_file: null, ca_file: null}}}}
""")
        async with gateway([], QUICK, str(config), None) as rig:
            assert "none of 1 has an address that can be one" in caplog.text
            api.events.put_nowait(event("ADDED", good))
            await are_up(rig, "pod-1")
            assert "backends of p: 1 without a usable address are left out" in caplog.text
            api.events.put_nowait(event("DELETED", good))
            await eventually(lambda: rig.app._discovery.statuses()[0].failing, LONG_S)
            assert up(rig) == {"pod-1"}
            assert len(await asked_of(rig, 2)) == 1


async def test_what_cannot_be_taken_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """The core's books and the addresses change together or not at all."""
    async with engines(ok_chat) as (one,), found_in(tmp_path, one=one) as rig:
        await are_up(rig, "one")
        app = rig.app
        odd = BackendConfig(name="odd", url="http://127.0.0.1:x")
        with pytest.raises(ValueError, match="Port"):
            app._apply(app.config, dict.fromkeys(app._found, (odd,)))
        assert [backend.name for backend in app.dispatcher.backends(0.0)] == ["one"]
        assert len(await asked_of(rig, 2)) == 1


async def test_a_reload_that_waits_for_its_files_holds_up_no_new_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a configuration on a network mount that does not answer any more."""
    go = threading.Event()
    read = load

    def hanging(*given: Any, **more: Any) -> Any:
        assert go.wait(LONG_S)
        return read(*given, **more)

    async with engines(ok_chat, ok_chat) as (one, two), found_in(tmp_path, one=one) as rig:
        await are_up(rig, "one")
        monkeypatch.setattr(source, "load", hanging)
        monkeypatch.setattr(reloaded, "_SLOW_S", 0.0)
        reload = asyncio.ensure_future(rig.app.reload())
        try:
            await eventually(
                lambda: "reading the configuration takes longer" in caplog.text, LONG_S
            )
            listed(tmp_path / "backends.yaml", one=one, two=two)
            await are_up(rig, "one", "two")
            assert await asked_of(rig, 4) == {"one", "two"}
            listed(tmp_path / "backends.yaml", two=two)
            await are_up(rig, "two")
            assert not reload.done()
        finally:
            go.set()
        assert (await reload).ok
        assert up(rig) == {"two"}
        assert await asked_of(rig, 2) == {"two"}
        assert rig.metric("gateway_reloads_total", result="ok") == 1


async def test_a_source_that_says_nothing_delays_the_start_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()

    def slow(_: str) -> Any:
        assert go.wait(LONG_S)
        return (BackendConfig(url="http://h:1"),)

    monkeypatch.setattr("gateway.discovery.files.read_members", slow)
    config = Config(backends=[BackendConfig(name="pool", file="/slow")])
    found = Discovery(random.Random(1), {})
    try:
        async with found.planned(config, within_s=0.01) as members:
            assert members == {"file:/slow": ()}
    finally:
        go.set()
    await asyncio.wait_for(found.changed.wait(), LONG_S)
    assert [member.url for member in found.found()["file:/slow"]] == ["http://h:1"]
    await found.stop()


async def test_a_fault_in_a_source_is_logged_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    calls = []

    def broken(path: str) -> Any:
        calls.append(path)
        if len(calls) == 1:
            raise ZeroDivisionError
        return (BackendConfig(url="http://h:1"),)

    monkeypatch.setattr(discovery, "_AFTER_FAULT_S", 0.01)
    monkeypatch.setattr("gateway.discovery.files.read_members", broken)
    config = Config(backends=[BackendConfig(name="pool", file=str(tmp_path / "b"))])
    found = Discovery(random.Random(1), {})
    async with found.planned(config):
        pass
    assert found.statuses()[0].failing
    await asyncio.wait_for(found.changed.wait(), LONG_S)

    assert [member.url for member in found.found()[f"file:{tmp_path / 'b'}"]] == ["http://h:1"]
    assert "a fault in looking for the backends of pool" in caplog.text
    await found.stop()


async def refuse(found: Discovery, config: Config) -> None:
    async with found.planned(config) as members:
        assert all(members.values())
        raise ValueError("refused")


async def test_a_plan_that_fails_leaves_the_sources_as_they_were(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_text("- {url: 'http://h:1'}")
    before = Config(backends=[BackendConfig(name="pool", file=str(first))])
    after = Config(
        backends=[BackendConfig(name="other", file=str(second))],
        discovery=DiscoveryConfig(interval_s=1),
    )
    found = Discovery(random.Random(1), {})
    async with found.planned(before) as members:
        assert set(members) == {f"file:{first}"}
    with pytest.raises(ValueError, match="refused"):
        await refuse(found, after)

    assert set(found.found()) == {f"file:{first}"}
    running = [task for task in asyncio.all_tasks() if task.get_name() == "discovery:other"]
    assert all(task.cancelling() for task in running)
    async with found.planned(after):
        pass
    assert [status.name for status in found.statuses()] == ["other"]
    await found.stop()


async def test_more_backends_than_there_are_slots_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery, "MAX_SLOTS", 1)
    file = tmp_path / "backends"
    file.write_text("- {url: 'http://h:1'}\n- {url: 'http://h:2'}\n")
    found = Discovery(random.Random(1), {})
    async with found.planned(Config(backends=[BackendConfig(name="p", file=str(file))])):
        pass

    assert found.statuses()[0].failing
    assert found.found() == {f"file:{file}": ()}
    await found.stop()
