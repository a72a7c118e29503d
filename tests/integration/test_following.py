"""The whole way: simulated replicas that publish, the gateway that reads them, clients that ask."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import App
from gateway.core import exactness
from gateway.sim.http import listen
from gateway.sim.publish import Publisher
from gateway.sim.replica import Replica
from gateway.source import Source
from tests.integration.kv_rig import ANY, until
from tests.integration.sim_rig import TINY
from tests.tokenizer_kit import write_tokenizer

SMALL = replace(TINY, block_tokens=16, engine=replace(TINY.engine, kv_tokens=16_000))


class Simulated:
    """A replica of model `m` that publishes; `restart` puts another process in its place."""

    def __init__(self, profile: Any = SMALL) -> None:
        self._profile = profile
        self._port = 0
        self._endpoints = (ANY, ANY)

    async def start(self) -> "Simulated":
        self.publisher = Publisher(*self._endpoints)
        self._endpoints = (self.publisher.endpoint, self.publisher.replay_endpoint or "")
        self.replica = Replica(
            self._profile,
            model="m",
            started_at=time.time(),  # noqa: TID251 - a date
            time_scale=0.01,
            publisher=self.publisher,
        )
        self._runner, self._port = await listen(self.replica, port=self._port)
        return self

    async def stop(self) -> None:
        self.replica.close()
        await self._runner.cleanup()
        self.publisher.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def cached(self) -> int:
        """Blocks in its cache."""
        return len(self.replica.engine.pool.counts())

    @property
    def yaml(self) -> str:
        events, replay = self._endpoints
        return f"{{url: 'http://127.0.0.1:{self._port}', kv_events: '{events}', kv_replay: '{replay}'}}"


@dataclass
class Stand:
    app: App
    session: aiohttp.ClientSession

    async def ask(self, ids: list[int], **fields: Any) -> tuple[int, int, str]:
        """Send a prompt of token ids; (predicted hit, reported hit, backend)."""
        body = {"model": "m", "prompt": ids, "max_tokens": 4, **fields}
        async with self.session.post(self.app.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
            predicted = int(answer.headers["x-gateway-prefix"].split("/")[0])
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            return predicted, cached, answer.headers["x-gateway-backend"]

    async def explain(self, ids: list[int]) -> list[dict[str, Any]]:
        url = self.app.admin_url + "/explain?path=/v1/completions"
        async with self.session.post(url, json={"model": "m", "prompt": ids}) as answer:
            rows: list[dict[str, Any]] = (await answer.json())["backends"]
            return rows

    async def metrics(self) -> str:
        async with self.session.get(self.app.admin_url + "/metrics") as answer:
            return await answer.text()

    def rows(self) -> list[Any]:
        return [row.kv_events for row in self.app.dispatcher.backends(self.app._clock())]

    def exact(self) -> bool:
        return all(row.mode == "exact" for row in self.rows())


@asynccontextmanager
async def stand(tmp_path: Path, *backends: str, more: str = "") -> AsyncIterator[Stand]:
    file = tmp_path / "gateway.yaml"
    tokenizer = write_tokenizer("llama3", tmp_path)
    listed = ", ".join(backends)
    model = f"{{name: m, tokenizer: '{tokenizer}', backends: [{listed}]}}"
    file.write_text(f"models: [{model}]\n{more}")
    source = Source(str(file), (), ("listen.port=0", "admin.port=0", "poll.interval_s=0.05"))
    app = App(source, source.load())
    await app.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Stand(app, session)
    finally:
        await app.stop()


@pytest.fixture
async def simulated() -> AsyncIterator[Simulated]:
    made = await Simulated().start()
    yield made
    await made.stop()


def ids(seed: int, count: int = 640) -> list[int]:
    return random.Random(seed).choices(range(1000, 100_000), k=count)


async def test_every_hit_is_predicted_to_the_token(
    tmp_path: Path, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds a third of what is asked for: it evicts all the time."""
    monkeypatch.setattr(exactness, "GRACE_S", -1.0)  # the events are waited for
    rng = random.Random(1)
    prompts = [ids(seed) for seed in range(75)]
    async with stand(tmp_path, simulated.yaml) as at:
        await until(at.exact)
        seen = []
        for _ in range(120):
            prompt = prompts[min(rng.randrange(75), rng.randrange(75))]
            seen.append((await at.ask(prompt + ids(rng.randrange(10**6), 40)))[:2])
            await until(lambda: at.rows()[0].blocks == simulated.cached)

        assert [predicted for predicted, _ in seen] == [cached for _, cached in seen]
        assert 0.1 < sum(cached for _, cached in seen) / (680 * len(seen)) < 0.9


