"""The Locust file against a running gateway."""

from tests.e2e.fleet import Fleet, Gateway
from tests.integration.test_loadtest import run_locust


def test_locusts_users_are_all_served_through_the_gateway(gateway: Gateway, fleet: Fleet) -> None:
    code, rows = run_locust(gateway.url, seconds=4)

    assert code == 0, rows
    for name in ("coding", "chat"):
        asked = rows["POST", name]["num_requests"]
        assert asked > 0
        assert rows["TTFT", name]["num_requests"] == asked
        assert rows["ITL", name]["num_requests"] > asked
    served = {row["backend"] for row, count in gateway.metrics()["gateway_requests_total"] if count}
    assert {replica.name for replica in fleet.replicas} <= served
