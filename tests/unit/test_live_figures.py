from typing import Any

import pytest

from gateway.core.settings import Slo
from gateway.core.types import Decided, Outcome
from gateway.edge.live_figures import POINTS, ROWS, WINDOW, Figures, within
from gateway.telemetry.record import RequestRecord

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
SLOS = {"chat": SLO, "coding": SLO}


def ended(ident: str = "r", cls: str | None = "chat", **more: Any) -> RequestRecord:
    record = RequestRecord(ident, "/v1/chat/completions", 10.0, cls, "m", "a")
    values: dict[str, Any] = {
        "outcome": Outcome.OK,
        "ttft_s": 0.5,
        "total_s": 1.5,
        "prompt_tokens": 100,
        "predicted_tokens": 40,
        "completion_tokens": 11,
        "stream": True,
    }
    for name, value in (values | more).items():
        setattr(record, name, value)
    return record


def decided(ident: str, at: float) -> Decided:
    return Decided(ident, "chat", "a", 40, 100, at)


def watched(*records: RequestRecord, now: float = 2.0) -> Figures:
    figures = Figures()
    figures.begin(0.0)
    for record in records:
        figures.note(record)
    figures.tick(SLOS, now)
    return figures


@pytest.mark.parametrize(
    ("change", "inside"),
    [
        ({}, True),
        ({"outcome": Outcome.CLIENT_CLOSED}, False),
        ({"ttft_s": 1.1}, False),
        ({"ttft_s": None}, True),
        ({"total_s": 1.6}, False),  # 0.11 s a token
        ({"total_s": 1.6, "stream": False}, True),
        ({"total_s": 9.0, "completion_tokens": 1}, True),
    ],
)
def test_goodput_is_what_meets_both_targets(change: dict[str, Any], inside: bool) -> None:
    assert within(ended(**change), SLO) is inside


def test_a_tick_becomes_a_point_of_its_class() -> None:
    figures = watched(ended(), ended(ttft_s=1.5), ended(cls="unknown"))
    assert figures.point("chat") == (1.0, 0.4, 0.5, 1.0)
    assert figures.point("coding") == (None, None, 0.0, 0.0)
    assert figures.points().keys() == SLOS.keys()


def test_what_the_engine_reports_is_believed_before_what_was_predicted() -> None:
    point = watched(ended(cached_tokens=80), ended()).point("chat")
    assert point is not None
    assert point[1] == 0.6


def test_the_window_covers_its_ticks_and_no_more() -> None:
    figures = watched(ended(ttft_s=0.9))
    assert figures.recent("chat")["ttft_p95_s"] == 0.9
    for tick in range(WINDOW):
        figures.tick(SLOS, 3.0 + tick)
    assert figures.recent("chat") == {
        "ended_per_s": 0.0,
        "goodput_per_s": 0.0,
        "hit_ratio": None,
        "ttft_p50_s": None,
        "ttft_p95_s": None,
    }


def test_quantiles_are_values_that_were_seen() -> None:
    figures = watched(*(ended(ttft_s=n / 100) for n in range(1, 101)))
    recent = figures.recent("chat")
    assert (recent["ttft_p50_s"], recent["ttft_p95_s"]) == (0.5, 0.95)
    assert recent["ended_per_s"] == 50.0


def test_a_flood_of_requests_keeps_every_table_small() -> None:
    figures = Figures()
    figures.begin(0.0)
    for tick in range(POINTS + 10):
        for n in range(150):
            figures.note(ended(f"{tick}-{n}"))
        figures.tick(SLOS, 1.0 + tick)
    assert len(figures.points()["chat"]) == POINTS
    assert len(figures.rows([])) == ROWS
    series = figures._series["chat"]
    assert len(series.tallies) == WINDOW
    assert max(len(tally.waits_s) for _, tally in series.tallies) <= 128
    one = ended()
    for _ in range(20_000):
        figures.note(one)
    assert len(figures._ended) == 8192


def test_a_class_that_left_is_forgotten() -> None:
    figures = watched(ended())
    figures.tick({"coding": SLO}, 3.0)
    assert figures.points().keys() == {"coding"}
    assert figures.point("chat") is None
    assert figures.recent("chat")["ended_per_s"] is None


def test_a_watch_that_begins_again_keeps_the_lines_with_a_gap() -> None:
    figures = watched(ended())
    figures.note(ended())
    figures.begin(100.0)
    figures.tick(SLOS, 101.0)
    points = figures.points()["chat"]
    assert points[1] is None
    assert points[2] == (None, None, 0.0, 0.0)  # what ended unread belongs to no tick


def test_a_watch_that_ends_keeps_no_request() -> None:
    figures = watched(ended("read"))
    figures.note(ended("unread"))
    figures.end()
    figures.tick(SLOS, 3.0)
    assert [row["id"] for row in figures.rows([])] == ["read"]


def test_rows_tell_how_requests_ended_and_which_are_under_way() -> None:
    figures = watched(ended("done", queue_s=0.25))
    rows = figures.rows([decided("new", 11.0), decided("done", 10.0), decided("old", -5.0)])
    told = [(row["id"], row["outcome"], row["running"]) for row in rows]
    assert told == [("new", None, True), ("done", "ok", False), ("old", None, False)]
    assert (rows[1]["queue_s"], rows[1]["hit_tokens"], rows[1]["prompt_tokens"]) == (0.25, 40, 100)


def test_an_id_used_again_is_under_way_again() -> None:
    figures = watched(ended("r"))  # from 10.0 to 11.5
    rows = figures.rows([decided("r", 12.0)])
    assert [(row["id"], row["running"]) for row in rows] == [("r", True), ("r", False)]


def test_rows_never_tell_of_what_came_to_no_class() -> None:
    assert watched(ended(cls=None)).rows([]) == []


def test_half_the_rows_are_ended_requests_where_many_are_under_way() -> None:
    figures = watched(*(ended(f"done-{n}") for n in range(ROWS)))
    rows = figures.rows([decided(f"new-{n}", 20.0) for n in range(ROWS)])
    assert len(rows) == ROWS
    assert sum(row["outcome"] == "ok" for row in rows) == ROWS // 2
    assert rows[0]["running"]
