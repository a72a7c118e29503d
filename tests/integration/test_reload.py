"""Reload: whole or not at all, told in full, cutting nobody off, and leaving nothing behind."""

import asyncio
import gc
import io
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.config.secrets import hash_key
from tests.integration.rig import (
    Backend,
    Conn,
    Received,
    Rig,
    chat,
    chat_event,
    eventually,
    gateway,
    get,
    post,
)

CHAT = "/v1/chat/completions"
LONG_S = 60.0
NEVER = ("reload.watch=false",)
QUICK = ("reload.interval_s=0.02",)


@asynccontextmanager
async def engines(*made: Backend) -> AsyncIterator[list[Backend]]:
    for backend in made:
        await backend.start()
    try:
        yield list(made)
    finally:
        for backend in made:
            await backend.stop()
    assert not [failure for backend in made for failure in backend.failures]


@asynccontextmanager
async def configured(file: Path, *settings: str) -> AsyncIterator[Rig]:
    async with gateway([], settings, str(file), None) as rig:
        yield rig


def model_of(**backends: Backend) -> str:
    rows = ", ".join(f"{{name: {name}, url: '{one.url}'}}" for name, one in backends.items())
    return f"models: [{{name: m, backends: [{rows}]}}]\n"


def reloads(rig: Rig, result: str) -> float:
    return rig.metric("gateway_reloads_total", result=result)


