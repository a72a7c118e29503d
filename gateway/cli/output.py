"""Standard output and error when nobody takes what is written there: closed, full, or a reader gone.

What could not be written is thrown away, so that the interpreter does not fail on it a second time at
its end. Must never hide an error that is not the output's.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

LOST = 1
"""The exit code of a command whose output was lost."""


class _Watched:
    """A stream that remembers what failed: argparse swallows it, and others may mistake it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guarded(command: Callable[[], int]) -> int:
    """Run a command; return its exit code, or `LOST` if its output could not be written.

    That is told in one line, but for a reader (head, less) that has seen enough.
    """
    _fill_closed()
    before = sys.stdout, sys.stderr
    out, err = _Watched(sys.stdout), _Watched(sys.stderr)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    try:
        code = command()
    except OSError as error:
        if error is not out.error and error is not err.error:
            raise
        code = LOST
    finally:
        sys.stdout, sys.stderr = before
        for watched in (out, err):
            with suppress(OSError):
                watched.flush()
    if out.error is not None and not isinstance(out.error, BrokenPipeError):
        with suppress(OSError):
            reason = out.error.strerror or out.error
            print(f"radixgate: output not written: {reason}", file=sys.stderr, flush=True)
    for watched, stream in zip((out, err), before, strict=True):
        if watched.error is not None:
            _discard(stream)
    return code if out.error is None else code or LOST


def _fill_closed() -> None:
    """Put the null device where a standard stream was closed, in the order of their descriptors.

    Else a socket would get its number, and lines meant for the stream would be sent to a client.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open for good


def _discard(stream: TextIO) -> None:
    """Have what the stream still holds, and all that follows, go nowhere."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
