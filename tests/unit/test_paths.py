from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.core.types import Snapshot
from gateway.watch.exposition import Reading, wanted
from gateway.watch.paths import WHOLE, MetricsPath

READING = Reading("vllm", Snapshot(at=1.0, kv_utilization=0.5, start_time=9.0))
LATER = Reading("vllm", Snapshot(at=2.0, running=3, kv_utilization=0.7, start_time=9.0))
LESS = Reading("vllm", replace(LATER.snapshot, start_time=None))


def settled() -> MetricsPath:
    path = MetricsPath()
    path.took(READING)
    path.took(LATER)
    return path


def test_whole_page_is_asked_first() -> None:
    assert MetricsPath().path == WHOLE


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_short_page_names_what_is_read(engine: str) -> None:
    path = MetricsPath()
    path.took(replace(READING, engine=engine))

    assert path.is_short
    url = urlsplit(path.path)
    assert url.path == "/metrics/"
    assert parse_qs(url.query)["name[]"] == wanted(engine)


def test_short_page_that_tells_the_same_is_kept() -> None:
    path = settled()

    assert path.took(READING)
    assert path.is_short


@pytest.mark.parametrize("answer", [None, LESS, Reading("sglang", LATER.snapshot)])
def test_short_page_that_tells_less_is_given_up(answer: Reading | None) -> None:
    path = MetricsPath()
    path.took(READING)
    assert not path.took(answer)

    assert path.path == WHOLE
    assert path.took(READING)
    assert path.path == WHOLE


@pytest.mark.parametrize("answer", [None, LESS])
def test_change_at_the_backend_starts_over(answer: Reading | None) -> None:
    path = settled()
    path.took(answer)
    assert path.path == WHOLE

    path.took(LESS)
    assert path.is_short
    path.took(LESS)
    assert path.is_short


def test_whole_page_that_vanished_is_looked_at_anew() -> None:
    path = MetricsPath()
    path.took(READING)
    path.took(None)
    path.took(None)
    path.took(READING)

    assert path.is_short


def test_llamacpp_is_asked_for_the_whole_page() -> None:
    path = MetricsPath()
    for _ in range(3):
        path.took(replace(READING, engine="llamacpp"))

    assert path.path == WHOLE