async def test_what_was_never_sent_through_the_gateway_is_known(
    tmp_path: Path, simulated: Simulated
) -> None:
    other = await Simulated().start()
    try:
        async with stand(tmp_path, other.yaml, simulated.yaml) as at:
            await until(at.exact)
            url = simulated.yaml.split("'")[1] + "/v1/completions"
            body = {"model": "m", "prompt": ids(7), "max_tokens": 4}
            async with at.session.post(url, json=body) as answer:
                assert answer.status == 200
            await until(lambda: at.rows()[1].blocks)

            rows = await at.explain(ids(7))
            assert [row["hit_tokens"] for row in rows] == [0, 624]
            assert [row["index"] for row in rows] == ["exact", "exact"]
            assert await at.ask(ids(7)) == (624, 624, "backend-2")
    finally:
        await other.stop()


async def test_a_cache_salt_shares_nothing(tmp_path: Path, simulated: Simulated) -> None:
    async with stand(tmp_path, simulated.yaml) as at:
        await until(at.exact)
        await at.ask(ids(1), cache_salt="one")
        await until(lambda: at.rows()[0].blocks)
        assert (await at.ask(ids(1), cache_salt="one"))[:2] == (624, 624)
        assert (await at.ask(ids(1), cache_salt="two"))[:2] == (0, 0)
        assert (await at.ask(ids(1)))[:2] == (0, 0)


async def test_status_and_metrics_tell_the_mode(tmp_path: Path, simulated: Simulated) -> None:
    plain = await Simulated().start()
    try:
        without = plain.yaml.partition(", kv_events")[0] + "}"
        async with stand(tmp_path, simulated.yaml, without) as at:
            await until(lambda: at.rows()[0].mode == "exact")
            await at.ask(ids(1))
            await at.ask(ids(2))
            async with at.session.get(at.app.admin_url + "/status") as answer:
                rows = (await answer.json())["models"][0]["backends"]
            text = await at.metrics()

        assert [row["kv_events"]["mode"] for row in rows] == ["exact", "off"]
        assert {"events", "gaps", "losses", "restarts", "blocks"} < rows[0]["kv_events"].keys()
        assert 'gateway_backend_index_exact{backend="backend-1"} 1' in text
        assert "# TYPE gateway_kv_events_total counter" in text
        assert 'gateway_backend_index_exact{backend="backend-2"}' not in text
    finally:
        await plain.stop()


async def test_a_replica_that_restarts_is_forgotten_and_followed_again(
    tmp_path: Path, simulated: Simulated
) -> None:
    async with stand(tmp_path, simulated.yaml) as at:
        await until(at.exact)
        await at.ask(ids(1))
        await until(lambda: at.rows()[0].blocks)
        await simulated.restart()
        await until(lambda: at.rows()[0].restarts == 1 and at.exact() and not at.rows()[0].blocks)
        assert (await at.explain(ids(1)))[0]["hit_tokens"] == 0

        await until(lambda: at.app.dispatcher.backends(at.app._clock())[0].up)
        await at.ask(ids(1))
        await until(lambda: at.rows()[0].blocks)
        assert (await at.explain(ids(1)))[0]["hit_tokens"] == 624


async def test_a_reload_keeps_a_feed_and_drops_one_no_longer_configured(
    tmp_path: Path, simulated: Simulated
) -> None:
    async with stand(tmp_path, simulated.yaml) as at:
        await until(at.exact)
        await at.ask(ids(1))
        await until(lambda: at.rows()[0].blocks)
        events = at.rows()[0].events
        assert (await at.app.reload()).ok
        assert at.exact()
        assert at.rows()[0].events == events

        file = tmp_path / "gateway.yaml"
        text = file.read_text()
        start, end = text.index(", kv_events"), text.index("}", text.index(", kv_events"))
        file.write_text(text[:start] + text[end:])
        assert (await at.app.reload()).ok
        assert at.rows()[0].mode == "off"
        assert (await at.explain(ids(1)))[0]["index"] == "approximate"
        assert (await at.explain(ids(1)))[0]["hit_tokens"] == 640  # as sent: it was never forgotten


async def test_without_pyzmq_a_configuration_with_events_is_refused(
    tmp_path: Path, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ValueError, match=r"`kv_events` needs the extra `events`"):
        async with stand(tmp_path, simulated.yaml):
            pass
