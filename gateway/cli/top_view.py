"""What `radixgate top` shows of a frame of `/events`, as lines of styled text that fit a terminal.

Knows no terminal and no library. Must never pass on a control character: names come from
configuration, engines and clients, and a terminal obeys what it is sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from unicodedata import combining, east_asian_width

Frame = Mapping[str, Any]
_GAP = "  "
_NAME_MAX = 32
_NONE = "-"
_BLANK_LINES = 2  # between the three tables
_LAST_REQUESTS = 10  # printed
_LEAST_REQUESTS = 4  # lines left for the last requests, title and heading included

GOOD, WARN, BAD, SOFT, BOLD = "green", "yellow", "red", "dim", "bold"


class Cell(NamedTuple):
    """A piece of a line; `style` is a colour or weight, or nothing."""

    text: str
    style: str = ""


Line = list[Cell]


@dataclass(slots=True, frozen=True)
class _Column:
    """`keep` = how long it stays where there is little room; the highest stay longest."""

    name: str
    keep: int
    read: Callable[[Frame], Cell | str]
    left: bool = False


def clean(name: object) -> str:
    """Return a name without anything that a terminal would obey, and not too long."""
    text = "".join(char if char.isprintable() else "?" for char in str(name))
    return text if len(text) <= _NAME_MAX else text[: _NAME_MAX - 1] + "…"


def short(value: float | None) -> str:
    """Return a count in at most five characters."""
    if value is None:
        return _NONE
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size:
            return f"{value / size:.0f}{unit}"
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def seconds(value: float | None) -> str:
    """Return a duration."""
    if value is None:
        return _NONE
    if value < 0.9995:
        return f"{value * 1000:.0f}ms"
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s"


def percent(share: float | None) -> str:
    """Return a share."""
    return _NONE if share is None else f"{share:.0%}"


def state(backend: Frame) -> Cell:
    """Return what a backend is, in a word."""
    if backend["breaker"] != "closed":
        return Cell(f"breaker {clean(backend['breaker'])}", BAD)
    if not backend["up"]:
        return Cell("down", BAD)
    return Cell("draining", WARN) if backend["draining"] else Cell("up", GOOD)


def header(frame: Frame) -> Line:
    """Return the first line."""
    states = [state(backend).text for backend in frame["backends"]]
    tally = ", ".join(f"{states.count(word)} {word}" for word in dict.fromkeys(states))
    ready = [] if frame["ready"] else [Cell("  not ready", BAD)]
    about = f"  {clean(frame['version'])}  policy {clean(frame['policy'])}  up "
    return [
        Cell("Radixgate", BOLD),
        Cell(about + _uptime(frame["uptime_s"]) + f"  {tally}"),
        *ready,
    ]


def plain(frame: Frame) -> str:
    """Return all of a frame as text, whatever its width."""
    lines = [header(frame)]
    requests = _requests(frame)[: _LAST_REQUESTS + 1]
    for table in (_classes(frame), _backends(frame), requests):
        lines += [[], *table] if table else []
    return "\n".join("".join(cell.text for cell in line).rstrip() for line in lines)


def screen(frame: Frame, width: int, height: int, note: Cell | None = None) -> list[Line]:
    """Return what fits `width` and `height`: classes, then backends, trouble first, then requests."""
    lines = [header(frame) if note is None else [note]]
    classes = _classes(frame, width)
    room = height - len(lines) - len(classes) - _BLANK_LINES
    backends = _cut(_backends(frame, width), max(3, room - _LEAST_REQUESTS), "backends")
    requests = _requests(frame, width)[: max(0, room - len(backends))]
    for table in (classes, backends, requests):
        lines += [*([[]] if table is not classes else []), *table] if table else []
    return [_clipped(line, width) for line in lines[:height]]


def _classes(frame: Frame, width: int | None = None) -> list[Line]:
    return _table(_CLASS, frame["classes"], width)


def _backends(frame: Frame, width: int | None = None) -> list[Line]:
    rows = sorted(frame["backends"], key=_trouble) if width is not None else frame["backends"]
    return _table(_BACKEND, rows, width)


def _requests(frame: Frame, width: int | None = None) -> list[Line]:
    return _table(_REQUEST, frame["requests"], width) if frame["requests"] else []


def _trouble(backend: Frame) -> int:
    """Sort key: what needs a look first; the rest keep their places, so that nothing jumps."""
    return (BAD, WARN, GOOD).index(state(backend).style)


def _cut(table: list[Line], most: int, what: str) -> list[Line]:
    """Keep the heading and as many rows as there is room for, and say what is missing."""
    if len(table) <= most:
        return table
    return [*table[: most - 1], [Cell(f"... and {len(table) - most + 1} more {what}", SOFT)]]


def _table(columns: Sequence[_Column], rows: Iterable[Frame], width: int | None) -> list[Line]:
    """Return heading and rows, aligned; with a width, without the columns that have no room."""
    made = [[_cell(column.read(row)) for column in columns] for row in rows]
    heads = [[Cell(column.name, SOFT) for column in columns], *made]
    widths = [max(_width(cell.text) for cell in column) for column in zip(*heads, strict=True)]
    kept = _that_fit(columns, widths, width)
    return [
        [
            part
            for place, i in enumerate(kept)
            for part in _padded(line[i], widths[i], columns[i].left, first=not place)
        ]
        for line in heads
    ]


def _that_fit(columns: Sequence[_Column], widths: Sequence[int], width: int | None) -> list[int]:
    """Return the columns that have room, by place; the first always has."""
    kept = list(range(len(columns)))
    while (
        width is not None
        and len(kept) > 1
        and sum(widths[i] for i in kept) + len(_GAP) * (len(kept) - 1) > width
    ):
        kept.remove(min(kept[1:], key=lambda i: columns[i].keep))
    return kept


def _padded(cell: Cell, width: int, left: bool, *, first: bool) -> Line:
    space = " " * (width - _width(cell.text))
    before = ("" if first else _GAP) + ("" if left else space)
    return [Cell(before), cell, Cell(space if left else "")]


def _clipped(line: Line, width: int) -> Line:
    """Cut a line that is too long."""
    room = width
    kept = []
    for cell in line:
        text = cell.text
        while _width(text) > room:
            text = text[:-1]
        room -= _width(text)
        kept.append(Cell(text, cell.style))
    return kept


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def _cell(value: Cell | str) -> Cell:
    return Cell(value) if isinstance(value, str) else value


def _uptime(value: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= size:
            return f"{value // size:.0f} {unit}"
    return f"{value:.0f} s"


def _ttft(row: Frame) -> str:
    """Return the class's times to first token: of late, or else since the start."""
    told = row["recent"] if row["recent"]["ttft_p95_s"] is not None else row["since_start"]
    return f"{seconds(told['ttft_p50_s'])} / {seconds(told['ttft_p95_s'])}"


