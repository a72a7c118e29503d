"""Thousands of open streams on one gateway process: errors, memory per stream, loop lag."""

import asyncio
import re
import sys
import time
from dataclasses import dataclass
from urllib.request import urlopen

import uvloop

from gateway.sim.ports import free_port
from loadtest.bench import load, peers
from loadtest.bench.peers import Peer

SECONDS = 12
PACE_US = 1_000_000
OPEN_PER_S = 1500  # a backlog of SYNs is the kernel's business, not the gateway's


@dataclass
class Many:
    """What one run saw."""

    streams: int
    errors: int
    bytes_per_stream: float
    worst_lag_ms: float
    cpu_share: float


def measure(streams: int, upstreams: list[int], core: int) -> Many | None:
    """Open `streams` streams of one event per second, hold them, read the gateway's figures."""
    port, admin = free_port(), free_port()
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "--port", str(port)]
    command += ["--admin-port", str(admin), "--set", "log.requests=false"]
    for upstream in upstreams:
        command += ["--backend", f"http://127.0.0.1:{upstream}"]
    gateway = peers.spawn("radixgate-many", command, port, core)
    if gateway is None:
        return None
    try:
        time.sleep(2)
        return uvloop.run(_hold(gateway, admin, streams))
    finally:
        gateway.stop()


async def _hold(gateway: Peer, admin: int, streams: int) -> Many:
    loop = asyncio.get_running_loop()
    options = b',"stream":true,"max_tokens":%d,"seed":%d' % (SECONDS, PACE_US)
    requests = [load.request(load.conversation(1024, 1, i, options)) for i in range(256)]
    before = gateway.rss_bytes()
    tally = load.Tally()
    clients = []
    for number in range(streams):
        body = [requests[number % len(requests)]]
        _, client = await loop.create_connection(
            lambda body=body: load.Client(body, 1, tally),  # type: ignore[misc]
            "127.0.0.1",
            gateway.port,
        )
        clients.append(client)
        if number % 100 == 99:
            await asyncio.sleep(100 / OPEN_PER_S)
    cpu, at = gateway.cpu_s(), loop.time()
    await asyncio.sleep(SECONDS / 2)
    share = (gateway.cpu_s() - cpu) / (loop.time() - at)
    held = gateway.rss_bytes()
    lag = await asyncio.to_thread(_lag, admin)
    await asyncio.gather(*(client.done for client in clients))
    return Many(streams, tally.errors, (held - before) / streams, 1000 * lag, share)


def _lag(admin: int) -> float:
    with urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.search(r"^gateway_loop_lag_seconds (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else float("nan")
