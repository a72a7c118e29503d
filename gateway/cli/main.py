"""`radixgate`: finds the command, imports that one only, runs it, maps its end to an exit code.

It must never import a command that was not asked for: `radixgate check` starts without aiohttp.
"""

import argparse
import ast
import importlib
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import gateway
from gateway.cli.output import guarded
from gateway.config.problems import ConfigErrors

COMMANDS = ("serve", "check", "demo", "replica", "replay", "tune", "explain", "top", "key")
OK, FAILED, BAD_USAGE = 0, 1, 2

_EXIT_CODES = "exit codes: 0 ok, 1 failed, 2 bad usage or configuration"


class Command(Protocol):
    """What each module of `gateway.cli` named in COMMANDS offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # it would end a gateway whose imports are not done yet
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return guarded(lambda: _code(arguments))


def _code(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)
        return BAD_USAGE
    except SystemExit as end:  # argparse: --help is 0, bad usage is 2
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        return FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in available():
        overview = _overview()
        overview.parse_args(arguments)
        overview.print_help(sys.stderr)
        return BAD_USAGE
    command = load_command(arguments[0])
    parser = argparse.ArgumentParser(
        prog=f"radixgate {arguments[0]}",
        description=command.HELP,
        epilog=getattr(command, "EPILOG", _EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments[1:]))


def available() -> list[str]:
    """Return the commands of COMMANDS that this installation has."""
    return [name for name in COMMANDS if importlib.util.find_spec(f"gateway.cli.{name}")]


def load_command(name: str) -> Command:
    """Import the module of a command in COMMANDS."""
    return cast("Command", importlib.import_module(f"gateway.cli.{name}"))


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixgate",
        description="LLM-aware gateway for vLLM replicas: sends each request where its prefix is "
        "cached and the wait is short.",
        epilog=f"radixgate COMMAND --help tells more. {_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"radixgate {gateway.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in available():
        commands.add_parser(name, help=_help_of(name))
    return parser


def _help_of(name: str) -> str:
    """Read a command's HELP from its source: an overview must not import the whole product."""
    spec = importlib.util.find_spec(f"gateway.cli.{name}")
    if spec is None or spec.origin is None:
        return ""
    for part in ast.parse(Path(spec.origin).read_bytes()).body:
        match part:
            case ast.Assign(targets=[ast.Name(id="HELP")], value=value):
                return str(ast.literal_eval(value))
            case _:
                pass
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
