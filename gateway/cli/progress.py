"""How far a long command is: one line of a terminal, nothing where output is piped."""

import sys


class Progress:
    """One line that is rewritten; nothing when nobody watches."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Rewrite the line."""
        if self._live:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
