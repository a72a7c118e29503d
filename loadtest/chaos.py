"""`make chaos`: everything that goes wrong in a month, in ten minutes; nobody may lose an answer.

Simulated replicas are killed, restarted, frozen, slowed, made deaf, drained; their metrics are cut, the
configuration is reloaded (well and badly), the gateway itself restarted, under SDK and raw clients.
At the end every attempt of every client is held against the gateway's log and the replicas'
journals by its request id. Everything is on loopback and ends by itself; exit code 1 on any violation.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from loadtest.chaos_clients import Attempt, Saw, Traffic
from loadtest.chaos_fleet import GatewayProcess, ReplicaProcess, gauges, http

REPLICAS = 4
CLIENTS = 21
TIME_SCALE = 0.5
SPARED = 2  # replicas that nothing is done to at any moment
GROWTH_MAX = 1.25  # of memory within the gateway's last life, once it has warmed up
DESCRIPTORS_MAX = 20  # more than before the traffic: pools to backends

Act = Callable[[ReplicaProcess], Awaitable[None]]

# What the gateway's log may say of an attempt, by what its client saw.
_OUTCOMES: dict[Saw, set[str]] = {
    Saw.OK: {"ok"},
    Saw.IN_BAND: {"upstream_error", "upstream_truncated", "upstream_timeout"},
    Saw.CUT: {"upstream_error", "upstream_timeout"},
    Saw.LEFT: {"client_closed", "ok"},
    Saw.REFUSED: {
        *("rejected_rate", "rejected_full", "expired", "no_backend"),
        *("upstream_error", "upstream_timeout"),
    },
    Saw.UNANSWERED: set(),
}


@dataclass
class Chaos:
    """What is done to the fleet. `broken` are the replicas something is being done to.

    `asking` are those of them where that needs the gateway.
    """

    gateway: GatewayProcess
    replicas: list[ReplicaProcess]
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    asking: set[str] = field(default_factory=set)

    async def run(self, until: float) -> None:
        """Do one thing after the other, some at once, until the time is over; then mend all."""
        loop = asyncio.get_running_loop()
        asking: list[Act] = [self.drain, self.reload, self.remove, self.misconfigure]
        acts: list[Act] = [self.kill, self.terminate, self.freeze, self.slow, self.deafen]
        acts += [self.cut_metrics, *asking]
        next_restart = loop.time() + self.rng.uniform(4, 8)
        async with asyncio.TaskGroup() as group:
            while loop.time() < until:
                if loop.time() >= next_restart:
                    await self.restart_gateway()
                    next_restart = loop.time() + self.rng.uniform(15, 40)
                whole = [r for r in self.replicas if r.name not in self.broken]
                if len(whole) > SPARED:
                    act, replica = self.rng.choice(acts), self.rng.choice(whole)
                    self.broken.add(replica.name)
                    if act in asking:
                        self.asking.add(replica.name)
                    group.create_task(self._do(act, replica))
                await asyncio.sleep(self.rng.uniform(0.3, 2.0))

    async def _do(self, act: Act, replica: ReplicaProcess) -> None:
        self.done[act.__name__] += 1
        try:
            await act(replica)
        finally:
            self.broken.discard(replica.name)
            self.asking.discard(replica.name)

    async def _pause(self, least: float, most: float) -> None:
        await asyncio.sleep(self.rng.uniform(least, most))

    # -- what is done ------------------------------------------------------------------------

    async def kill(self, replica: ReplicaProcess) -> None:
        await replica.end(signal.SIGKILL)
        await self._pause(0.2, 3)
        await replica.start()

    async def terminate(self, replica: ReplicaProcess) -> None:
        await replica.end(signal.SIGTERM)
        await replica.start()

    async def freeze(self, replica: ReplicaProcess) -> None:
        replica.send(signal.SIGSTOP)
        await self._pause(0.5, 6)
        replica.send(signal.SIGCONT)

    async def slow(self, replica: ReplicaProcess) -> None:
        await replica.tell(delay_s=0.5)
        await self._pause(1, 6)
        await replica.tell(delay_s=0.0)

    async def deafen(self, replica: ReplicaProcess) -> None:
        await replica.tell(hole=True)
        await self._pause(1, 6)
        await replica.tell(hole=False)

    async def cut_metrics(self, replica: ReplicaProcess) -> None:
        await replica.tell(metrics=True)
        await self._pause(1, 6)
        await replica.tell(metrics=False)

    async def drain(self, replica: ReplicaProcess) -> None:
        await self._admin(f"/backends/{replica.name}/drain", {200})
        await self._pause(0.5, 4)
        await self._admin(f"/backends/{replica.name}/undrain", {200, 404})

    async def reload(self, _: ReplicaProcess) -> None:
        self.gateway.configure(
            self.replicas, policy=self.rng.choice(["cost", "weights", "lmetric"])
        )
        await self._admin("/reload", {200})

    async def remove(self, replica: ReplicaProcess) -> None:
        self.gateway.configure([r for r in self.replicas if r is not replica])
        await self._admin("/reload", {200})
        await self._pause(0.5, 3)
        self.gateway.configure(self.replicas)
        await self._admin("/reload", {200})

    async def misconfigure(self, _: ReplicaProcess) -> None:
        good = self.gateway.config.read_text()
        self.gateway.config.write_text(good + "\nnonsense: {\n")
        await self._admin("/reload", {400})
        self.gateway.config.write_text(good)

    async def restart_gateway(self) -> None:
        self.done["restart_gateway"] += 1
        while self.asking:  # noqa: ASYNC110 - what is under way needs the admin listener
            await asyncio.sleep(0.05)
        self.gateway.configure(self.replicas)
        code = await self.gateway.restart()
        if code != 0:
            self.violations.append(f"the gateway ended with {code}")

    async def _admin(self, path: str, expected: set[int]) -> None:
        status, body = await http(self.gateway.admin, "POST", path)
        if status not in expected:
            self.violations.append(f"POST {path}: {status} {body[:100]!r}")


def judge(traffic: Traffic, gateway: GatewayProcess, replicas: list[ReplicaProcess]) -> list[str]:
    """Hold every attempt against the log and the journals; return what does not fit."""
    logged: dict[str, list[dict[str, Any]]] = {}
    for line in gateway.lines():
        if line["event"] == "request":
            logged.setdefault(line["request_id"], []).append(line)
    began = Counter(ident for replica in replicas for ident in replica.began())
    wrong = list(traffic.odd)
    wrong += [f"{ident} was begun {times} times" for ident, times in began.items() if times > 1]
    for attempt in traffic.attempts:
        wrong += _judge_one(attempt, logged.get(attempt.id, []), began[attempt.id], gateway.down)
    return wrong


def _judge_one(
    attempt: Attempt,
    lines: list[dict[str, Any]],
    began: int,
    down: list[tuple[float, float]],
) -> list[str]:
    what = f"{attempt.id} ({attempt.kind}): client saw {attempt.saw} {attempt.code}"
    outcomes = [line["outcome"] for line in lines]
    if attempt.saw is Saw.UNANSWERED:
        wrong = []
        if not any(a <= attempt.ended and attempt.began <= b for a, b in down):
            wrong.append(f"{what} while the gateway was up; log: {outcomes}")
        if began:
            wrong.append(f"{what} of a request that a replica began; log: {outcomes}")
        return wrong
    if attempt.saw is Saw.LEFT and not lines:
        return []  # gone before its request was read
    if len(lines) != 1:
        return [f"{what}; {len(lines)} lines in the log: {outcomes}"]
    if attempt.saw is Saw.OK and began != 1:
        return [f"{what}; begun {began} times by all replicas together"]
    if outcomes[0] not in _OUTCOMES[attempt.saw]:
        return [f"{what}; log: {outcomes[0]}"]
    return []


async def settle(gateway: GatewayProcess, before: int) -> list[str]:
    """Wait until all has been given back; return what has not."""
    wrong: list[str] = []
    for _ in range(100):
        page = await gateway.metrics()
        # a removed backend takes its series of `gateway_requests_total` with it, these stay
        counted = gauges(page, "gateway_request_seconds_count")
        lines = gateway.lines(gateway.life_at)
        sent_on = [line for line in lines if line["event"] == "request" and line.get("backend")]
        busy = [
            name
            for name in ("inflight_requests", "inflight_prefill_tokens", "queue_depth")
            if any(gauges(page, f"gateway_{name}"))
        ]
        wrong = [f"gateway_{name} is not back at 0" for name in busy]
        more = gateway.descriptors() - before
        if more > DESCRIPTORS_MAX:
            wrong.append(f"{more} more descriptors than before the traffic")
        if sum(counted) != len(sent_on):
            told = f"{sum(counted):.0f} requests counted that were sent on"
            wrong.append(f"{told} in the last life, {len(sent_on)} logged")
        if not wrong:
            break
        await asyncio.sleep(0.1)
    return wrong


async def run(seconds: float, seed: int, *, judge_memory: bool) -> int:
    """Set everything up, let it happen, judge, take everything down."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        replicas = [ReplicaProcess(f"r{i}", directory, TIME_SCALE) for i in range(REPLICAS)]
        gateway = GatewayProcess(directory, replicas)
        gateway.configure(replicas)
        chaos = Chaos(gateway, replicas, random.Random(seed))
        traffic = Traffic(gateway.port, random.Random(seed + 1))
        memory: list[tuple[int, int]] = []
        try:
            await asyncio.gather(*(replica.start() for replica in replicas))
            await gateway.start()
            before = gateway.descriptors()
            until = loop.time() + seconds
            async with asyncio.TaskGroup() as group:
                group.create_task(_watch(gateway, traffic, memory, until))
                for number in range(CLIENTS):
                    group.create_task(traffic.worker(number, until))
                await chaos.run(until)
            violations = chaos.violations + await settle(gateway, before)
        finally:
            if gateway.process is not None and gateway.process.returncode is None:
                gateway.process.send_signal(signal.SIGTERM)
                await gateway.process.wait()
            await asyncio.gather(*(replica.end(signal.SIGKILL) for replica in replicas))
        violations += judge(traffic, gateway, replicas)
        if judge_memory:
            violations += _grown(memory, gateway.lives)
        return report(chaos, traffic, gateway, violations)


