"""Cases R22 and R23 of the poller, D57 of the core: what a slow, big or silent metrics page does."""

from statistics import fmean
from time import process_time

import pytest

from gateway.core.types import Snapshot
from gateway.watch import exposition
from gateway.watch.member import Pace
from tests.core_kit import admit, dispatcher, query
from tests.integration.watch_rig import VLLM_PAGE

INTERVAL_S = Pace().interval_s


def cpu_s(page: bytes) -> float:
    """CPU seconds of one reading: the best of some, what the machine does meanwhile left out."""
    best = float("inf")
    for _ in range(7):
        began = process_time()
        assert exposition.read(page, 1.0) is not None
        best = min(best, process_time() - began)
    return best


def test_r22_a_page_of_5000_series_costs_a_small_part_of_a_core() -> None:
    rows = b"".join(
        b'vllm:request_success_total{engine="%d",model_name="m",reason="stop"} %d.0\n' % (n, n)
        for n in range(5_000)
    )
    share = cpu_s(VLLM_PAGE + rows) / INTERVAL_S

    assert share < 0.05


@pytest.mark.parametrize("name", ["gpu_cache_usage_perc", "kv_cache_usage_perc"])
@pytest.mark.parametrize("engines", [1, 2, 8])
def test_r23_the_old_and_the_new_name_are_read_of_every_engine(name: str, engines: int) -> None:
    used = [(n + 1) / 10 for n in range(engines)]
    page = "".join(
        f'vllm:{name}{{engine="{n}",model_name="m"}} {share}\n'
        f'vllm:num_requests_waiting{{engine="{n}",model_name="m"}} {n}.0\n'
        for n, share in enumerate(used)
    )
    found = exposition.read(page.encode(), 1.0)

    assert found is not None
    assert found.snapshot.kv_utilization == pytest.approx(fmean(used))
    assert found.snapshot.waiting == sum(range(engines))


def test_d57_a_backend_that_tells_nothing_any_more_is_taken_to_be_as_loaded_as_the_others() -> None:
    core = dispatcher(3, policy="least_requests")
    for name in ("b0", "b1", "b2"):
        core.observe(name, Snapshot(at=0.0, running=20), 0.0)
    for name in ("b1", "b2"):
        core.observe(name, Snapshot(at=10.0, running=20), 10.0)
    tickets = [admit(core, query((f"p{i}", 640)), 10.1) for i in range(30)]

    chosen = [ticket.backend for ticket in tickets]
    assert {name: chosen.count(name) for name in set(chosen)} == {"b0": 10, "b1": 10, "b2": 10}


def test_d57_it_is_believed_again_with_its_next_page() -> None:
    core = dispatcher(2, policy="least_requests")
    core.observe("b0", Snapshot(at=0.0, running=20), 0.0)
    core.observe("b1", Snapshot(at=10.0, running=20), 10.0)
    admit(core, query(("x", 640)), 10.1)
    core.observe("b0", Snapshot(at=10.2, running=1), 10.2)
    chosen = [admit(core, query((f"p{i}", 640)), 10.3).backend for i in range(10)]

    assert chosen == ["b0"] * 10


def test_d57_while_nobody_tells_anything_our_own_counts_decide() -> None:
    core = dispatcher(2, policy="least_requests")
    core.observe("b0", Snapshot(at=0.0, running=90), 0.0)
    core.observe("b1", Snapshot(at=0.0, running=1), 0.0)
    chosen = [admit(core, query((f"p{i}", 640)), 10.0).backend for i in range(10)]

    assert chosen.count("b0") == 5
