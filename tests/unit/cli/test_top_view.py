from typing import Any
from unicodedata import combining, east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.top_view import (
    BAD,
    WARN,
    Cell,
    Frame,
    Line,
    clean,
    percent,
    plain,
    screen,
    seconds,
    short,
    state,
)


def backend(name: str = "gpu-a", **more: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "up": True,
        "draining": False,
        "breaker": "closed",
        "in_flight": 3,
        "waiting": 0,
        "owed_prefill_s": 0.25,
        "kv_utilization": 0.5,
        "queue_depth": 1,
        "running": 2,
        "hit_tokens_predicted": 12_300,
        "hit_tokens_reported": 12_000,
        "index_blocks": 44,
        "snapshot_age_s": 0.1,
        "prefill_tokens_per_s": 33_000,
    }
    return row | more


def cls(name: str = "chat", **more: Any) -> dict[str, Any]:
    nothing = {"ended_per_s": None, "goodput_per_s": None, "hit_ratio": None}
    row = {
        "name": name,
        "waiting": 0,
        "bucket_tokens": None,
        "admitted": 5,
        "rejected": 0,
        "recent": {**nothing, "ttft_p50_s": None, "ttft_p95_s": None},
        "since_start": {"ttft_p50_s": 0.2, "ttft_p95_s": 1.5},
    }
    return row | more


def request(ident: str = "r-1", **more: Any) -> dict[str, Any]:
    row = {
        "id": ident,
        "at": 1_700_000_000.0,
        "class": "chat",
        "backend": "gpu-a",
        "outcome": None,
        "running": True,
        "hit_tokens": 64,
        "prompt_tokens": 100,
    }
    return row | more


def frame(**more: Any) -> dict[str, Any]:
    value = {
        "version": "1.2.3",
        "policy": "cost",
        "uptime_s": 7300.0,
        "ready": True,
        "backends": [backend("gpu-a"), backend("gpu-b", up=False)],
        "classes": [cls()],
        "requests": [request()],
    }
    return value | more


def text(lines: list[Line]) -> list[str]:
    return ["".join(cell.text for cell in line).rstrip() for line in lines]


def words(value: Frame) -> list[list[str]]:
    return [line.split() for line in plain(value).splitlines()]


def test_plain_text_has_every_column() -> None:
    lines = words(frame())
    assert lines[0] == [
        "Radixgate",
        "1.2.3",
        "policy",
        "cost",
        "up",
        "2",
        "h",
        "1",
        "up,",
        "1",
        "down",
    ]
    assert ["chat", "200ms", "/", "1.50s", "-", "-", "-", "0", "unlimited", "5", "0"] in lines
    shown = [
        "gpu-b",
        "down",
        "3",
        "250ms",
        "50%",
        "0",
        "1",
        "2",
        "12k",
        "/",
        "12k",
        "44",
        "33k",
        "100ms",
    ]
    assert shown in lines
    assert lines[-1][1:] == ["r-1", "chat", "gpu-a", "running", "64", "/", "100", "-", "-", "-"]


def test_waits_of_late_come_before_those_since_the_start() -> None:
    recent = {"ended_per_s": 2.0, "goodput_per_s": 1.5, "hit_ratio": 0.754}
    recent |= {"ttft_p50_s": 0.03, "ttft_p95_s": 0.9}
    lines = words(frame(classes=[cls(recent=recent, bucket_tokens=-5.0, rejected=1200)]))
    assert ["chat", "30ms", "/", "900ms", "75%", "1.5/s", "2.0/s", "0", "0", "5", "1.2k"] in lines


def test_what_was_reported_stands_for_the_hit() -> None:
    done = request(cached_tokens=32, outcome="upstream_error", queue_s=0.5, ttft_s=2.0, total_s=80)
    lines = words(frame(requests=[done]))
    assert lines[-1][1:] == [
        "r-1",
        "chat",
        "gpu-a",
        "upstream_error",
        "32",
        "/",
        "100",
        "500ms",
        "2.00s",
        "80s",
    ]


def test_only_the_last_requests_are_printed() -> None:
    shown = plain(frame(requests=[request(f"r-{n}") for n in range(50)]))
    assert "r-9 " in shown
    assert "r-10 " not in shown