async def _watch(
    gateway: GatewayProcess, traffic: Traffic, memory: list[tuple[int, int]], until: float
) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        await asyncio.sleep(1)
        if gateway.process is not None and gateway.process.returncode is None:
            memory.append((gateway.lives, gateway.rss_bytes()))
        if sys.stderr.isatty():
            text = f"{len(traffic.attempts)} attempts, {len(traffic.odd)} odd"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _grown(memory: list[tuple[int, int]], lives: int) -> list[str]:
    """Compare memory within the longest life after its first ten seconds."""
    longest = max(
        (([m for n, m in memory if n == life][10:]) for life in range(1, lives + 1)), key=len
    )
    if len(longest) < 6:
        return []
    third = len(longest) // 3
    before, after = sum(longest[:third]) / third, sum(longest[-third:]) / third
    if after <= GROWTH_MAX * before:
        return []
    return [f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB in one life"]


def report(chaos: Chaos, traffic: Traffic, gateway: GatewayProcess, violations: list[str]) -> int:
    """Print what happened; return the exit code."""
    for name, count in sorted(chaos.done.items()):
        print(f"{count:8d}  {name}")
    saw = Counter((a.kind, a.saw.value, a.code) for a in traffic.attempts)
    for (kind, what, code), count in sorted(saw.items()):
        print(f"{count:8d}  {kind}: {what} {code}")
    begun = sum(len(replica.began()) for replica in chaos.replicas)
    print(f"{begun} requests begun by replicas")
    warm = sum("saved state holds" in str(line.get("message")) for line in gateway.lines())
    print(f"{traffic.requests} requests, {len(traffic.attempts)} attempts")
    print(f"{gateway.lives} lives of the gateway, {warm} of them with a warm index")
    ending = ", ".join(f"{seconds:.1f}" for seconds in gateway.ending_s)
    print(f"seconds from SIGTERM to each end: {ending}")
    print(f"violations: {len(violations)}")
    for text in violations[:40]:
        print(f"  {text}")
    return int(bool(violations))


def main() -> int:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true", help="too short to judge memory by")
    args = parser.parse_args()
    started = time.monotonic()
    code = uvloop.run(run(args.seconds, args.seed, judge_memory=not args.no_memory))
    took = time.monotonic() - started
    print(f"{took:.0f} s, seed {args.seed}: {'ok' if code == 0 else 'FAILED'}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
