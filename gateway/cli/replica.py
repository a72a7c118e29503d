"""`radixgate replica`: one simulated vLLM server over HTTP. Needs no GPU, model or file."""

import argparse
import asyncio
import contextlib
import signal
import sys
import time

import uvloop

from gateway.cli.numbers import count, port, positive
from gateway.extras import MissingExtra
from gateway.sim.http import listen
from gateway.sim.profiles import PROFILES
from gateway.sim.publish import Publisher
from gateway.sim.replica import Replica

HELP = "run one simulated vLLM server (wire format, metrics and prefix cache of vLLM 0.32)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--port", type=port, required=True, help="port to listen on; 0 = any free")
    parser.add_argument(
        "--count",
        type=count,
        default=1,
        help="serve that many, on ports from --port on (default: %(default)s)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--profile",
        choices=sorted(PROFILES),
        default="h100_8b",
        help="how fast which GPU is with which model (default: %(default)s)",
    )
    parser.add_argument(
        "--model", default="sim", help="the model id it serves (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of its words, answer lengths and ids (default: %(default)s)",
    )
    parser.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        help="wall seconds an engine second lasts: 0.1 is ten times faster than the profile "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stream-interval",
        type=count,
        default=1,
        help="tokens per streamed chunk after the first, as vLLM's option of this name "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--kv-events-port",
        type=port,
        default=0,
        metavar="PORT",
        help="publish KV events on this port and serve replays on the next, two ports a replica; "
        "0 = off, the default (needs the extra `events`)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        uvloop.run(_serve(args))
    except (OSError, MissingExtra) as error:  # an address in use, or none of ours
        print(f"radixgate replica: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 1
    return 0


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as live:
        for index in range(args.count):
            await _start(args, index, live)
        await stop.wait()


async def _start(args: argparse.Namespace, index: int, live: contextlib.AsyncExitStack) -> None:
    """Start one replica, say where, and leave its end to `live`."""
    seed = args.seed + index
    publisher = _publisher(args, index)
    if publisher is not None:
        live.callback(publisher.close)
    replica = Replica(
        PROFILES[args.profile],
        model=args.model,
        started_at=time.time(),  # noqa: TID251 - `process_start_time_seconds` is a date
        time_scale=args.time_scale,
        seed=seed,
        stream_interval=args.stream_interval,
        publisher=publisher,
    )
    asked = args.port and args.port + index
    runner, port = await listen(replica, host=args.host, port=asked, seed=seed)
    live.push_async_callback(runner.cleanup)
    live.callback(replica.close)
    print(f"replica {args.model} ({args.profile}) on http://{args.host}:{port}", flush=True)


def _publisher(args: argparse.Namespace, index: int) -> Publisher | None:
    """Return the publisher of replica `index`: two ports each, as vLLM's examples number them."""
    if not args.kv_events_port:
        return None
    port = args.kv_events_port + 2 * index
    return Publisher(f"tcp://{args.host}:{port}", f"tcp://{args.host}:{port + 1}")
