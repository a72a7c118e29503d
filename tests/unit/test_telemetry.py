import dataclasses
import random
from math import inf, isnan

import pytest
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.classify import Features
from gateway.core.dispatcher import Dispatcher
from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import (
    BackendSpec,
    BucketSpec,
    ClassSpec,
    CoreSettings,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import Outcome, Snapshot
from gateway.telemetry.counters import labels
from gateway.telemetry.metrics import OTHER, RequestRecord, Telemetry
from gateway.telemetry.page import number

# Contract, section 6, with the kinds and labels it names, and what was added to it since.
CONTRACT = {
    "gateway_requests_total": ("counter", {"class", "model", "backend", "outcome"}),
    "gateway_request_seconds": ("histogram", {"class", "model"}),
    "gateway_ttft_seconds": ("histogram", {"class", "model"}),
    "gateway_itl_seconds": ("histogram", {"class", "model"}),
    "gateway_queue_seconds": ("histogram", {"class", "model"}),
    "gateway_prompt_tokens_total": ("counter", {"class", "model", "backend"}),
    "gateway_completion_tokens_total": ("counter", {"class", "model", "backend"}),
    "gateway_prefix_predicted_tokens_total": ("counter", {"class", "model", "backend"}),
    "gateway_prefix_cached_tokens_total": ("counter", {"class", "model", "backend"}),
    "gateway_inflight_requests": ("gauge", {"backend"}),
    "gateway_inflight_prefill_tokens": ("gauge", {"backend"}),
    "gateway_backend_up": ("gauge", {"backend"}),
    "gateway_backend_kv_utilization": ("gauge", {"backend"}),
    "gateway_backend_queue_depth": ("gauge", {"backend"}),
    "gateway_backend_running": ("gauge", {"backend"}),
    "gateway_backend_snapshot_age_seconds": ("gauge", {"backend"}),
    "gateway_backend_prefill_tokens_per_second": ("gauge", {"backend"}),
    "gateway_index_blocks": ("gauge", {"backend"}),
    "gateway_index_capacity_blocks": ("gauge", {"backend"}),
    "gateway_backend_prefix_trust_ratio": ("gauge", {"backend"}),
    "gateway_backend_prefix_error_ratio": ("gauge", {"backend"}),
    "gateway_backend_saturation_ratio": ("gauge", {"backend"}),
    "gateway_backend_owed_limit_seconds": ("gauge", {"backend"}),
    "gateway_pool_saturation_ratio": ("gauge", {"model"}),
    "gateway_key_tokens_total": ("counter", {"key", "kind"}),
    "gateway_key_requests_total": ("counter", {"key", "outcome"}),
    "gateway_backend_draining": ("gauge", {"backend"}),
    "gateway_backend_owed_prefill_seconds": ("gauge", {"backend"}),
    "gateway_backend_waiting_requests": ("gauge", {"backend"}),
    "gateway_backend_hits_predicted_tokens_total": ("counter", {"backend"}),
    "gateway_backend_hits_reported_tokens_total": ("counter", {"backend"}),
    "gateway_queue_bytes": ("gauge", {"class"}),
    "gateway_backend_breaker_state": ("gauge", {"backend"}),
    "gateway_backend_breaker_opens_total": ("counter", {"backend"}),
    "gateway_backend_warming": ("gauge", {"backend"}),
    "gateway_prefill_saved_seconds_total": ("counter", {"backend"}),
    "gateway_slo_met_requests_total": ("counter", {"class", "model", "backend"}),
    "gateway_slo_seconds": ("gauge", {"class", "target"}),
    "gateway_decision_seconds": ("histogram", set()),
    "gateway_errors_total": ("counter", {"class", "code"}),
    "gateway_index_bytes": ("gauge", set()),
    "gateway_bucket_tokens": ("gauge", {"class"}),
    "gateway_queue_depth": ("gauge", {"class"}),
    "gateway_admission_total": ("counter", {"class", "result"}),
    "gateway_upstream_attempts_total": ("counter", {"backend", "result"}),
    "gateway_fallback_total": ("counter", {"reason"}),
    "gateway_loop_lag_seconds": ("gauge", set()),
    "gateway_collector_pause_seconds": ("gauge", set()),
    "gateway_reloads_total": ("counter", {"result"}),
    "gateway_build_info": ("gauge", {"version", "python"}),
}

SETTINGS = CoreSettings(
    models=(ModelSpec("m", ("a", "b")),),
    backends=(BackendSpec("a"), BackendSpec("b")),
    classes=(
        ClassSpec("coding"),
        ClassSpec("chat", default=True, bucket=BucketSpec(10.0, 100.0)),
    ),
)

RECORD = RequestRecord(
    "r-1",
    "/v1/chat/completions",
    1.0,
    cls="chat",
    model="m",
    backend="a",
    status=200,
    outcome=Outcome.OK,
    queue_s=0.01,
    ttft_s=0.2,
    total_s=3.0,
    prompt_tokens=100,
    completion_tokens=20,
    predicted_tokens=64,
    cached_tokens=48,
    attempts=1,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def dispatcher(clock: Clock) -> Dispatcher:
    return QueuedDispatcher(SETTINGS, random.Random(1), clock())


@pytest.fixture
def telemetry(dispatcher: Dispatcher, clock: Clock) -> Telemetry:
    telemetry = Telemetry(dispatcher, clock=clock, version="1.2.3")
    targets = {"coding": (5.0, 0.1), "chat": (1.0, 0.05)}
    telemetry.set_labels(("coding", "chat"), ("m",), ("a", "b"), ("team",), targets)
    return telemetry


def families(telemetry: Telemetry) -> dict[str, Metric]:
    found = text_string_to_metric_families(telemetry.render().decode())
    return {
        family.name + ("_total" if family.type == "counter" else ""): family for family in found
    }


def sample(telemetry: Telemetry, name: str, **tags: str) -> float:
    values = samples(telemetry)
    return values[name, frozenset(tags.items())]


def samples(telemetry: Telemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(telemetry.render().decode())
        for sample in family.samples
    }


def gateway_series(telemetry: Telemetry) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {key for key in samples(telemetry) if key[0].startswith("gateway_")}


def test_page_has_every_series_of_the_contract_and_no_other(telemetry: Telemetry) -> None:
    telemetry.finished(replace(RECORD, key="team"))
    telemetry.fallback("no_prompt")
    found = families(telemetry)

    ours = {name: found[name] for name in found if name.startswith("gateway_")}
    assert ours.keys() == CONTRACT.keys()
    for name, (kind, tags) in CONTRACT.items():
        assert ours[name].type == kind, name
        assert ours[name].samples, name
        for one in ours[name].samples:
            assert set(one.labels) - {"le"} == tags, name


def test_page_names_the_process_too(telemetry: Telemetry) -> None:
    assert "process_start_time_seconds" in families(telemetry)


def test_finished_request_is_counted_once_everywhere(telemetry: Telemetry) -> None:
    telemetry.finished(RECORD)

    row = {"class": "chat", "model": "m", "backend": "a"}
    pair = {"class": "chat", "model": "m"}
    assert sample(telemetry, "gateway_requests_total", **row, outcome="ok") == 1
    assert sample(telemetry, "gateway_prompt_tokens_total", **row) == 100
    assert sample(telemetry, "gateway_completion_tokens_total", **row) == 20
    assert sample(telemetry, "gateway_prefix_predicted_tokens_total", **row) == 64
    assert sample(telemetry, "gateway_prefix_cached_tokens_total", **row) == 48
    assert sample(telemetry, "gateway_request_seconds_sum", **pair) == 3.0
    assert sample(telemetry, "gateway_ttft_seconds_bucket", **pair, le="0.25") == 1
    assert sample(telemetry, "gateway_ttft_seconds_bucket", **pair, le="0.1") == 0
    assert sample(telemetry, "gateway_queue_seconds_count", **pair) == 1


def test_d51_a_key_is_counted_prompt_and_answer_of_what_ran(telemetry: Telemetry) -> None:
    ran = replace(RECORD, key="team", ran=True)
    telemetry.finished(ran)
    telemetry.finished(
        replace(ran, completion_tokens=None, chunks=7, outcome=Outcome.CLIENT_CLOSED)
    )
    telemetry.finished(replace(ran, ran=False, outcome=Outcome.REJECTED_RATE))

    tokens = "gateway_key_tokens_total"
    assert sample(telemetry, tokens, key="team", kind="prompt") == 200
    assert sample(telemetry, tokens, key="team", kind="cached") == 96
    assert sample(telemetry, tokens, key="team", kind="completion") == 27
    requests = "gateway_key_requests_total"
    assert sample(telemetry, requests, key="team", outcome="rejected_rate") == 1
    assert sample(telemetry, requests, key="team", outcome="client_closed") == 1


def test_a_key_that_is_not_configured_has_no_series_and_a_reload_keeps_the_others(
    telemetry: Telemetry,
) -> None:
    telemetry.finished(replace(RECORD, key="team", ran=True))
    telemetry.finished(replace(RECORD, key="stranger", ran=True))
    telemetry.set_labels(("chat",), ("m",), ("a",), ("team", "new"))

    names = {
        value for series in gateway_series(telemetry) for tag, value in series[1] if tag == "key"
    }
    assert names == {"team", "new"}
    assert sample(telemetry, "gateway_key_tokens_total", key="team", kind="prompt") == 100
    telemetry.set_labels(("chat",), ("m",), ("a",))
    assert not [series for series in gateway_series(telemetry) if "gateway_key" in series[0]]


def test_saturation_is_told_per_backend_and_model(
    telemetry: Telemetry, dispatcher: Dispatcher, clock: Clock
) -> None:
    assert sample(telemetry, "gateway_backend_saturation_ratio", backend="a") == 0
    assert sample(telemetry, "gateway_backend_owed_limit_seconds", backend="a") == 0.5
    assert sample(telemetry, "gateway_pool_saturation_ratio", model="m") == 0
    for name in ("a", "b"):
        dispatcher.set_up(name, up=False, now=clock())
    assert sample(telemetry, "gateway_pool_saturation_ratio", model="m") == inf


def test_request_that_reached_no_backend_adds_no_duration(telemetry: Telemetry) -> None:
    telemetry.finished(replace(RECORD, backend=None, outcome=Outcome.REJECTED_RATE))

    pair = {"class": "chat", "model": "m"}
    tags = {**pair, "backend": OTHER, "outcome": "rejected_rate"}
    assert sample(telemetry, "gateway_requests_total", **tags) == 1
    assert sample(telemetry, "gateway_request_seconds_count", **pair) == 0


def test_gap_histogram_is_one_object_per_class_and_model(telemetry: Telemetry) -> None:
    gaps = telemetry.itl("chat", "m")
    gaps.observe(0.012)

    assert telemetry.itl("chat", "m") is gaps
    assert sample(telemetry, "gateway_itl_seconds_count", **{"class": "chat", "model": "m"}) == 1


def test_public_histograms_are_those_that_finished_feeds(telemetry: Telemetry) -> None:
    telemetry.finished(RECORD)

    assert telemetry.ttft("chat", "m").count == 1
    assert telemetry.queue("chat", "m").count == 1
    assert telemetry.request("chat", "m").count == 1


def test_hostile_labels_add_no_series(telemetry: Telemetry) -> None:
    rng = random.Random(7)

    def hostile() -> str:
        return "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(1, 40)))

    def attack() -> None:
        record = replace(
            RECORD,
            api=hostile(),
            cls=hostile(),
            model=hostile(),
            backend=hostile(),
            outcome=Outcome.NOT_FOUND,
        )
        telemetry.finished(record)
        telemetry.itl(record.cls, record.model).observe(0.1)
        telemetry.attempt(hostile(), "ok")
        telemetry.admission(hostile(), "admitted")

    attack()
    before = gateway_series(telemetry)
    for _ in range(10_000):
        attack()

    assert gateway_series(telemetry) == before


def test_fleet_of_loras_does_not_blow_up_the_page(telemetry: Telemetry) -> None:
    telemetry.set_labels(("coding", "chat"), (), ("a",))
    without_models = len(gateway_series(telemetry))
    names = [f"lora-{number_}" for number_ in range(5_000)]
    telemetry.set_labels(("coding", "chat"), names, ("a",))
    idle = len(gateway_series(telemetry))
    for name in names:
        telemetry.finished(replace(RECORD, model=name))

    counted = families(telemetry)["gateway_requests_total"].samples
    assert len(counted) == 257
    assert sum(one.value for one in counted) == 5_000
    assert idle == without_models  # until they are used


def test_words_of_a_runaway_caller_fold_to_other(telemetry: Telemetry) -> None:
    for number_ in range(10_000):
        telemetry.fallback(f"reason {number_}")

    found = families(telemetry)["gateway_fallback_total"].samples
    assert len(found) <= 33
    assert sum(one.value for one in found) == 10_000


def test_known_results_show_from_zero(telemetry: Telemetry) -> None:
    assert sample(telemetry, "gateway_upstream_attempts_total", backend="a", result="ok") == 0
    assert sample(telemetry, "gateway_reloads_total", result="failed") == 0
    tags = {"class": "coding", "result": "rejected_rate"}
    assert sample(telemetry, "gateway_admission_total", **tags) == 0


def test_calls_count_under_their_names(telemetry: Telemetry) -> None:
    telemetry.attempt("a", "connect_failed")
    telemetry.admission("chat", "admitted")
    telemetry.reload("failed")

    tags = {"backend": "a", "result": "connect_failed"}
    assert sample(telemetry, "gateway_upstream_attempts_total", **tags) == 1
    tags = {"class": "chat", "result": "admitted"}
    assert sample(telemetry, "gateway_admission_total", **tags) == 1
    assert sample(telemetry, "gateway_reloads_total", result="failed") == 1


def test_series_of_removed_names_disappear_and_the_rest_go_on(
    telemetry: Telemetry, dispatcher: Dispatcher, clock: Clock
) -> None:
    telemetry.finished(RECORD)
    telemetry.finished(replace(RECORD, backend="b"))
    telemetry.attempt("b", "ok")
    left = dataclasses.replace(
        SETTINGS, models=(ModelSpec("m", ("a",)),), backends=(BackendSpec("a"),)
    )
    dispatcher.apply(left, clock())
    telemetry.set_labels(("coding", "chat"), ("m",), ("a",))

    assert not [key for key in gateway_series(telemetry) if ("backend", "b") in key[1]]
    tags = {"class": "chat", "model": "m", "backend": "a", "outcome": "ok"}
    assert sample(telemetry, "gateway_requests_total", **tags) == 1


def test_stream_that_outlives_its_model_counts_nowhere(telemetry: Telemetry) -> None:
    gaps = telemetry.itl("chat", "m")
    telemetry.set_labels(("chat",), ("n",), ("a",))
    gaps.observe(1.0)

    assert not [key for key in gateway_series(telemetry) if ("model", "m") in key[1]]


def test_gauges_tell_what_the_dispatcher_knows(
    telemetry: Telemetry, dispatcher: Dispatcher, clock: Clock
) -> None:
    dispatcher.observe("a", Snapshot(clock(), running=3, waiting=2, kv_utilization=0.5), clock())
    dispatcher.set_up("b", up=False, now=clock())
    clock.now += 0.5

    assert sample(telemetry, "gateway_backend_running", backend="a") == 3
    assert sample(telemetry, "gateway_backend_queue_depth", backend="a") == 2
    assert sample(telemetry, "gateway_backend_kv_utilization", backend="a") == 0.5
    assert sample(telemetry, "gateway_backend_snapshot_age_seconds", backend="a") == 0.5
    assert sample(telemetry, "gateway_backend_up", backend="b") == 0
    assert sample(telemetry, "gateway_bucket_tokens", **{"class": "chat"}) == 100


def test_unknown_figures_are_no_figures(telemetry: Telemetry) -> None:
    assert isnan(sample(telemetry, "gateway_backend_kv_utilization", backend="a"))
    assert sample(telemetry, "gateway_backend_snapshot_age_seconds", backend="a") == inf
    assert sample(telemetry, "gateway_bucket_tokens", **{"class": "coding"}) == inf


def test_names_survive_the_format(clock: Clock) -> None:
    odd = 'say "hi"\\ \n there'
    dispatcher = Dispatcher(SETTINGS, random.Random(1), clock())
    telemetry = Telemetry(dispatcher, clock=clock, version=odd)
    telemetry.set_labels(("chat",), (odd,), ("a",))
    telemetry.finished(replace(RECORD, model=odd))

    tags = {"class": "chat", "model": odd, "backend": "a"}
    assert sample(telemetry, "gateway_prompt_tokens_total", **tags) == 100


def test_log_gets_each_finished_record(telemetry: Telemetry) -> None:
    seen: list[RequestRecord] = []
    telemetry.log = seen.append
    telemetry.finished(RECORD)

    assert seen == [RECORD]


def test_a_watcher_gets_each_finished_record_while_it_is_there(telemetry: Telemetry) -> None:
    seen: list[RequestRecord] = []
    telemetry.watcher = seen.append
    telemetry.finished(RECORD)
    telemetry.watcher = None
    telemetry.finished(RECORD)

    assert seen == [RECORD]


def test_a_class_has_the_quantiles_of_all_its_models(telemetry: Telemetry) -> None:
    assert telemetry.ttft_quantiles("chat", (0.5,)) == [None]
    telemetry.ttft("chat", "m").observe(0.2)
    telemetry.ttft("coding", "m").observe(100.0)

    (median,) = telemetry.ttft_quantiles("chat", (0.5,))
    assert median is not None
    assert 0.1 < median <= 0.25


def test_scrape_changes_nothing(telemetry: Telemetry, dispatcher: Dispatcher) -> None:
    before = dispatcher.classify(Features("/v1/chat/completions", False, 1, "", None, "m"))
    first = samples(telemetry)
    ours = {key: value for key, value in first.items() if key[0].startswith("gateway_")}
    again = {
        key: value for key, value in samples(telemetry).items() if key[0].startswith("gateway_")
    }

    assert str(ours) == str(again)
    assert before == dispatcher.classify(Features("/v1/chat/completions", False, 1, "", None, "m"))


def test_worst_lag_outlives_one_scrape_and_then_fades(telemetry: Telemetry, clock: Clock) -> None:
    telemetry.loop_lag(0.2)
    telemetry.loop_lag(0.1)
    assert sample(telemetry, "gateway_loop_lag_seconds") == 0.2
    clock.now += 16
    assert sample(telemetry, "gateway_loop_lag_seconds") == 0.2
    clock.now += 16
    assert sample(telemetry, "gateway_loop_lag_seconds") == 0.0


def test_the_longest_run_of_the_collector_is_a_sample(telemetry: Telemetry) -> None:
    telemetry.collector_pause(0.002)
    telemetry.collector_pause(0.004)
    telemetry.collector_pause(0.001)
    assert sample(telemetry, "gateway_collector_pause_seconds") == 0.004


def test_lag_of_a_window_long_ago_is_forgotten(telemetry: Telemetry, clock: Clock) -> None:
    telemetry.loop_lag(0.2)
    clock.now += 1_000

    assert sample(telemetry, "gateway_loop_lag_seconds") == 0.0


@pytest.mark.parametrize(
    ("value", "text"), [(inf, "+Inf"), (-inf, "-Inf"), (3, "3"), (0.5, "0.5"), (1e-9, "1e-09")]
)
def test_numbers_are_written_as_prometheus_reads_them(value: float, text: str) -> None:
    assert number(value) == text


def test_label_set_is_ordered_as_given() -> None:
    assert labels(("b", "a"), ("1", "2")) == '{b="1",a="2"}'


def test_a_shadow_policy_has_counters_only_while_there_is_one(
    dispatcher: Dispatcher, telemetry: Telemetry
) -> None:
    assert not any("shadow" in name for name in families(telemetry))
    shaded = dataclasses.replace(SETTINGS, routing=RoutingSpec(shadow="random"))
    dispatcher.apply(shaded, 101.0)
    tally = dispatcher.shadow
    assert tally is not None
    tally.same, tally.different, tally.saved_s, tally.lost_s = 5, 2, 0.75, 0.5
    decisions, seconds = "gateway_shadow_decisions_total", "gateway_shadow_predicted_seconds_total"
    assert sample(telemetry, decisions, policy="random", result="same") == 5
    assert sample(telemetry, decisions, policy="random", result="different") == 2
    assert sample(telemetry, seconds, policy="random", result="saved") == 0.75
    assert sample(telemetry, seconds, policy="random", result="lost") == 0.5
