"""What the checks between keys know of the tree: places, and what is already reported.

Judges nothing.
"""

from collections.abc import Mapping

from gateway.config.problems import Report, Where


class Places:
    """Where key paths stand, and which of them are reported."""

    def __init__(self, places: Mapping[str, Where], top: Where, report: Report) -> None:
        self._places = places
        self._top = top
        self.report = report

    def of(self, path: str) -> Where:
        """Return the place of the path itself, else that of what holds it."""
        while path:
            if path in self._places:
                return self._places[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._top

    def add(self, path: str, message: str, allowed: str) -> None:
        """Report a mistake where the path stands."""
        self.report.add(self.of(path), path, message, allowed)

    def bad(self, path: str) -> bool:
        """Whether the value of `path` or of what holds it is unusable, which is reported."""
        while path:
            if path in self.report.bad:
                return True
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return False

    def sure(self, path: str) -> bool:
        """Whether all entries of `path` were read: only then is one that isn't there missing."""
        unread = path in self.report.bad or path in self.report.doubtful
        return not unread and self.merged(path) and self.merged("")

    def merged(self, path: str) -> bool:
        """Whether no `<<` that should bring something into `path` is unreadable."""
        return (f"{path}.<<" if path else "<<") not in self.report.bad
