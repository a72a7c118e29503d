"""Reads Markdown: fenced blocks, the commands in them, links. Runs nothing.

A block that cannot be run stands under `<!-- not run: REASON -->`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = frozenset({"bash", "sh", "console", "shell"})
_FENCE = re.compile(r"(\s*)(`{3,})\s*(\w*)\s*$")
_EXCUSE = re.compile(r"<!-- not run: (\S.*\S) -->")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_BETWEEN = frozenset({"&&", "||", ";", "|", "&"})


def documents() -> list[Path]:
    """Return every page a user reads."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    return sorted(pages)


@dataclass(frozen=True)
class Block:
    """A fenced block; `excuse` is why it is not run."""

    page: str
    line: int
    language: str
    text: str
    excuse: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Return whether it is commands: said, or plain to see."""
        first = self.text.split(maxsplit=1)[:1]
        return self.language in SHELLS or (not self.language and first == ["radixgate"])


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks, dedented."""
    shown = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").splitlines()
    last = ""
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is None:
            last = lines[at] if lines[at].strip() else last
            at += 1
            continue
        start = at + 1
        at = start
        while at < len(lines) and lines[at].strip() != fence[2]:
            at += 1
        body = [line.removeprefix(fence[1]) for line in lines[start:at]]
        excuse = _EXCUSE.search(last)
        text = "\n".join(body) + "\n"
        yield Block(shown, start, fence[3], text, excuse[1] if excuse else None)
        last = ""
        at += 1


@dataclass
class Command:
    """One simple command: `words` without variables set before it and redirections behind it."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """Return the program's name without its directory."""
        return self.words[0].rpartition("/")[2]


def commands(block: Block) -> Iterator[Command]:
    """Yield a shell block's simple commands in order."""
    for line in _logical_lines(block):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _BETWEEN:
                command = _simple(words)
                if command.words:
                    yield command
                words = []
            else:
                words.append(word)


def _logical_lines(block: Block) -> Iterator[str]:
    """Yield whole commands: continued lines, open quotes and here-documents put together."""
    pending = ""
    lines = iter(block.text.splitlines())
    for raw in lines:
        line = raw
        if block.language == "console":
            if not pending and not line.startswith("$ "):
                continue  # what was printed
            line = line.removeprefix("$ ").removeprefix("> ")
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        heredoc = _HEREDOC.search(pending)
        if heredoc is not None:
            for inner in lines:
                if inner.strip() == heredoc[1]:
                    break
            yield pending[: heredoc.start()]
            pending = ""
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is open
            pending += "\n"
            continue
        if words:
            yield pending
        pending = ""
    assert not pending, f"{block}: a command has no end: {pending}"


def _simple(words: list[str]) -> Command:
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and _VARIABLE.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    kept: list[str] = []
    skip = False
    for word in rest:
        if skip:
            skip = False
        elif word and set(word) <= set("<>&"):
            skip = True
            if kept and kept[-1].isdigit():  # 2>
                kept.pop()
        else:
            kept.append(word)
    return Command(kept, variables)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, code left out."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", text)
    return _LINK.findall(re.sub(r"`[^`\n]*`", "``", text))


def anchors(page: Path) -> set[str]:
    """Return what a link to one of a page's headings may name, as GitHub makes it."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+)$", page.read_text(encoding="utf-8")):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        count = 0
        while (name := slug if not count else f"{slug}-{count}") in found:
            count += 1
        found.add(name)
    return found
