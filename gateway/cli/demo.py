"""`radixgate demo`: the same traffic through round robin and through Radixgate, side by side.

Starts simulated replicas and gateways as child processes and ends them; touches only loopback.
"""

import argparse
import asyncio
import signal
import sys
from typing import Any

import orjson
import uvloop

from gateway.cli.numbers import number, positive
from gateway.sim import report, stage, workload
from gateway.sim.client import LoadClient
from gateway.sim.profiles import DEMO

HELP = "no GPU: simulated replicas, coding and chat traffic, round robin against Radixgate"
EPILOG = "exit codes: 0 ok, 1 failed or interrupted, 2 bad usage"

MODEL = "demo"
TIME_SCALE = 0.2  # five engine seconds per second: three processes keep up on two cores
STREAM_INTERVAL = 4  # tokens per chunk: fewer, bigger writes for the same text
WARM_UP = 0.2  # share of a run that fills caches and is not counted
LEAST_ENGINE_S = 20.0

_replicas = number(int, lambda value: 1 <= value <= 16, "1 to 16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=4,
        help="simulated backends, 1 to 16 (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=30.0,
        help="wall seconds of each of the two runs (default: %(default)s)",
    )
    parser.add_argument(
        "--policy", default="cost", help="what round robin is compared with (default: %(default)s)"
    )
    parser.add_argument(
        "--load",
        type=positive,
        default=0.8,
        help="share of the pool's capacity (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run both halves and print the comparison."""
    if args.seconds / TIME_SCALE < LEAST_ENGINE_S:
        print(f"--seconds must be at least {LEAST_ENGINE_S * TIME_SCALE:.0f}", file=sys.stderr)
        return 2
    try:
        figures = uvloop.run(_both(args))
    except stage.StageError as error:
        print(error, file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("ended before the comparison was complete", file=sys.stderr)
        return 1
    if args.json:
        print(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())
    else:
        print(table(figures, args))
    return 0


async def _both(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both runs: cold replicas each, the same conversations."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if not args.json:
        print(introduction(args), flush=True)
    return {
        "round_robin": await _one(args, "round_robin"),
        "radixgate": await _one(args, args.policy),
    }


async def _one(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    seconds = args.seconds / TIME_SCALE
    sessions = workload.demo(args.replicas, args.load, seconds, args.seed)
    backends = stage.replicas(
        args.replicas,
        profile=DEMO.name,
        time_scale=TIME_SCALE,
        model=MODEL,
        stream_interval=STREAM_INTERVAL,
    )
    async with backends as urls, stage.gateway(urls, policy) as (url,):
        client = LoadClient(url, MODEL, TIME_SCALE)
        progress = _Progress(client, policy, seconds)
        await client.run(sessions, seconds, each_s=0.5, tick=progress.show)
        progress.clear()
    warm = seconds * WARM_UP
    counted = [record for record in client.records if record.sent_at >= warm]
    head = {
        "trace": "synthetic:demo",
        "policy": policy,
        "load": args.load,
        "replicas": args.replicas,
    }
    figures = report.summarise(counted, seconds - warm, head)
    figures["client_lag_p99_s"] = round(client.lag_s(), 4)
    return figures


class _Progress:
    """One line that is rewritten while a run lasts; nothing when nobody watches."""

    def __init__(self, client: LoadClient, policy: str, seconds: float) -> None:
        self._client = client
        self._policy = policy
        self._seconds = seconds
        self._live = sys.stderr.isatty()

    def show(self) -> None:
        """Rewrite the line."""
        if not self._live:
            return
        done = [r for r in self._client.records if r.result is report.Result.OK]
        ttft = sorted(r.ttft_s for r in done if r.ttft_s is not None)
        prompt = sum(r.prompt_tokens for r in done)
        hit = sum(r.cached_tokens for r in done) / prompt if prompt else 0.0
        line = (
            f"{self._policy:12} {self._client.now():4.0f}/{self._seconds:.0f} s"
            f"  {len(done)} answered  {len(self._client.records) - len(done)} open"
            f"  TTFT p50 {_seconds(report.quantile(ttft, 0.5))}"
            f"  p95 {_seconds(report.quantile(ttft, 0.95))}  hit rate {hit:.0%}"
        )
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def introduction(args: argparse.Namespace) -> str:
    """Return what will be run, and in which seconds it is told."""
    return (
        f"{args.replicas} simulated vLLM replicas (profile {DEMO.name}: {DEMO.source})\n"
        f"Coding agents and bursty chat at {args.load:.0%} of the pool's capacity, seed {args.seed};"
        f" {args.seconds:.0f} s each with round_robin, then {args.policy}, on cold replicas.\n"
        f"All times are engine seconds: wall time / {TIME_SCALE}."
        f" The first {WARM_UP:.0%} of each run warms up and is not counted.\n"
        "A conversation's next turn waits for its answer: who answers later is asked less."
    )


def table(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """Return the comparison, per class and in total."""
    slos = ", ".join(f"{name} TTFT {slo.ttft_s:g} s" for name, slo in sorted(report.SLOS.items()))
    columns = ("TTFT p50", "TTFT p95", "hit rate", "goodput/s", "in SLO", "requests")
    lines = ["", f"{'':26}" + "".join(f"{name:>11}" for name in columns)]
    runs = {
        "round robin": figures["round_robin"],
        f"Radixgate ({args.policy})": figures["radixgate"],
    }
    for part in ("coding", "chat", "total"):
        lines.append(part)
        for name, run_figures in runs.items():
            row = run_figures if part == "total" else run_figures["classes"].get(part)
            lines.append(f"  {name:24}" + (_row(row) if row else f"{'no requests':>11}"))
    lags = ", ".join(f"{run['client_lag_p99_s'] * 1000:.1f}" for run in runs.values())
    lines += [
        "",
        f"Goodput: requests per second inside their SLO ({slos}; TPOT 0.1 s each).",
        f"This machine kept up if the measuring loop was not late: p99 {lags} ms (wall).",
    ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    cells = (
        _seconds(row["ttft_p50_s"]),
        _seconds(row["ttft_p95_s"]),
        _share(row["hit_rate"]),
        f"{row['goodput_rps']:.2f}",
        _share(row["slo_ratio"]),
        str(row["requests"]),
    )
    return "".join(f"{cell:>11}" for cell in cells)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
