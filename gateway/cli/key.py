"""`radixgate key new NAME`: a new client key, shown once, and the line that lets it in.

The key is written to standard output and nowhere else.
"""

import argparse
import sys

from gateway.config.emit import scalar
from gateway.config.forms import FORMS
from gateway.config.secrets import hash_key, new_key

HELP = "make a client key: prints it once, and the configuration line (SHA-256 only) to paste"
EPILOG = """\
exit codes: 0 ok, 2 bad usage

The first line of the output is the key: hand it to the client; it can't be shown again. The last
line goes under `keys:` of the configuration. Class, models and limits can be added there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        help="make a new key",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("name", metavar="NAME", help="the key's name in logs and status: team-a")


def run(args: argparse.Namespace) -> int:
    """Print a new key and its configuration line."""
    if not FORMS["name"].ok(args.name):
        print(f"{args.name!a} is not a name: {FORMS['name'].allowed}", file=sys.stderr)
        return 2
    key = new_key()
    print(key)
    print("# the key above is shown only now; this line goes under `keys:` of the configuration")
    print(f'- {{name: {_quoted(args.name)}, sha256: "{hash_key(key)}"}}')
    return 0


def _quoted(name: str) -> str:
    """Return a name as YAML that also holds inside braces: brackets and colons end a bare word."""
    return name if name.replace("-", "").isalpha() and scalar(name) == name else f'"{name}"'
