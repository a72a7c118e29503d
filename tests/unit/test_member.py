import pytest

from gateway.watch.member import Verdict, judge


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Verdict.UP),
        (204, Verdict.UP),
        (401, Verdict.UP),
        (403, Verdict.UP),
        (405, Verdict.UP),
        (429, Verdict.UP),
        (503, Verdict.DOWN),
        (404, Verdict.ASK_MODELS),
        (501, Verdict.ASK_MODELS),
        (301, Verdict.DOUBTFUL),
        (500, Verdict.DOUBTFUL),
        (502, Verdict.DOUBTFUL),
        (504, Verdict.DOUBTFUL),
    ],
)
def test_status_of_a_health_route_means(status: int, verdict: Verdict) -> None:
    assert judge(status) is verdict
