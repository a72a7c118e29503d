"""One number for how full: the fullest of prefill owed, KV cache and sequences."""

from math import inf

import pytest

from gateway.core import saturation
from gateway.core.settings import EngineProfile
from tests.core_kit import account, query, ticket_for

PROFILE = EngineProfile(kv_tokens=10_000, max_sequences=4)


def test_an_idle_backend_is_not_saturated() -> None:
    assert saturation.of_backend(account(profile=PROFILE), 0.5, 0.97) == 0.0


def test_prefill_owed_and_waiting_counts_over_w() -> None:
    row = account(profile=PROFILE)
    row.owed_ns = int(0.3e9)
    row.held_s = 1.2
    assert saturation.of_backend(row, 0.5, 0.97) == pytest.approx(3.0)
    assert saturation.of_backend(row, 0.0, 0.97) > 1000


def test_the_kv_cache_counts_over_what_requests_may_fill() -> None:
    row = account(profile=PROFILE)
    row.kv_tokens = 4850
    assert saturation.of_backend(row, 0.5, 0.97) == pytest.approx(0.5)


def test_sequences_count_over_what_the_engine_takes() -> None:
    row = account(profile=PROFILE)
    for ident in range(3):
        ticket = ticket_for(query((f"p{ident}", 64)), row, ident + 1)
        ticket.prefill_s = 0.0
        row.place(ticket, 0.0)
    assert saturation.of_backend(row, 0.5, 0.97) == 0.75


def test_a_pool_is_the_mean_of_those_that_may_be_chosen() -> None:
    rows = [account() for _ in range(4)]
    rows[2].up = False
    rows[3].draining = True
    values = {id(row): value for row, value in zip(rows, (0.2, 0.6, 9.0, 9.0), strict=True)}
    assert saturation.of_pool(rows, lambda row: values[id(row)]) == pytest.approx(0.4)
    assert saturation.of_pool(rows[2:], lambda _: 0.0) == inf
