"""`make bench`: every proxy on every case, interleaved, CPU time per unit and its ratio to nginx.

A case runs on one proxy at a time, all of them in turn, several rounds; the median round counts.
The proxy is pinned to core 0, load and upstreams to core 1. On a shared machine only the ratios
within one run mean anything.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop

from gateway.sim.ports import free_port
from loadtest.bench import load, many, peers
from loadtest.bench.peers import Peer

PROXY_CORE, LOAD_CORE = 0, 1
Unit = tuple[float, int, int]  # CPU seconds, units, errors


@dataclass(frozen=True)
class Case:
    """One row. `must` is the ratio to nginx that the product promises."""

    name: str
    unit: str
    must: float
    run: Callable[[Peer], Unit]


def _bodies(size: int, turns: int, options: bytes, connections: int) -> list[list[bytes]]:
    return [
        [load.request(load.conversation(size, turns, 1000 * c + i, options)) for i in range(4)]
        for c in range(connections)
    ]


def whole(size: int, turns: int, each: int, connections: int = 16) -> Callable[[Peer], Unit]:
    """Return a case of whole answers: closed loop over keep-alive connections."""
    requests = _bodies(size, turns, b',"max_tokens":40', connections)

    def run(peer: Peer) -> Unit:
        before = peer.cpu_s()
        tally = uvloop.run(load.run_clients(peer.port, requests, each))
        return peer.cpu_s() - before, tally.answers, tally.errors

    return run


def streams(count: int, events: int, pace_us: int) -> Callable[[Peer], Unit]:
    """Return a case of paced streams; the unit is one event."""
    options = b',"stream":true,"max_tokens":%d,"seed":%d' % (events, pace_us)
    requests = _bodies(1024, 1, options, count)

    def run(peer: Peer) -> Unit:
        before = peer.cpu_s()
        tally = uvloop.run(load.run_clients(peer.port, requests, 1))
        return peer.cpu_s() - before, tally.chunks, tally.errors

    return run


def cases(scale: float) -> list[Case]:
    """Return the table's rows; `scale` shortens or lengthens them."""

    def n(count: int) -> int:
        return max(2, int(count * scale))

    return [
        Case("chat 1 KB, whole", "request", 4.0, whole(1024, 1, n(250))),
        Case("chat 32 KB (8 turns), whole", "request", 4.0, whole(32 * 1024, 8, n(100))),
        Case("chat 128 KB (32 turns), whole", "request", 4.0, whole(128 * 1024, 32, n(30))),
        Case("SSE chunk, 32 streams at 5 ms", "chunk", 1.3, streams(32, n(400), 5000)),
    ]


def measure(chosen: list[Peer], rows: list[Case], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return microseconds per unit by case and peer, one figure per round."""
    figures: dict[str, dict[str, list[float]]] = {row.name: {} for row in rows}
    for row in rows:
        for number in range(rounds + 1):
            for peer in chosen:
                cpu_s, units, errors = row.run(peer)
                if errors or not units:
                    print(f"{row.name}: {peer.name}: {errors} errors", file=sys.stderr)
                if number and units:  # the first round warms up
                    figures[row.name].setdefault(peer.name, []).append(cpu_s / units * 1e6)
            _progress(f"{row.name}: round {number}/{rounds}")
    return figures


def added_ttft(chosen: list[Peer], direct: int, per_s: float, seconds: float) -> dict[str, float]:
    """Return the TTFT p50 in ms that each proxy adds to the upstream's own."""
    options = b',"stream":true,"max_tokens":3,"seed":2000'
    requests = [load.request(load.conversation(1024, 1, i, options)) for i in range(64)]
    base: list[float] = []
    found: dict[str, list[float]] = {peer.name: [] for peer in chosen}
    for _ in range(3):
        base += uvloop.run(load.run_rate(direct, requests, per_s, seconds)).first_s
        for peer in chosen:
            tally = uvloop.run(load.run_rate(peer.port, requests, per_s, seconds))
            found[peer.name] += tally.first_s
    own = statistics.median(base)
    return {name: 1000 * (statistics.median(t) - own) for name, t in found.items() if t}


def table(figures: dict[str, dict[str, list[float]]], rows: list[Case]) -> list[str]:
    """Return the printed lines."""
    names = [name for name in peers.PEERS if any(name in f for f in figures.values())]
    lines = ["| case | unit | must | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        medians = {name: statistics.median(v) for name, v in figures[row.name].items()}
        base = medians.get("nginx")
        cells = []
        for name in names:
            if name not in medians:
                cells.append("-")
            elif base:
                cells.append(f"{medians[name]:.1f} µs ({medians[name] / base:.2f}x)")
            else:
                cells.append(f"{medians[name]:.1f} µs")
        lines.append(f"| {row.name} | {row.unit} | {row.must}x | " + " | ".join(cells) + " |")
    return lines


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="*", default=list(peers.PEERS), choices=peers.PEERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="", help="substring of the cases to run")
    parser.add_argument("--no-ttft", action="store_true")
    parser.add_argument("--streams", type=int, default=5000, help="open streams to hold; 0 = none")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    upstreams = [_upstream() for _ in range(2)]
    chosen: list[Peer] = []
    try:
        ports = [up.port for up in upstreams]
        started = (peers.start(name, ports, PROXY_CORE) for name in args.peers)
        chosen = [peer for peer in started if peer is not None]
        time.sleep(3)  # routers that look for their workers
        rows = [row for row in cases(args.scale) if args.only in row.name]
        figures = measure(chosen, rows, args.rounds)
        _progress("")
        print("\n".join(table(figures, rows)))
        ttft = {} if args.no_ttft else added_ttft(chosen, ports[0], 50, 4)
        for name, ms in ttft.items():
            print(f"added TTFT p50 at 50 req/s: {name} {ms:.2f} ms")
        held = many.measure(args.streams, ports, PROXY_CORE) if args.streams else None
        if held is not None:
            print(
                f"{held.streams} open streams: {held.errors} errors, "
                f"{held.bytes_per_stream / 1024:.1f} KB each, worst loop lag "
                f"{held.worst_lag_ms:.1f} ms, {100 * held.cpu_share:.0f} % of a core"
            )
        if args.json:
            args.json.write_bytes(
                orjson.dumps({"us_per_unit": figures, "added_ttft_ms": ttft, "many": held})
            )
    finally:
        for process in [*chosen, *upstreams]:
            process.stop()
    return 0


def _upstream() -> Peer:
    port = free_port()
    command = [sys.executable, "-m", "loadtest.bench.upstream", str(port)]
    peer = peers.spawn("upstream", command, port, LOAD_CORE)
    if peer is None:
        raise SystemExit("the fake upstream did not start")
    return peer


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from None
