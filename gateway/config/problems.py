"""What is wrong with a configuration, and where. Collects every mistake; never stops at the first.

ConfigErrors is the only exception this package raises.
"""

from dataclasses import dataclass, field

_MOST_PROBLEMS = 200
"""A file of another kind can be wrong on every line: nobody reads further than this."""


@dataclass(slots=True, frozen=True)
class Where:
    """A place a value came from: a file and line, or (no line) an option or variable's name."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        """Return `file:line`, or the name alone."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True, frozen=True)
class ConfigProblem:
    """One mistake: `message` says what is wrong, `allowed` what would be right."""

    file: str
    line: int | None
    key: str
    message: str
    allowed: str = ""

    def __str__(self) -> str:
        """Return `file:line: key.path: what is wrong, what is allowed`."""
        place = str(Where(self.file, self.line))
        head = f"{place}: {self.key}" if self.key else place
        tail = f", {self.allowed}" if self.allowed else ""
        return f"{head}: {self.message}{tail}"


class ConfigErrors(Exception):
    """The configuration has mistakes; `problems` lists them all, in the order of the file."""

    def __init__(self, problems: list[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(slots=True)
class Report:
    """Collects problems and warnings while loading.

    `bad` are the key paths whose value is unusable and was replaced, `doubtful` those that are
    used as read although a part was passed over.
    """

    problems: list[ConfigProblem] = field(default_factory=list)
    warnings: list[ConfigProblem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    _more: int = 0

    def add(
        self, where: Where, key: str, message: str, allowed: str = "", *, kept: bool = False
    ) -> None:
        """Note a mistake at `key`; `kept`: what is there is still used, so judged further."""
        (self.doubtful if kept else self.bad).add(key)
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(ConfigProblem(where.file, where.line, key, message, allowed))
        else:
            self._more += 1

    def warn(self, where: Where, key: str, message: str, allowed: str = "") -> None:
        """Note something that works but is probably not meant."""
        if len(self.warnings) < _MOST_PROBLEMS:
            self.warnings.append(ConfigProblem(where.file, where.line, key, message, allowed))

    def raise_any(self) -> None:
        """Raise all mistakes noted so far, if there are any.

        Raises:
            ConfigErrors: at least one was noted.
        """
        if not self.problems:
            return
        found = sorted(self.problems, key=lambda problem: (problem.line is None, problem.line or 0))
        if self._more:
            last = found[-1]
            found.append(ConfigProblem(last.file, None, "", f"and {self._more} more mistakes"))
        raise ConfigErrors(found)