def _each_s(rate: float | None) -> str:
    return _NONE if rate is None else f"{rate:.1f}/s"


def _kv(row: Frame) -> Cell:
    share = row["kv_utilization"]
    style = "" if share is None or share < 0.8 else WARN if share < 0.95 else BAD
    return Cell(percent(share), style)


def _bucket(row: Frame) -> str:
    return "unlimited" if row["bucket_tokens"] is None else short(max(0.0, row["bucket_tokens"]))


def _outcome(row: Frame) -> Cell:
    outcome = row["outcome"]
    if outcome is None:
        return Cell("running" if row["running"] else _NONE, SOFT)
    soft = {"ok": GOOD, "client_closed": "", "rejected_rate": WARN, "rejected_full": WARN}
    return Cell(clean(outcome), soft.get(outcome, BAD))


def _hit(row: Frame) -> str:
    cached = row.get("cached_tokens")
    hit = row.get("hit_tokens") if cached is None else cached
    return f"{short(hit)} / {short(row.get('prompt_tokens'))}"


_CLASS = (
    _Column("class", 9, lambda c: Cell(clean(c["name"]), BOLD), left=True),
    _Column("TTFT p50 / p95", 8, _ttft),
    _Column("hits", 7, lambda c: percent(c["recent"]["hit_ratio"])),
    _Column("goodput", 6, lambda c: _each_s(c["recent"]["goodput_per_s"])),
    _Column("ended", 2, lambda c: _each_s(c["recent"]["ended_per_s"])),
    _Column("waiting", 5, lambda c: short(c["waiting"])),
    _Column("bucket", 1, _bucket),
    _Column("admitted", 3, lambda c: short(c["admitted"])),
    _Column("refused", 4, lambda c: Cell(short(c["rejected"]), WARN if c["rejected"] else "")),
)

_BACKEND = (
    _Column("backend", 19, lambda b: Cell(clean(b["name"]), BOLD), left=True),
    _Column("state", 18, state, left=True),
    _Column("in flight", 17, lambda b: short(b["in_flight"])),
    _Column("owed", 16, lambda b: seconds(b["owed_prefill_s"])),
    _Column("KV", 15, _kv),
    _Column("held", 11, lambda b: short(b["waiting"])),
    _Column("queue", 13, lambda b: short(b["queue_depth"])),
    _Column("running", 12, lambda b: short(b["running"])),
    _Column(
        "hits predicted / reported",
        10,
        lambda b: f"{short(b['hit_tokens_predicted'])} / {short(b['hit_tokens_reported'])}",
    ),
    _Column("blocks", 7, lambda b: short(b["index_blocks"])),
    _Column("prefill tok/s", 8, lambda b: short(b["prefill_tokens_per_s"])),
    _Column("scraped", 6, lambda b: seconds(b["snapshot_age_s"])),
)

_REQUEST = (
    _Column(
        "time",
        6,
        lambda r: datetime.fromtimestamp(r["at"]).strftime("%H:%M:%S"),  # noqa: DTZ006 - the reader's own clock
        left=True,
    ),
    _Column("request", 3, lambda r: clean(r["id"]), left=True),
    _Column("class", 5, lambda r: clean(r["class"]), left=True),
    _Column("backend", 9, lambda r: clean(r["backend"] or _NONE), left=True),
    _Column("outcome", 8, _outcome, left=True),
    _Column("hit / prompt", 7, _hit),
    _Column("queue", 1, lambda r: seconds(r.get("queue_s"))),
    _Column("TTFT", 4, lambda r: seconds(r.get("ttft_s"))),
    _Column("total", 2, lambda r: seconds(r.get("total_s"))),
)