async def posted(rig: Rig) -> tuple[int, dict[str, Any]]:
    """Reload by the admin listener."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{rig.app.admin_url}/reload") as answer,
    ):
        return answer.status, orjson.loads(await answer.read())


async def test_d61_an_invalid_file_changes_nothing_and_the_next_valid_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "g.yaml"
    async with engines(Backend()) as (a,):
        good = model_of(a=a)
        file.write_text(good)
        async with configured(file, *QUICK) as rig:
            file.write_text(f"{good}routing: {{policy: nonsense}}\nmodels: [")
            await eventually(lambda: reloads(rig, "failed") == 1, LONG_S)
            assert rig.app.dispatcher.policy == "cost"
            assert (await rig.ask(post(CHAT, chat()))).status == 200

            file.write_text(f"{good}routing: {{policy: random}}\n")
            await eventually(lambda: rig.app.dispatcher.policy == "random", LONG_S)
            assert (await rig.ask(post(CHAT, chat()))).header("x-gateway-policy") == "random"
            assert (reloads(rig, "ok"), reloads(rig, "failed")) == (1, 1)

    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"configuration not reloaded: {file}:" in errors[0].getMessage()


async def test_a_reload_by_hand_is_not_repeated_for_the_changed_file(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    async with engines(Backend()) as (a,):
        file.write_text(model_of(a=a))
        async with configured(file, *QUICK) as rig:
            file.write_text(model_of(a=a) + "routing: {policy: random}\n")
            assert (await rig.app.reload()).ok
            file.write_text(model_of(a=a) + "routing: {policy: round_robin}\n")
            await eventually(lambda: rig.app.dispatcher.policy == "round_robin", LONG_S)
            assert reloads(rig, "ok") == 2


async def test_what_a_reload_newly_warns_of_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "g.yaml"
    async with engines(Backend()) as (a,):
        good = model_of(a=a)
        blind = 'backends: [{name: a, kv_events: "tcp://127.0.0.1:1"}]\n'
        file.write_text(good)
        async with configured(file, *NEVER) as rig:
            file.write_text(good + blind)
            assert (await rig.app.reload()).ok
            assert (await rig.app.reload()).ok
            file.write_text(good)
            assert (await rig.app.reload()).ok
    told = [text for text in caplog.messages if "kv_events: not read" in text]
    assert len(told) == 1


async def test_r39_a_reload_of_weights_buckets_and_backends_drops_no_stream(
    tmp_path: Path,
) -> None:
    go = asyncio.Event()

    async def held(conn: Conn, _: Received) -> None:
        await conn.sse(chat_event("a"))
        await go.wait()
        await conn.chunk(chat_event("b"))
        await conn.chunk(b"data: [DONE]\n\n")
        await conn.end()

    file = tmp_path / "g.yaml"
    async with engines(Backend(held), Backend(held), Backend()) as (a, b, c):
        weights = "routing: {policy: weights, weights: {prefix: 3, queue: 3, kv: 2}}\n"
        file.write_text(model_of(a=a, b=b) + weights)
        async with configured(file, *NEVER) as rig:
            clients = [await rig.connect() for _ in range(4)]
            for client in clients:
                await client.send(post(CHAT, chat(stream=True)))
                await client.head()
                assert b'"a"' in await client.chunk()

            # What any answer costs, whoever gives it, is not earned again within the test.
            bucket = "{tokens_per_second: 0.01, burst_tokens: 10}"
            file.write_text(
                model_of(b=b, c=c)
                + "routing: {policy: weights, weights: {prefix: 3, queue: 5, kv: 2}}\n"
                + f"classes: {{all: {{bucket: {bucket}, max_wait_s: 1}}}}\n"
                + "index: {block_bytes: 512}\nlimits: {streams: 4}\n"
            )
            status, told = await posted(rig)
            assert status == 200
            assert [change["path"] for change in told["changes"]] == [
                "models[m].backends[a]",
                "models[m].backends[c]",
                "routing.weights.queue",
                "classes.all",
                "index.block_bytes",
                "limits.streams",
            ]
            assert rig.app._by_bytes._block_bytes == 512
            go.set()
            for client in clients:
                rest = b"".join([part async for part in chunks_of(client.chunk)])
                assert rest.endswith(b"data: [DONE]\n\n")
            await rig.settled()
            assert rig.outcomes().keys() == {"ok"}
            big = post(CHAT, chat("word " * 3_000))
            first, second = await rig.ask(big), await rig.ask(big)
            assert first.header("x-gateway-class") == "all"
            assert (first.status, second.status) == (200, 429)  # the bucket is in force


async def chunks_of(read: Callable[[], Any]) -> AsyncIterator[bytes]:
    while part := await read():
        yield part


async def test_a_reload_tells_what_changed_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ENGINE_KEY", "first-secret")
    file = tmp_path / "g.yaml"
    hashes = [hash_key("one"), hash_key("two"), hash_key("three")]
    async with engines(Backend()) as (a,):
        model = model_of(a=a).replace("}]", ", api_key_env: ENGINE_KEY}]", 1)
        file.write_text(f"{model}keys: [{{name: k, sha256: {hashes[0]}}}]\n")
        async with configured(file, *NEVER) as rig:
            monkeypatch.setenv("ENGINE_KEY", "second-secret")
            file.write_text(
                f"{model}keys: [{{name: k, sha256: {hashes[1]}}}, "
                f"{{name: l, sha256: {hashes[2]}, tokens_per_minute: 5}}]\n"
                "timeouts: {idle_s: 5}\nlisten: {host: 127.0.0.9}\n"
            )
            status, told = await posted(rig)
            assert status == 200
            assert told["needs_restart"] == ["listen.host"]
            assert {
                change["path"]: (change["old"], change["new"]) for change in told["changes"]
            } == {
                "listen.host": ("127.0.0.1", "127.0.0.9"),
                "keys[k].sha256": ("'***'", "'***'"),
                "keys[l]": (None, "{name: l, sha256: '***', tokens_per_minute: 5}"),
                "timeouts.idle_s": ("600.0", "5.0"),
                "key of backend a": ("***", "***"),
            }
            await rig.ask(post(CHAT, chat(), "authorization: Bearer two"))
            assert a.received[-1].header("authorization") == "Bearer second-secret"
            assert await posted(rig) == (200, {"result": "ok", "needs_restart": ["listen.host"]})

    assert "changed timeouts.idle_s: 600.0 -> 5.0" in caplog.text
    assert "these take effect with the next start: listen.host" in caplog.text
    for secret in (*hashes, "first-secret", "second-secret"):
        assert secret not in caplog.text


async def test_trace_and_usage_log_begin_move_and_end_with_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"

    def lines(name: str) -> list[str]:
        path = tmp_path / name
        return path.read_text().splitlines() if path.exists() else []

    def journals(record: str, usage: str, **more: int) -> str:
        limits = "".join(f", {key}: {value}" for key, value in more.items())
        return f"record: {tmp_path / record}\nusage_log: {{path: {tmp_path / usage}{limits}}}\n"

    async with engines(Backend()) as (a,):
        file.write_text(model_of(a=a))
        async with configured(file, *NEVER) as rig:

            async def reload_with(text: str) -> bool:
                file.write_text(model_of(a=a) + text)
                ok = (await rig.app.reload()).ok
                await rig.ask(post(CHAT, chat()))
                await rig.settled()
                return ok

            assert await reload_with("")
            assert await reload_with(journals("r1", "u1"))
            assert await reload_with(journals("r2", "u2"))
            assert (len(lines("r1")), len(lines("u1"))) == (1, 1)  # closed: it is all there
            usage = rig.app._journals.usage
            assert await reload_with(journals("r2", "u2", files=2))
            assert rig.app._journals.usage is usage
            assert not await reload_with(f"record: {tmp_path}/none/r\n")
            assert await reload_with("")
            assert (len(lines("r2")), len(lines("u2"))) == (3, 3)
            assert rig.handler.recorder is rig.app.telemetry.usage_log is None
            assert threads_of("recorder", "usage-log") == []


async def test_the_admin_listener_reads_bodies_up_to_the_limit_in_force(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    body = b'{"model": "m", "messages": [], "padding": "' + b"x" * 1_500_000 + b'"}'
    async with engines(Backend()) as (a,):
        file.write_text(model_of(a=a))
        async with configured(file, *NEVER) as rig, aiohttp.ClientSession() as session:

            async def explained() -> int:
                url = f"{rig.app.admin_url}/explain?path=/v1/chat/completions"
                async with session.post(url, data=io.BytesIO(body)) as answer:
                    return answer.status

            before = await explained()
            file.write_text(model_of(a=a) + "limits: {body_mib: 1}\n")
            assert (await rig.app.reload()).ok
            assert (before, await explained()) == (200, 413)


def threads_of(*names: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in names]


async def test_one_block_size_replaces_another_and_prefixes_are_known_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "g.yaml"
    async with engines(Backend()) as (a,):
        file.write_text(model_of(a=a))
        async with configured(file, *NEVER) as rig:
            text = "word " * 2_000

            async def hit() -> int:
                answer = await rig.ask(post(CHAT, chat(text)))
                return int((answer.header("x-gateway-prefix") or "").partition("/")[0])

            assert await hit() == 0
            assert await hit() > 0
            file.write_text(model_of(a=a) + "index: {block_bytes: 128}\n")
            assert (await rig.app.reload()).ok
            assert await hit() == 0
            assert await hit() > 0


async def test_twenty_reloads_leave_tasks_sockets_and_memory_as_they_were(
    tmp_path: Path,
) -> None:
    file = tmp_path / "g.yaml"
    async with engines(Backend(), Backend()) as (a, b):
        texts = [
            model_of(a=a) + "routing: {policy: round_robin}\n",
            model_of(a=a, b=b) + "routing: {policy: round_robin}\n"
            f"backends: [{{name: f, file: '{tmp_path}/found.yaml'}}]\n"
            f"usage_log: {{path: '{tmp_path}/usage'}}\n",
        ]
        (tmp_path / "found.yaml").write_text("[]")
        file.write_text(texts[0])
        async with configured(file, *NEVER) as rig:

            async def twice(asked: int) -> None:
                for text in (texts[1], texts[0]):
                    file.write_text(text)
                    assert (await rig.app.reload()).ok
                    for _ in range(asked):
                        assert (await rig.ask(post(CHAT, chat()))).status == 200
                await eventually(lambda: not b.open_connections, LONG_S)

            for _ in range(3):
                await twice(2)
            before = await held_by(rig)
            for _ in range(5):
                await twice(2)
            used = await held_by(rig)  # also remembers ten decisions more
            for _ in range(10):
                await twice(0)
            after = await held_by(rig)

    assert before[:2] == used[:2] == after[:2]
    assert after[2] - used[2] < 100  # a configuration alone is some 400 objects


async def held_by(rig: Rig) -> tuple[list[str], int, int]:
    """Return the tasks, the open descriptors and the number of objects, once all is at rest."""
    await rig.at_rest()
    for upstream in rig.app._upstreams.all():
        upstream.pool.expire(float("inf"))
    await eventually(lambda: not any("stop" in name for name in running()), LONG_S)
    gc.collect()
    return running(), await rested(open_descriptors), len(gc.get_objects())


def running() -> list[str]:
    names = (task.get_name() for task in asyncio.all_tasks())
    return sorted(name for name in names if not name.startswith("Task-"))  # the backends' own


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def rested(count: Callable[[], int]) -> int:
    """Return a count once it is the smallest of many looks: pollers open and close sockets."""
    looks = []
    for _ in range(50):
        looks.append(count())
        await asyncio.sleep(0.01)
    return min(looks)


class Described(Backend):
    """A backend that describes its models as vLLM does."""

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "owned_by": "vllm",
                "root": f"org/{name}",
                "parent": "base" if name == "lora" else None,
                "max_model_len": 4096,
            }
            for name in self.models
        ]

    async def _builtin(self, conn: Conn, request: Received) -> bool:
        if request.method == "GET" and request.target == "/v1/models":
            await conn.json({"object": "list", "data": self.described()})
            return True
        return await super()._builtin(conn, request)


async def test_d63_models_are_those_of_all_backends_whatever_one_does(tmp_path: Path) -> None:
    one, two, dead = Described(models=["base"]), Described(models=["base", "lora"]), Described()
    file = tmp_path / "g.yaml"
    async with engines(one, two):
        urls = [f"{{name: {n}, url: '{u}'}}" for n, u in (("one", one.url), ("two", two.url))]
        await dead.start()
        await dead.stop()
        urls.append(f"{{name: dead, url: '{dead.url}'}}")
        keys = [
            f"{{name: all, sha256: {hash_key('all')}}}",
            f"{{name: some, sha256: {hash_key('some')}, models: [base]}}",
        ]
        file.write_text(f"backends: [{', '.join(urls)}]\nkeys: [{', '.join(keys)}]\n")
        async with configured(file, *NEVER) as rig:

            async def models(key: str) -> dict[str, Any]:
                answer = await rig.ask(get("/v1/models", f"authorization: Bearer {key}"))
                assert answer.status == 200
                return {entry["id"]: entry for entry in answer.json["data"]}

            everything = await models("all")
            assert set(everything) == {"base", "lora"}
            assert set(await models("some")) == {"base"}
            lora = everything["lora"]
            assert (lora["root"], lora["parent"], lora["max_model_len"]) == (
                *("org/lora", "base"),
                4096,
            )
            asked = {**chat(), "model": "lora"}
            for _ in range(4):
                answer = await rig.ask(post(CHAT, asked, "authorization: Bearer all"))
                assert answer.header("x-gateway-backend") == "two"
