"""What only vLLM exports: KV use and queue depth, seen through the gateway's status and metrics."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from tests.e2e.conftest import VLLM
from tests.e2e.fleet import (
    MODEL,
    Answer,
    Fleet,
    Gateway,
    TinyModel,
    eventually,
    fetch,
    start_gateway,
)
from tests.e2e.talk import ask, cached_tokens, chat, opening

pytestmark = pytest.mark.parametrize("engine", [VLLM], indirect=True, scope="session")
# a replica of the fleet runs eight requests at once: when the first eight end, others still wait
FLOOD = 24
BLOCK_TOKENS = 32  # of run_replicas.py: vLLM has none smaller on a CPU


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


@pytest.fixture(scope="module")
def following(
    fleet: Fleet, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """Run a gateway that reads the replicas' KV events; the replicas have served before."""
    folder = tmp_path_factory.mktemp("following")
    rows = [{"url": replica.url, "kv_events": replica.events} for replica in fleet.replicas]
    model = {"name": MODEL, "tokenizer": str(tiny_model.directory), "backends": rows}
    config = folder / "gateway.yaml"
    config.write_bytes(orjson.dumps({"models": [model]}))
    with start_gateway([str(config)], folder) as running:
        eventually(lambda: modes(running) == {"exact"}, what="both replicas exact")
        yield running


def events(gateway: Gateway) -> dict[str, dict[str, Any]]:
    return {name: row["kv_events"] for name, row in gateway.backends().items()}


def modes(gateway: Gateway) -> set[str]:
    return {row["mode"] for row in events(gateway).values()}


def hits(gateway: Gateway, body: dict[str, Any]) -> dict[str, int]:
    """What of a request each replica is predicted to hold."""
    path = gateway.admin + "/explain?path=/v1/chat/completions"

    def exact() -> dict[str, int]:
        rows = fetch(path, method="POST", body=body).json()["backends"]
        if {row["index"] for row in rows} != {"exact"}:
            return {}  # the gateway has just learnt the engines' block size and begins again
        return {row["name"]: row["hit_tokens"] for row in rows}

    return eventually(exact, what="an exact index")


def heard_of(gateway: Gateway, messages: list[dict[str, Any]], answer: Answer) -> None:
    """Wait for the engine's events of a request: they come after its answer on a busy machine."""
    usage = answer.json()["usage"]
    full = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    name = answer.headers["x-gateway-backend"]
    eventually(
        lambda: hits(gateway, chat(messages))[name] >= full, what="the prompt among the events"
    )


def test_vllm_cache_is_known_by_its_events_whoever_filled_it(
    following: Gateway, fleet: Fleet
) -> None:
    body = chat(opening(2000), max_tokens=4)
    other = fleet.replicas[1]
    before = hits(following, body)
    assert fetch(other.url + "/v1/chat/completions", method="POST", body=body).status == 200
    eventually(
        lambda: hits(following, body)[other.name] > 400,
        what="the prompt in the index of the replica that was asked",
    )
    after = hits(following, body)
    answer = ask(following, opening(2000))

    assert after["backend-1"] == before["backend-1"]
    assert answer.headers["x-gateway-backend"] == other.name
    assert cached_tokens(answer.json()["usage"]) == after[other.name]


def test_vllm_hits_are_predicted_to_the_token_while_the_cache_evicts(
    following: Gateway,
) -> None:
    """More conversations than two caches of 32,768 tokens hold, round and round."""
    removed = sum(row["events"] for row in events(following).values())
    seen = []
    for number in range(360):
        messages = opening(3000 + (number * 7) % (150 if number % 3 else 9))
        answer = ask(following, messages)
        predicted = int(answer.headers["x-gateway-prefix"].partition("/")[0])
        seen.append((predicted, cached_tokens(answer.json()["usage"])))
        heard_of(following, messages, answer)

    assert sum(cached for _, cached in seen) > 0
    off = sum(abs(predicted - cached) for predicted, cached in seen)
    assert off <= 0.01 * sum(cached for _, cached in seen)
    told = events(following)
    assert sum(row["events"] for row in told.values()) > removed
    assert {row["losses"] for row in told.values()} == {0}
    assert {row["unreadable"] for row in told.values()} == {0}
    assert {row["unknown_blocks"] for row in told.values()} == {0}
    rows = following.metrics()["gateway_backend_index_exact"]
    assert [value for _, value in rows] == [1.0, 1.0]


def test_vllm_cache_salts_are_told_apart_by_its_events(following: Gateway) -> None:
    def salted(salt: str) -> dict[str, Any]:
        return chat(opening(2500), max_tokens=4, cache_salt=salt)

    path = following.url + "/v1/chat/completions"
    assert fetch(path, method="POST", body=salted("one")).status == 200
    eventually(lambda: max(hits(following, salted("one")).values()) > 400, what="the salted prompt")

    assert max(hits(following, salted("two")).values()) == 0
    answer = fetch(path, method="POST", body=salted("two"))
    assert cached_tokens(answer.json()["usage"]) == 0
