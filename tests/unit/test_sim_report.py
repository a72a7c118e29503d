"""Figures of a run: what counts, what does not, and the keys scripts read."""

import pytest

from gateway.core.settings import Slo
from gateway.sim.report import SLOS, Record, Result, quantile, summarise

KEYS = [
    "requests",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "tpot_p95_s",
    "e2e_mean_s",
    "slo_ratio",
    "goodput_rps",
    "hit_rate",
    "imbalance",
    "refused",
]


def ok(
    ttft: float, *, cls: str = "chat", tpot: float = 0.01, cached: int = 0, on: str = "a"
) -> Record:
    return Record(
        cls=cls,
        sent_at=0.0,
        result=Result.OK,
        ttft_s=ttft,
        tpot_s=tpot,
        total_s=ttft + 1,
        prompt_tokens=100,
        cached_tokens=cached,
        backend=on,
    )


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.95, 10), (1.0, 10)])
def test_quantile_is_the_nearest_rank(q: float, expected: int) -> None:
    assert quantile(range(1, 11), q) == expected


def test_quantile_of_nothing_is_nothing() -> None:
    assert quantile([], 0.5) is None


def test_goodput_counts_requests_inside_both_targets() -> None:
    late, slow = ok(SLOS["chat"].ttft_s + 0.1), ok(0.1, tpot=0.2)

    figures = summarise([ok(0.1), late, slow], 10.0, {})

    assert figures["goodput_rps"] == 0.1
    assert figures["slo_ratio"] == pytest.approx(1 / 3, abs=1e-4)


def test_refused_and_failed_requests_miss_their_target_but_have_no_ttft() -> None:
    bad = [Record("chat", 0.0, Result.REFUSED), Record("chat", 0.0, Result.FAILED)]

    figures = summarise([ok(0.1), *bad], 1.0, {})

    assert (figures["refused"], figures["failed"], figures["requests"]) == (1, 1, 3)
    assert figures["ttft_p99_s"] == 0.1
    assert figures["slo_ratio"] == pytest.approx(1 / 3, abs=1e-4)


def test_a_cut_request_counts_only_when_it_was_already_too_late() -> None:
    young = Record("chat", 0.0, waited_s=0.5)
    overdue = Record("chat", 0.0, waited_s=9.0)
    decoding = Record("chat", 0.0, waited_s=9.0, ttft_s=0.1)

    figures = summarise([young, overdue, decoding], 1.0, {})

    assert figures["requests"] == 1
    assert figures["ttft_p50_s"] == 9.0
    assert figures["slo_ratio"] == 0.0


def test_hit_rate_weighs_tokens_and_imbalance_uncached_work() -> None:
    figures = summarise([ok(0.1, cached=90, on="a"), ok(0.1, cached=70, on="b")], 1.0, {})

    assert figures["hit_rate"] == 0.8
    assert figures["imbalance"] == 1.5


def test_the_contracts_keys_are_there_in_total_and_per_class() -> None:
    figures = summarise([ok(0.1), ok(0.2, cls="coding")], 1.0, {"policy": "cost"})

    assert set(figures["classes"]) == {"chat", "coding"}
    for part in (figures, *figures["classes"].values()):
        assert part["policy"] == "cost"
        assert set(KEYS) <= set(part)
    assert figures["classes"]["coding"]["ttft_p50_s"] == 0.2


def test_no_requests_give_no_figures_rather_than_zeros() -> None:
    figures = summarise([], 1.0, {})

    assert figures["requests"] == 0
    assert figures["ttft_p95_s"] is None
    assert figures["hit_rate"] is None


def test_within_needs_a_first_token() -> None:
    assert not Record("chat", 0.0, Result.OK).within(Slo())