def test_a_gateway_without_anything_is_shown() -> None:
    empty = frame(backends=[], classes=[], requests=[], ready=False)
    assert plain(empty).splitlines()[0].endswith("not ready")
    assert screen(empty, 80, 24)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "up"),
        ({"draining": True}, "draining"),
        ({"up": False}, "down"),
        ({"up": False, "breaker": "open"}, "breaker open"),
        ({"up": False, "breaker": "trial", "draining": True}, "breaker trial"),
    ],
)
def test_a_state_is_the_worst_of_what_is_true(change: dict[str, Any], word: str) -> None:
    assert state(backend(**change)).text == word


def test_trouble_comes_first_on_a_screen_and_nothing_else_moves() -> None:
    rows = [backend("a"), backend("b", in_flight=9), backend("c", draining=True)]
    rows.append(backend("d", up=False))
    lines = text(screen(frame(backends=rows), 100, 40))
    first = [line.split()[0] for line in lines if line[:1] in "abcd" and line[1:2] == " "]
    assert first == ["d", "c", "a", "b"]


def test_a_narrow_screen_keeps_what_matters() -> None:
    lines = text(screen(frame(), 38, 40))
    heading = next(line for line in lines if line.startswith("backend"))
    assert heading.split() == ["backend", "state", "in", "flight", "owed", "KV"]
    assert max(map(len, lines)) <= 38


def test_a_low_screen_says_what_is_missing() -> None:
    rows = [backend(f"gpu-{n}") for n in range(64)]
    lines = text(screen(frame(backends=rows), 100, 24))
    assert len(lines) <= 24
    assert any(line == "... and 51 more backends" for line in lines)
    assert any("r-1" in line for line in lines)


def test_a_note_takes_the_place_of_the_first_line() -> None:
    lines = screen(frame(), 80, 24, Cell("gone; trying again", BAD))
    assert text(lines)[0] == "gone; trying again"
    assert lines[0][0].style == BAD


def test_a_name_cannot_command_the_terminal() -> None:
    evil = "a\x1b]0;owned\x07\x9b31m\r\nb\u202ec"
    value = frame(
        backends=[backend(evil)], classes=[cls(evil)], requests=[request(evil, **{"class": evil})]
    )
    shown = plain(value)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert "a?]0;owned??31m??b?c" in shown


def test_a_full_cache_is_loud() -> None:
    cells = [
        cell
        for line in screen(frame(backends=[backend(kv_utilization=0.97)]), 100, 30)
        for cell in line
    ]
    assert Cell("97%", BAD) in cells
    assert Cell("85%", WARN) not in cells


_NAMES = st.text(max_size=50)


def columns(char: str) -> int:
    """Return the columns of a terminal that a character takes."""
    return 0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1


@given(
    names=st.lists(_NAMES, max_size=40),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
)
def test_a_screen_never_overflows(names: list[str], width: int, height: int) -> None:
    value = frame(
        backends=[backend(name) for name in names],
        classes=[cls(name) for name in names[:5]],
        requests=[request(name) for name in names],
    )
    lines = screen(value, width, height)
    assert len(lines) <= height
    for line in text(lines):
        assert sum(map(columns, line)) <= width
        assert line.isprintable()


@given(_NAMES)
def test_a_cleaned_name_is_short_and_printable(name: str) -> None:
    told = clean(name)
    assert told.isprintable()
    assert len(told) <= 32


@pytest.mark.parametrize(
    ("value", "told"),
    [(None, "-"), (0, "0"), (999, "999"), (1234, "1.2k"), (12_345, "12k"), (3.2e6, "3.2M"), (5e10, "50G")],
)  # fmt: skip
def test_counts_are_short(value: float | None, told: str) -> None:
    assert short(value) == told


def test_durations_and_shares_are_told_in_their_unit() -> None:
    assert [seconds(s) for s in (None, 0.0, 0.0123, 0.9996, 9.994, 123.4)] == [
        "-",
        "0ms",
        "12ms",
        "1.00s",
        "9.99s",
        "123s",
    ]
    assert [percent(None), percent(0.126)] == ["-", "13%"]
