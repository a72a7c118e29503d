"""Prefix routing and its figures, judged by what real engines report."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.e2e.fleet import MODEL, Fleet, Gateway, eventually, fetch
from tests.e2e.talk import ask, cached_tokens, chat, opening

CONVERSATIONS = 6
# 64: two vLLM blocks of 32 tokens, the generation prompt and a ragged end
LOST_TOKENS = 64
METRICS = {
    "gateway_requests_total": {"class", "model", "backend", "outcome"},
    "gateway_request_seconds_count": {"class", "model"},
    "gateway_ttft_seconds_count": {"class", "model"},
    "gateway_itl_seconds_count": {"class", "model"},
    "gateway_queue_seconds_count": {"class", "model"},
    "gateway_prompt_tokens_total": {"class", "model", "backend"},
    "gateway_completion_tokens_total": {"class", "model", "backend"},
    "gateway_prefix_predicted_tokens_total": {"class", "model", "backend"},
    "gateway_prefix_cached_tokens_total": {"class", "model", "backend"},
    "gateway_inflight_requests": {"backend"},
    "gateway_inflight_prefill_tokens": {"backend"},
    "gateway_backend_up": {"backend"},
    "gateway_backend_queue_depth": {"backend"},
    "gateway_backend_running": {"backend"},
    "gateway_backend_snapshot_age_seconds": {"backend"},
    "gateway_backend_prefill_tokens_per_second": {"backend"},
    "gateway_index_blocks": {"backend"},
    "gateway_index_bytes": set(),
    "gateway_queue_depth": {"class"},
    "gateway_admission_total": {"class", "result"},
    "gateway_upstream_attempts_total": {"backend", "result"},
    "gateway_loop_lag_seconds": None,
}
DECLARED = [
    "gateway_backend_kv_utilization",
    "gateway_bucket_tokens",
    "gateway_fallback",
    "gateway_reloads",
    "gateway_build_info",
]


@dataclass
class Turn:
    """One answered turn."""

    backend: str
    prefix: str
    usage: dict[str, Any]
    text: str


def turn(gateway: Gateway, messages: list[dict[str, Any]]) -> Turn:
    answer = ask(gateway, messages)
    assert answer.status == 200, answer.body
    body = answer.json()
    headers = answer.headers
    text = body["choices"][0]["message"]["content"]
    return Turn(headers["x-gateway-backend"], headers["x-gateway-prefix"], body["usage"], text)


def test_second_turns_return_to_the_warm_replica(gateway: Gateway, fleet: Fleet) -> None:
    talks = [opening(1000 + i) for i in range(CONVERSATIONS)]
    with ThreadPoolExecutor(CONVERSATIONS) as pool:  # a burst: no replica could take it all as soon
        first = list(pool.map(lambda messages: turn(gateway, messages), talks))
    assert {answered.backend for answered in first} == {r.name for r in fleet.replicas}
    for messages, answered in zip(talks, first, strict=True):
        messages.append({"role": "assistant", "content": answered.text})
        messages.append({"role": "user", "content": "And who closes it when the client leaves?"})

    second = [turn(gateway, messages) for messages in talks]

    assert [t.backend for t in second] == [t.backend for t in first]
    for before, after in zip(first, second, strict=True):
        prompt_tokens = before.usage["prompt_tokens"]
        assert cached_tokens(after.usage) >= prompt_tokens - LOST_TOKENS
        predicted, total = map(int, after.prefix.split("/"))
        assert 0 < predicted <= total


def test_predicted_and_reported_hits_are_both_counted(gateway: Gateway) -> None:
    messages = opening(200)
    turn(gateway, messages)
    before = {name: gateway.total(name, model=MODEL) for name in METRICS if "prefix" in name}

    again = turn(gateway, messages)

    cached = "gateway_prefix_cached_tokens_total"
    grown = gateway.total(cached, model=MODEL) - before[cached]
    assert grown == cached_tokens(again.usage) > 0
    predicted = "gateway_prefix_predicted_tokens_total"
    assert gateway.total(predicted, model=MODEL) > before[predicted]
    rows = gateway.backends().values()
    assert sum(row["hit_tokens_reported"] for row in rows) == gateway.total(cached, model=MODEL)


def test_the_metrics_page_has_every_name_and_label_of_the_contract(gateway: Gateway) -> None:
    url = gateway.url + "/v1/chat/completions"
    streamed = fetch(url, method="POST", body=chat(opening(300), stream=True))
    assert streamed.status == 200

    page = fetch(gateway.admin + "/metrics").body.decode()
    rows = gateway.metrics()

    for name, labels in METRICS.items():
        assert name in rows or f"{name}_count" in rows, name
        if labels is not None:
            assert {frozenset(have) for have, _ in rows[name]} == {frozenset(labels)}, name
    for name in DECLARED:
        assert f"# TYPE {name}" in page, name
    assert gateway.total("gateway_ttft_seconds_count", model=MODEL) > 0
    assert gateway.total("gateway_itl_seconds_count", model=MODEL) > 0


def test_status_has_every_key_of_the_contract(gateway: Gateway, fleet: Fleet) -> None:
    turn(gateway, opening(400))
    eventually(lambda: not any(r["in_flight"] for r in gateway.backends().values()), what="idle")

    status = gateway.status()

    assert {"version", "uptime_s", "policy", "models", "classes"} <= status.keys()
    assert status["policy"] == "cost"
    rows = gateway.backends()
    assert rows.keys() == {replica.name for replica in fleet.replicas}
    for row in rows.values():
        assert row["up"] is True
        assert row["draining"] is False
        assert row["owed_prefill_s"] == row["context_tokens"] == 0
        assert row["snapshot_age_s"] < 30
        assert {"kv_utilization", "queue_depth", "running", "prefill_tokens_per_s"} <= row.keys()
        assert {"index_blocks", "hit_tokens_predicted", "hit_tokens_reported"} <= row.keys()
    assert sum(row["index_blocks"] for row in rows.values()) > 0
    assert {row["name"] for row in status["classes"]} == {"coding", "chat"}
    for row in status["classes"]:
        keys = {"waiting", "waiting_bytes", "bucket_tokens", "admitted", "rejected"}
        assert keys <= row.keys()


def test_explain_names_the_backend_that_then_serves_and_counts_nothing(gateway: Gateway) -> None:
    messages = opening(350)
    home = turn(gateway, messages).backend
    admitted = gateway.total("gateway_admission_total")

    said = fetch(gateway.admin + "/explain", method="POST", body=chat(messages)).json()

    assert gateway.total("gateway_admission_total") == admitted
    assert said["winner"] == home
    hit = {row["name"]: row["hit_tokens"] for row in said["backends"]}
    assert hit[home] == max(hit.values()) > 0
    served = turn(gateway, messages)
    assert served.backend == home
    assert served.prefix == f"{hit[home]}/{said['prompt_tokens']}"


def test_both_listeners_say_they_are_ready(gateway: Gateway) -> None:
    for base in (gateway.url, gateway.admin):
        assert fetch(base + "/healthz").status == 200
        assert fetch(base + "/readyz").status == 200
    assert fetch(gateway.url + "/metrics").status == 404
