"""Dashboards, alerts and hostile clients against the `/metrics` of a gateway that serves."""

import asyncio
import hashlib
import random
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import App
from gateway.core.exactness import EventSpec
from gateway.source import Source
from gateway.telemetry.families import FAMILIES
from tests.integration.rig import closed, post, running
from tests.integration.sim_rig import Live, live_replica
from tests.promql_kit import VALUES, Shown, Unknown, check, of_alerts, of_boards

CONFIG = """\
listen: {{host: 127.0.0.1, port: 0}}
admin: {{host: 127.0.0.1, port: 0}}
poll: {{interval_s: 0.05}}
routing: {{shadow: round_robin}}
models:
  - name: tiny
    backends:
      - {{name: a, url: "{a}"}}
      - {{name: pool, file: "{listed}"}}
classes:
  coding: {{match: [{{path: /v1/messages}}, {{tools: true}}]}}
  batch: {{match: [{{path: /v1/completions}}], bucket: {{tokens_per_second: 1, burst_tokens: 1}}}}
  chat: {{default: true}}
keys: [{{name: team, sha256: "{digest}"}}]
usage_log: {{path: "{usage}"}}
"""
KEY = "k-secret"


@asynccontextmanager
async def serving(a: Live, b: Live, folder: Path) -> AsyncIterator[App]:
    """Run a gateway, with all that adds families to its page, before two simulated replicas."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    listed = folder / "backends.json"
    listed.write_bytes(orjson.dumps([{"name": "b", "url": b.url}]))
    usage = folder / "usage.jsonl"
    text = CONFIG.format(a=a.url, listed=listed, digest=digest, usage=usage)
    path = folder / "gateway.yaml"
    path.write_text(text)
    source = Source(str(path))
    app = App(source, source.load())
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def talk(app: App, session: ClientSession) -> list[int]:
    """Send a bit of everything; return the statuses."""

    async def ask(path: str, body: object, key: str = KEY) -> int:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        async with session.post(app.url + path, data=orjson.dumps(body), headers=headers) as got:
            await got.read()
            return got.status

    words = [{"role": "user", "content": "the same prompt again " * 100}]
    streamed = {"model": "tiny", "messages": words, "stream": True, "max_tokens": 5}
    whole = {"model": "tiny", "messages": words, "max_tokens": 5}
    found = [await ask("/v1/chat/completions", streamed) for _ in range(4)]
    found += [await ask("/v1/chat/completions", whole)]
    found += [await ask("/v1/messages", whole)]
    found += [
        await ask("/v1/completions", {"model": "tiny", "prompt": "x " * 99, "max_tokens": 3})
        for _ in range(2)
    ]
    found += [await ask("/v1/chat/completions", whole | {"model": "no-such"})]
    found += [await ask("/v1/chat/completions", whole, key="wrong")]
    return found


async def test_every_query_finds_its_series_on_a_live_page(tmp_path: Path) -> None:
    async with (
        live_replica() as a,
        live_replica() as b,
        serving(a, b, tmp_path) as app,
        ClientSession() as session,
        asyncio.timeout(60),
    ):
        statuses = await talk(app, session)
        assert statuses == [200] * 7 + [429, 404, 401]
        assert (await app.reload()).ok
        app.dispatcher.follow("a", EventSpec("tiny", 1, 16))
        app.telemetry.fallback("unrenderable")  # what it takes a tokenizer to see
        app.telemetry.certificate("ok")
        app.telemetry.page.certificates = lambda: [("listener", "", 2e9)]
        async with session.get(f"{app.admin_url}/metrics") as answer:
            page = await answer.text()
    shown = Shown.of(page, VALUES)
    problems = []
    for asked in (*of_boards(), *of_alerts()):
        try:
            check(asked, shown)
        except Unknown as error:
            problems.append(f"{asked.where}: {error}")
    assert not problems
    types = {one.name: one.type for one in text_string_to_metric_families(page)}
    for family in FAMILIES:
        if not family.when:
            assert types[family.name.removesuffix("_total")] == family.kind


async def test_a_page_without_traffic_has_what_alerts_compare_with(tmp_path: Path) -> None:
    async with live_replica() as a, live_replica() as b, serving(a, b, tmp_path) as app:
        shown = Shown.of(app.telemetry.render().decode(), VALUES)
    for name in (
        "gateway_slo_seconds",
        "gateway_reloads_total",
        "gateway_errors_total",
        "gateway_file_dropped_requests_total",
        "gateway_backend_up",
        "gateway_queue_seconds_bucket",
        "gateway_pool_saturation_ratio",
    ):
        assert shown.series[name], name


# --- hostile labels


def hostile(rng: random.Random) -> bytes:
    """Return a request whose every name is a client's invention."""
    letters = string.ascii_letters + string.digits + "._-"

    def word(alphabet: str = letters) -> str:
        return "".join(rng.choices(alphabet, k=rng.randrange(1, 40)))

    anything = letters + ' "\\{},=~\n\téß漢'
    text = {"role": "user", "content": word(anything)}
    body = {"model": f"no-{word(anything)}", "messages": [text], "user": word(anything)}
    return post(
        "/v1/chat/completions",
        body,
        f"x-gateway-class: {word()}",
        f"authorization: Bearer {word()}",
        f"user-agent: {word()}",
        f"x-request-id: {word()}",
        f"x-gateway-session: {word()}",
    )


def series(page: str) -> set[str]:
    lines = (line for line in page.splitlines() if not line.startswith("#"))
    return {line.rpartition(" ")[0] for line in lines}


async def test_ten_thousand_invented_names_add_no_series() -> None:
    rng = random.Random(5)
    async with running(within_s=100) as rig:
        client = await rig.connect()

        async def send(count: int) -> None:
            """Send as many, ten at a time."""
            for _ in range(count // 10):
                await client.send(b"".join([hostile(rng) for _ in range(10)]))
                for _ in range(10):
                    assert (await client.answer()).status == 404

        await send(10)
        before = series(rig.metrics())
        await send(10_000)
        assert series(rig.metrics()) == before
        assert rig.metric("gateway_errors_total", code="model_not_found") == 10_010
        rig.clients.remove(client)
        await closed(client.writer)
