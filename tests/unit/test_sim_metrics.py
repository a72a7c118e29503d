"""The replica's metrics: numbers in Prometheus' text form, live values, histograms that add up."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from gateway.sim.engine import Engine, Job
from gateway.sim.metrics import Histogram, Metrics, _number
from gateway.sim.profiles import DEMO


def samples(metrics: Metrics) -> dict[str, float]:
    """Return every series by name and its labels other than engine and model."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            extra = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
            found["/".join([sample.name, *extra])] = sample.value
    return found


@pytest.mark.parametrize("value", [0, 1, 0.25, 999999.0, 1_000_000.0, 1796039803.76, 28.5e9, 1e22])
def test_numbers_look_as_the_official_client_prints_them(value: float) -> None:
    assert _number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_a_histogram_counts_a_bound_as_inside() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)

    assert histogram.counts == [2, 4, 1]
    assert histogram.total == 12.0


def test_gauges_and_counters_follow_the_engine() -> None:
    engine = Engine(DEMO)
    metrics = Metrics(engine, "m", 5.0)
    for name in ("a", "b"):
        engine.submit(Job(name, 1000, 10, range(1, 64)), 0.0)
    engine.advance(engine.next_event_at() or 0.0)
    live = samples(metrics)

    assert live["vllm:num_requests_running"] == 2
    assert live["vllm:prefix_cache_queries_total"] == 2000
    assert live["vllm:prefix_cache_hits_total"] == 992
    assert live["vllm:kv_cache_usage_perc"] == pytest.approx(engine.kv_utilization)
    assert live["process_start_time_seconds"] == 5.0

    engine.advance(100.0)
    done = samples(metrics)
    assert done["vllm:num_requests_running"] == 0
    assert done["vllm:kv_cache_usage_perc"] == 0
    assert done["vllm:generation_tokens_total"] == 20
    assert done["vllm:prompt_tokens_total"] == 2000
    assert done["vllm:prompt_tokens_by_source_total/local_cache_hit"] == 992
    assert done["vllm:prompt_tokens_by_source_total/local_compute"] == 1008


def test_a_finished_job_enters_every_request_histogram() -> None:
    engine = Engine(DEMO)
    metrics = Metrics(engine, "m", 5.0)
    job = Job("a", 100, 5, ())
    engine.submit(job, 2.0)
    for progress in engine.advance(100.0):
        metrics.token(progress.since, progress.at, progress.tokens)
    metrics.first_token(job)
    metrics.finish(job, "length", max_tokens=5, n=1)
    live = samples(metrics)

    assert live["vllm:request_success_total/length"] == 1
    assert live["vllm:inter_token_latency_seconds_count"] == 4
    assert live["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(
        (job.finished_at or 0.0) - 2.0
    )
    assert live["vllm:time_to_first_token_seconds_sum"] == pytest.approx(
        (job.first_token_at or 0.0) - 2.0
    )
    assert live["vllm:request_generation_tokens_bucket/5.0"] == 1
    assert live["vllm:request_generation_tokens_bucket/2.0"] == 0


def test_cache_size_can_be_learnt_from_the_page() -> None:
    page = Metrics(Engine(DEMO), "m", 5.0).render().decode()

    assert f'num_gpu_blocks="{DEMO.blocks}"' in page
    assert f'block_size="{DEMO.block_tokens}"' in page
