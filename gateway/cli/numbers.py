"""Numbers as arguments: what is allowed is said with what was given, never with a function's name.

Must never import anything of the product: every command starts with it.
"""

import argparse
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def number(kind: Callable[[str], N], allowed: Callable[[N], bool], what: str) -> Callable[[str], N]:
    """Return what makes a `kind` of an argument, `what` being how those `allowed` are told."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
            if allowed(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!a}")

    return parse


def several(one: Callable[[str], N]) -> Callable[[str], list[N]]:
    """Return what makes a list of `one`s that commas part."""
    return lambda text: [one(part) for part in text.split(",")]


positive = number(float, lambda value: 0 < value < float("inf"), "above 0")
seconds = number(float, lambda value: 0 <= value < float("inf"), "0 or more")
count = number(int, lambda value: value >= 1, "at least 1")
port = number(int, lambda value: 0 <= value <= 65_535, "0 to 65535")
