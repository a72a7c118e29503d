"""What only vLLM exports: KV use and queue depth, seen through the gateway's status and metrics."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import VLLM
from tests.e2e.fleet import MODEL, Answer, Fleet, Gateway, eventually, fetch
from tests.e2e.talk import ask, cached_tokens, chat, opening

pytestmark = pytest.mark.parametrize("engine", [VLLM], indirect=True, scope="session")
# a replica of the fleet runs eight requests at once: the other four wait
FLOOD = 12


@contextmanager
def flood(url: str) -> Iterator[list["Future[Answer]"]]:
    """Send more long requests straight to one engine than it can run at once."""
    path = url + "/v1/chat/completions"
    bodies = [chat(opening(900 + i), max_tokens=300, ignore_eos=True) for i in range(FLOOD)]
    with ThreadPoolExecutor(FLOOD) as pool:
        yield [pool.submit(fetch, path, method="POST", body=body) for body in bodies]


def test_another_clients_load_on_vllm_is_seen_by_the_gateway(
    gateway: Gateway, fleet: Fleet
) -> None:
    busy, calm = (replica.name for replica in fleet.replicas)

    with flood(fleet.urls[0]) as answers:
        seen = eventually(
            lambda: [
                row
                for name, row in gateway.backends().items()
                if name == busy and row["queue_depth"] and row["kv_utilization"] and row["running"]
            ],
            what="queue depth, KV use and running requests of the busy backend in /status",
        )
        elsewhere = ask(gateway, opening(950)).headers["x-gateway-backend"]
        assert {answer.result().status for answer in answers} == {200}

    assert 0 < seen[0]["kv_utilization"] <= 1
    assert seen[0]["running"] <= 8
    assert elsewhere == calm
    eventually(lambda: not gateway.backends()[busy]["queue_depth"], what="an empty queue")


def test_vllm_metrics_carry_kv_use_and_queue_depth_of_every_replica(
    gateway: Gateway, fleet: Fleet
) -> None:
    rows = gateway.metrics()

    names = {replica.name for replica in fleet.replicas}
    for metric in ("gateway_backend_kv_utilization", "gateway_backend_queue_depth"):
        assert {labels["backend"] for labels, _ in rows[metric]} == names


def test_vllm_messages_second_turn_reads_its_own_prefix_from_cache(gateway: Gateway) -> None:
    url = gateway.url + "/v1/messages"
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0,
        "system": opening(960)[0]["content"],
        "messages": [{"role": "user", "content": "Which stream is stale?"}],
    }

    first = fetch(url, method="POST", body=body)
    second = fetch(url, method="POST", body=body)

    assert (first.status, second.status) == (200, 200)
    assert first.json()["type"] == "message"
    assert second.headers["x-gateway-backend"] == first.headers["x-gateway-backend"]
    counted = fetch(url + "/count_tokens", method="POST", body=body)
    assert counted.json()["input_tokens"] > 400


def test_vllm_predictions_never_exceed_what_is_reported_by_much(gateway: Gateway) -> None:
    messages = opening(970)
    ask(gateway, messages)

    again = ask(gateway, messages)

    predicted, _ = map(int, again.headers["x-gateway-prefix"].split("/"))
    reported = cached_tokens(again.json()["usage"])
    assert reported > 0
    assert abs(predicted - reported) <= reported * 0.2
