"""`radixgate tune`: a better setting for given traffic, found on simulated replicas.

Opens no socket and needs no backend; the figures are those of simulated engines. What is
recommended was checked on traffic the search has not seen.
"""

import argparse
import os
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import orjson

from gateway.cli.numbers import count, number, positive
from gateway.cli.progress import Progress
from gateway.config import build
from gateway.config.load import load
from gateway.config.schema import Config
from gateway.core.settings import Slo
from gateway.extras import MissingExtra, load_figure, load_optuna
from gateway.sim import tune_show
from gateway.sim.generators import MAKERS
from gateway.sim.measure import Workers
from gateway.sim.profiles import PROFILES
from gateway.sim.tune import Task, Tuner, Tuning
from gateway.sim.tune_goals import OBJECTIVES, Objective, objective
from gateway.sim.tune_runs import Part, Source
from gateway.sim.tune_space import TUNABLE, knobs

HELP = "search a trace for a better setting: a Pareto front and a configuration fragment"
EPILOG = (
    "TRACE is synthetic:NAME ("
    + ", ".join(MAKERS)
    + "), a block-hash trace\n(.jsonl, .jsonl.gz: Mooncake, Bailian or our recorder's) or an Azure trace"
    " (.csv, .csv.gz).\nCtrl-C ends the search and prints what was found so far, unchecked.\n"
    "exit codes: 0 ok, also when the defaults are best; 1 failed or interrupted; 2 bad usage or no trace"
)
DEFAULT_LOAD = 0.8
AUTO = "auto"
_GOALS = ("ttft_p95", "goodput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("trace", metavar="TRACE", help="what is sent; see below")
    _add_search(parser)
    _add_fleet(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of the traffic and of the search (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: one per CPU)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the Pareto front")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        action="append",
        type=_objective,
        metavar="NAME",
        help=f"what is to be better, may be repeated: {', '.join(OBJECTIVES)}, or one of a class, "
        f"as coding.ttft_p95 (default: {', '.join(_GOALS)}; and gpus with --replicas auto)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a gateway's configuration: its routing, queue and classes with their slo take the place "
        "of the defaults",
    )
    parser.add_argument(
        "--policy", choices=TUNABLE, help="whose constants (default: cost, or the configuration's)"
    )
    parser.add_argument(
        "--keys",
        action="append",
        default=[],
        metavar="KEY[=LOW:HIGH]",
        help="what may change, may be repeated; patterns as 'routing.cost.*' "
        "(default: those that matter most)",
    )
    parser.add_argument(
        "--trials", type=count, default=40, help="settings tried, the defaults first (default: 40)"
    )
    parser.add_argument(
        "--seeds", type=count, default=2, help="runs per setting, each with its seed (default: 2)"
    )
    parser.add_argument(
        "--requests", type=count, help="how many a run makes, or reads from a file at most"
    )


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=8,
        metavar="N|auto",
        help="simulated backends; auto = as many as the defaults need, and how many fewer will do "
        "(default: %(default)s)",
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
        type=positive,
        help="share of the capacity, at which lmetric just keeps 90 %% within SLO "
        f"(default: {DEFAULT_LOAD})",
    )
    much.add_argument(
        "--rate",
        type=positive,
        help="requests/s of a synthetic workload, speed-up of a recorded one (default of that with "
        "--replicas auto: 1)",
    )
    parser.add_argument(
        "--slo-share",
        type=_share,
        default=0.99,
        help="what gpus must keep within SLO (default: %(default)s)",
    )
    parser.add_argument(
        "--slo",
        action="append",
        type=_slo,
        default=[],
        metavar="CLASS:TTFT_S:TPOT_S",
        help="a class's targets, instead of the workload's; may be repeated",
    )
    parser.add_argument(
        "--most",
        type=count,
        default=64,
        help="replicas at which auto and gpus give up (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Search and print what came out."""
    try:
        task = _task(args)
        _ready(args)
    except MissingExtra as error:
        return _failed(error, 1)
    except (OSError, ValueError) as error:
        return _failed(error, 2)
    progress = Progress()
    ended: str | None = None
    with Workers(args.jobs) as workers:
        tuner = Tuner(task, workers, progress.show)
        try:
            tuner.run()
        except KeyboardInterrupt:
            ended = "interrupted"
        except BrokenProcessPool:
            ended = "a child process died, perhaps of too little memory (--jobs 1 needs the least)"
        except (OSError, ValueError) as error:  # no capacity or fleet to be found
            return _failed(error, 1)
        finally:
            progress.clear()
    _report(tuner.tuning, args, interrupted=ended is not None)
    return 0 if ended is None else _failed(ended, 1)


def _report(tuning: Tuning, args: argparse.Namespace, *, interrupted: bool) -> None:
    if args.png and tuning.trials:
        tune_show.picture(tuning, args.png)
    if args.json:
        shown = tune_show.as_json(tuning, interrupted=interrupted)
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    else:
        print(tune_show.text(tuning))


def _failed(why: object, code: int) -> int:
    print(f"radixgate tune: {why}", file=sys.stderr)
    return code


def _task(args: argparse.Namespace) -> Task:
    """Return what is asked for.

    Raises:
        ConfigErrors, OSError, ValueError: it makes no sense.
    """
    config = None if args.config is None else load(args.config, env=os.environ).config
    policy = args.policy or (config or Config()).routing.policy
    source = _source(args, config)
    auto = args.replicas == AUTO
    rate = args.rate
    if auto:
        if args.load:
            raise ValueError("--replicas auto needs a --rate: a load is that of a fleet")
        if rate is None and source.by_seed:
            raise ValueError("--replicas auto needs the --rate of synthetic traffic")
        rate = rate or 1.0
    named = args.objective or [objective(name) for name in (*_GOALS, *(["gpus"] if auto else []))]
    goals = tuple(dict.fromkeys(named))
    _check_classes(source, goals)
    return Task(
        source,
        goals,
        knobs(policy, args.keys, config),
        policy=policy,
        rate=rate,
        load=None if rate else args.load or DEFAULT_LOAD,
        replicas=None if auto else args.replicas,
        profile=args.profile,
        seed=args.seed,
        seeds=args.seeds,
        trials=args.trials,
        share=args.slo_share,
        most=args.most,
        config=config,
    )


def _source(args: argparse.Namespace, config: Config | None) -> Source:
    """Return the traffic, judged by the workload's targets < the configuration's < the options'."""
    slos: dict[str, Slo] = dict(args.slo)
    if config is not None:
        known = _small(Source(args.trace, args.requests)).traffic(Part.SEARCH)(1.0, 1).slos
        own = {spec.name: spec.slo for spec in build.core_settings(config, {}).classes}
        slos = {name: own[name] for name in own if name in known} | slos
    return Source(args.trace, args.requests, tuple(slos.items()))


def _small(source: Source) -> Source:
    """Return the same, few requests only where making them takes time."""
    return Source(source.trace, 50) if source.by_seed else Source(source.trace, source.requests)


def _check_classes(source: Source, goals: tuple[Objective, ...]) -> None:
    """Make a workload, for whatever is wrong with the trace and with classes that are named.

    A synthetic one is made at a small rate, thus of few requests.
    """
    few = _small(source)
    known = {name for part in Part for name in few.traffic(part)(1.0, 1).slos}
    named = {name for name, _ in source.slos} | {goal.cls for goal in goals if goal.cls}
    if wrong := sorted(named - known):
        raise ValueError(f"no class {wrong[0]!r} in the trace: one of {', '.join(sorted(known))}")


def _ready(args: argparse.Namespace) -> None:
    """Find out now what would fail after an hour.

    Raises:
        MissingExtra: packages are not installed.
        ValueError: the picture cannot be written there.
    """
    load_optuna("the search")
    if args.png:
        load_figure("--png")
        if args.png.suffix != ".png":
            raise ValueError(f"--png {args.png}: its name must end in .png")
        if not os.access(args.png.parent, os.W_OK):
            raise ValueError(f"--png {args.png}: {args.png.parent} cannot be written to")


_share = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _replicas(text: str) -> int | str:
    return AUTO if text == AUTO else count(text)


def _objective(text: str) -> Objective:
    try:
        return objective(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _slo(text: str) -> tuple[str, Slo]:
    try:
        name, ttft, tpot = text.split(":")
        return name, Slo(positive(ttft), positive(tpot))
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected CLASS:TTFT_S:TPOT_S") from error
