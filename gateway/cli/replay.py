"""`radixgate replay`: a trace through the deciding code and simulated replicas, policy by policy.

Opens no socket and needs no backend; the figures are those of simulated engines.
"""

import argparse
import os
import sys
from itertools import product

import orjson

from gateway.cli.numbers import count, positive, seconds, several
from gateway.cli.progress import Progress
from gateway.core.policies.published import PUBLISHED
from gateway.sim import measure
from gateway.sim.faults_at import Fault, Happening
from gateway.sim.generators import MAKERS
from gateway.sim.profiles import PROFILES

HELP = "run a trace through the routing code against simulated replicas: a table per policy"
EPILOG = (
    "TRACE is synthetic:NAME ("
    + ", ".join(MAKERS)
    + "), a block-hash trace\n(.jsonl, .jsonl.gz: Mooncake, Bailian or our recorder's) or an Azure trace"
    " (.csv, .csv.gz).\nexit codes: 0 ok, 1 failed or interrupted, 2 bad usage or no trace"
)
DEFAULT_POLICIES = ("round_robin", "least_requests", "weights-3:3:2", "lmetric", "cost")
DEFAULT_LOAD = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("trace", metavar="TRACE", help="what is sent; see below")
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(PUBLISHED),
        metavar="NAME",
        help=f"one to run, may be repeated: {', '.join(PUBLISHED)} "
        f"(default: {', '.join(DEFAULT_POLICIES)})",
    )
    parser.add_argument(
        "--replicas",
        type=several(count),
        default=[8],
        help="simulated backends; several: 4,8 (default: 8)",
    )
    parser.add_argument(
        "--profile",
        choices=sorted(PROFILES),
        default="h100_8b",
        help="how fast which GPU is with which model (default: %(default)s)",
    )
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--load",
        type=several(positive),
        help="share of the capacity, at which lmetric just keeps 90 %% within SLO; several: "
        f"0.5,0.8 (default: {DEFAULT_LOAD})",
    )
    much.add_argument(
        "--rate",
        type=several(positive),
        help="requests/s of a synthetic workload, speed-up of a recorded one; several: 1,2",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the traffic and of ties (default: %(default)s)"
    )
    parser.add_argument(
        "--requests",
        type=count,
        help="about how many are made (no fewer than fill a minute or so), or read at most",
    )
    parser.add_argument(
        "--poll",
        type=seconds,
        default=0.25,
        help="seconds between metrics; 0 = none at all (default: %(default)s)",
    )
    parser.add_argument(
        "--age",
        type=seconds,
        default=0.0,
        help="seconds old the metrics are when they arrive (default: %(default)s)",
    )
    parser.add_argument(
        "--event",
        action="append",
        type=_event,
        default=[],
        metavar="SECONDS:WHAT:REPLICA",
        help=f"what happens to a replica (0, 1, ...) and when: {', '.join(Happening)}; repeatable",
    )
    parser.add_argument(
        "--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: one per CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run every combination and print what came out."""
    try:
        measure.traffic_of(args.trace, args.requests)
    except (OSError, ValueError) as error:
        print(f"radixgate replay: {error}", file=sys.stderr)
        return 2
    cells = list(_cells(args))
    if wrong := _misplaced(args):
        print(f"radixgate replay: {wrong}", file=sys.stderr)
        return 2
    progress = Progress()
    try:
        rows = measure.run(cells, min(args.jobs, len(cells)), progress.show)
    except ValueError as error:  # no capacity to be found
        print(f"radixgate replay: {error}", file=sys.stderr)
        return 1
    finally:
        progress.clear()
    if args.json:
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        print(measure.table(rows))
    return 0


def _misplaced(args: argparse.Namespace) -> str | None:
    """Return what is wrong with an --event, if anything."""
    for replicas, fault in product(args.replicas, args.event):
        joins = fault.what is Happening.JOINS
        if fault.replica != replicas if joins else not 0 <= fault.replica < replicas:
            fitting = f"{replicas}" if joins else f"0 to {replicas - 1}"
            return f"--event: of {replicas} replicas, the one that {fault.what} is {fitting}"
    return None


def _cells(args: argparse.Namespace) -> list[measure.Cell]:
    rates = args.rate
    loads = [None] if rates else args.load or [DEFAULT_LOAD]
    combined = product(args.replicas, loads, rates or [None], args.policy or DEFAULT_POLICIES)
    return [
        measure.Cell(
            args.trace,
            policy,
            rate,
            load,
            replicas,
            args.profile,
            args.seed,
            args.requests,
            args.poll,
            args.age,
            tuple(args.event),
        )
        for replicas, load, rate, policy in combined
    ]


def _event(text: str) -> Fault:
    try:
        when, what, replica = text.split(":")
        return Fault(seconds(when), Happening(what), int(replica))
    except ValueError as error:
        kinds = ", ".join(Happening)
        message = f"not SECONDS:WHAT:REPLICA, as 30:dies:0; WHAT is one of {kinds}"
        raise argparse.ArgumentTypeError(message) from error
