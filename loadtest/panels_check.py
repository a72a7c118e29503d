"""Asks a real Prometheus every query of the dashboards and alerts: `python -m loadtest.panels_check`.

Starts two simulated replicas, a gateway and Prometheus on loopback, sends them traffic for `--seconds`,
and prints what each query found. Needs the `prometheus` binary (`--prometheus`, or on the PATH); exits
with 1 when a query fails, or a panel's finds nothing that does not need what is not configured here.
"""

import argparse
import asyncio
import hashlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession

from gateway.app import App
from gateway.sim.http import listen
from gateway.sim.profiles import DEMO
from gateway.sim.replica import Replica
from gateway.source import Source
from tests.promql_kit import VARIABLES, of_alerts, of_boards

_KEY = "check"
_CONFIG = """\
listen: {{host: 127.0.0.1, port: 0}}
admin: {{host: 127.0.0.1, port: 0}}
routing: {{shadow: round_robin}}
models:
  - name: demo
    backends: [{backends}]
classes:
  coding: {{match: [{{path: /v1/messages}}]}}
  batch: {{match: [{{path: /v1/completions}}], bucket: {{tokens_per_second: 10, burst_tokens: 10}}}}
  chat: {{default: true}}
keys: [{{name: team, sha256: "{digest}"}}]
usage_log: {{path: "{folder}/usage.jsonl"}}
"""
_ABSENT = (  # need an engine with a tokenizer, or backends that are looked for
    "kv_event", "index_exact", "gateway_fallback_total", "gateway_discovery",
)  # fmt: skip


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[App]:
    """Run two replicas and a gateway before them."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            replica = Replica(DEMO, model="demo", started_at=1.0)
            runner, port = await listen(replica)
            stack.push_async_callback(runner.cleanup)
            stack.callback(replica.close)
            urls.append(f'{{url: "http://127.0.0.1:{port}"}}')
        digest = hashlib.sha256(_KEY.encode()).hexdigest()
        text = _CONFIG.format(backends=", ".join(urls), digest=digest, folder=folder)
        path = folder / "gateway.yaml"
        path.write_text(text)
        app = App(Source(str(path)), Source(str(path)).load())
        await app.start()
        stack.push_async_callback(app.stop)
        yield app


@asynccontextmanager
async def prometheus(binary: str, folder: Path, target: str) -> AsyncIterator[str]:
    """Run Prometheus, scraping `target` every second, and return its URL."""
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "radixgate", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yml"
    path.write_bytes(orjson.dumps(config))
    address = "127.0.0.1:19091"
    process = await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


async def traffic(app: App, session: ClientSession, seconds: float) -> None:
    """Send conversations that share their beginning until the time is over."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    headers = {"authorization": f"Bearer {_KEY}", "content-type": "application/json"}
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/nowhere")

    async def talk(number: int) -> None:
        turn = 0
        while loop.time() < until:
            turn += 1
            path = paths[(number + turn) % len(paths)]
            words = f"conversation {number % 3} " * (200 + 20 * (turn % 5))
            body: dict[str, Any] = {"model": "demo", "max_tokens": 20, "stream": turn % 3 > 0}
            body |= {"prompt": words} if "/completions" in path[3:15] else {}
            body |= {"messages": [{"role": "user", "content": words}]}
            if path.startswith("/v1/completions"):
                del body["messages"]
            async with session.post(
                app.url + path, data=orjson.dumps(body), headers=headers
            ) as got:
                await got.read()

    await asyncio.gather(*(talk(number) for number in range(6)), again(app, seconds))


async def again(app: App, seconds: float) -> None:
    """Reload in the middle of it."""
    await asyncio.sleep(seconds / 2)
    await app.reload()


async def ask(session: ClientSession, url: str, expr: str) -> str | list[dict[str, Any]]:
    """Return a query's series, or why it failed."""
    for name, value in {**VARIABLES, "$__rate_interval": "15s", "$__range": "30s"}.items():
        expr = expr.replace(name, value)
    async with session.get(f"{url}/api/v1/query", params={"query": expr}) as answer:
        found = orjson.loads(await answer.read())
    if found["status"] != "success":
        return str(found["error"])
    series: list[dict[str, Any]] = found["data"]["result"]
    return series


async def check(binary: str, seconds: float) -> int:
    """Run it all; return how many queries failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with fleet(folder) as app, ClientSession() as session:
            target = app.admin_url.removeprefix("http://")
            async with prometheus(binary, folder, target) as url:
                await traffic(app, session, seconds)
                for asked in (*of_boards(), *of_alerts()):
                    found = await ask(session, url, asked.expr)
                    quiet = asked.where.startswith("alert") or any(a in asked.expr for a in _ABSENT)
                    bad = isinstance(found, str) or (not found and not quiet)
                    failed += bad
                    print("FAILED" if bad else "ok", asked.where, shown(found), sep="\t")
    print(f"{failed} failed")
    return failed


def shown(found: str | list[dict[str, Any]]) -> str:
    """Return an answer in a few words."""
    if isinstance(found, str):
        return found
    values = ", ".join(f"{float(one['value'][1]):.4g}" for one in found[:4])
    return f"{len(found)} series: {values}"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"))
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    if args.prometheus is None:
        parser.error("no prometheus on the PATH: give --prometheus")
    return int(asyncio.run(check(args.prometheus, args.seconds)) > 0)


if __name__ == "__main__":
    sys.exit(main())
