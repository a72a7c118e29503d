"""`radixgate check`: what a configuration means, and where each value came from; or its mistakes.

Opens the file only: no backend is contacted, no secret is read.
"""

import argparse
import os
import sys
from collections.abc import Iterator

import msgspec

from gateway.config.build import effective_classes
from gateway.config.emit import Line, emit
from gateway.config.load import Loaded, load
from gateway.config.problems import ConfigErrors

HELP = "validate a configuration and print what is in effect, with where each value came from"
EPILOG = """\
exit codes: 0 valid (warnings, if any, are on standard error); 2 invalid: every mistake is
listed as FILE:LINE: KEY.PATH: what is wrong, what is allowed

examples:
  radixgate check config/gateway.yaml
  radixgate check gateway.yaml --set routing.policy=weights
  RADIXGATE_LISTEN__PORT=80 radixgate check gateway.yaml
"""

_COMMENT_COLUMN = 44


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="the YAML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="override one key, as `serve` does; may be repeated",
    )
    parser.add_argument(
        "--backend",
        dest="backends",
        action="append",
        default=[],
        metavar="URL",
        help="add a backend, as `serve` does; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print the effective configuration, or all mistakes."""
    try:
        loaded = load(args.config, backends=args.backends, overrides=args.overrides, env=os.environ)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)
        count = len(errors.problems)
        print(f"{count} mistake{'s' if count > 1 else ''}", file=sys.stderr)
        return 2
    try:
        print("\n".join(effective_yaml(loaded)), flush=True)
    finally:  # below two hundred lines, or alone when the reader of those has seen enough
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return 0


def effective_yaml(loaded: Loaded) -> Iterator[str]:
    """Yield the configuration in effect as YAML lines, each value with its origin behind it."""
    data = msgspec.to_builtins(loaded.config)
    data["classes"] = msgspec.to_builtins(effective_classes(loaded.config))
    for cls in data["classes"].values():  # a rule's unset conditions are no conditions
        cls["match"] = [{k: v for k, v in rule.items() if v is not None} for rule in cls["match"]]
    origins = dict(loaded.origins)
    if not loaded.config.classes:
        origins["classes"] = "built-in"
    for line in emit(data):
        if line.leaf:
            yield f"{line.text:<{_COMMENT_COLUMN}}  # {_origin(line, origins)}"
        else:
            yield line.text


def _origin(line: Line, origins: dict[str, str]) -> str:
    built_in = line.path.startswith("classes.") and origins.get("classes") == "built-in"
    return origins.get(line.path, "built-in" if built_in else "default")
