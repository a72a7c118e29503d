from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import Snapshot
from gateway.watch.exposition import read

SAMPLES = Path(__file__).parent.parent / "samples"


def sample(name: str) -> bytes:
    head, _, body = (SAMPLES / name).read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")
    assert head.startswith(b"HTTP/1.1 200")
    return body


def snapshot(page: str, engine: str = "auto") -> Snapshot:
    reading = read(page.encode(), 1.0, engine)
    assert reading is not None
    return reading.snapshot


def test_recorded_vllm_page_under_load() -> None:
    reading = read(sample("vllm-0.32/metrics_loaded.response.http"), 7.0)

    assert reading is not None
    assert reading.engine == "vllm"
    assert reading.snapshot == Snapshot(
        at=7.0,
        running=3,
        waiting=11,
        kv_utilization=0.18866080156402742,
        kv_capacity_tokens=32768,
        block_tokens=32,
        prefix_queries=33936.0,
        prefix_hits=12480.0,
        preemptions=0.0,
        prompt_tokens=30907.0,
        generation_tokens=362.0,
        start_time=1796039803.76,
    )


def test_recorded_vllm_page_at_rest() -> None:
    reading = read(sample("vllm-0.32/metrics_idle.response.http"), 7.0)

    assert reading is not None
    assert (reading.snapshot.running, reading.snapshot.waiting) == (0, 0)
    assert reading.snapshot.kv_capacity_tokens == 32768


def test_recorded_llamacpp_page() -> None:
    reading = read(sample("llamacpp/metrics_after.response.http"), 7.0)

    assert reading is not None
    assert reading.engine == "llamacpp"
    assert reading.snapshot == Snapshot(
        at=7.0,
        prefix_queries=339.0,
        prefix_hits=239.0,
        prompt_tokens=100.0,
        generation_tokens=93.0,
    )


def test_old_vllm_names_are_read() -> None:
    found = snapshot(
        'vllm:num_requests_running{model_name="m"} 2.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 10.0\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 4.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    )

    assert found.running == 2
    assert found.kv_utilization == 0.25
    assert (found.prefix_queries, found.prefix_hits) == (10.0, 4.0)
    assert (found.kv_capacity_tokens, found.block_tokens) == (1600, 16)


def test_new_name_wins_while_a_version_exports_both() -> None:
    found = snapshot(
        'vllm:gpu_cache_usage_perc{engine="0"} 0.9\nvllm:kv_cache_usage_perc{engine="0"} 0.1\n'
    )

    assert found.kv_utilization == 0.1


def test_engines_of_one_server_add_up_and_their_cache_use_is_averaged() -> None:
    found = snapshot(
        'vllm:num_requests_waiting{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6\n'
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 5.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="m"} 6.0\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="20"} 1.0\n'
    )

    assert found.waiting == 7
    assert found.kv_utilization == pytest.approx(0.4)
    assert found.prompt_tokens == 11.0
    assert found.kv_capacity_tokens == 480


def test_capacity_that_vllm_states_itself_is_believed() -> None:
    found = snapshot(
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="10",kv_cache_size_tokens="90"} 1\n'
    )

    assert found.kv_capacity_tokens == 90


def test_capacity_not_known_yet_is_unknown() -> None:
    found = snapshot('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n')

    assert found.kv_capacity_tokens is None
    assert found.block_tokens == 16


def test_name_that_only_begins_alike_is_not_taken() -> None:
    found = snapshot(
        'vllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 50.0\n'
        'vllm:prompt_tokens_total{engine="0"} 2.0\n'
        'vllm:prompt_tokens_created{engine="0"} 1.7e9\n'
        "# HELP vllm:num_requests_running 9 of them\n"
    )

    assert (found.waiting, found.running, found.prompt_tokens) == (1, 0, 2.0)


SGLANG = (
    'sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0\n'
    'sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0\n'
    'sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28\n'
    'sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 161721.0\n'
    'sglang:cache_hit_rate{model_name="m",tp_rank="0"} 0.33\n'
    'sglang:prompt_tokens_total{model_name="m"} 900.0\n'
    'sglang:cached_tokens_total{cache_source="device",model_name="m"} 200.0\n'
    'sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0\n'
    'sglang:generation_tokens_total{model_name="m"} 70.0\n'
    'sglang:num_retracted_requests_total{model_name="m"} 1.0\n'
)


def test_sglang_page() -> None:
    reading = read(SGLANG.encode(), 1.0)

    assert reading is not None
    assert reading.engine == "sglang"
    assert reading.snapshot == Snapshot(
        at=1.0,
        running=5,
        waiting=2,
        kv_utilization=0.28,
        kv_capacity_tokens=161721,
        prefix_queries=900.0,
        prefix_hits=300.0,
        preemptions=1.0,
        prompt_tokens=900.0,
        generation_tokens=70.0,
    )


def test_ranks_of_one_sglang_model_copy_are_counted_once_and_its_copies_add_up() -> None:
    found = snapshot(
        'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 5.0\n'
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 5.0\n'
        'sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 3.0\n'
        'sglang:num_running_reqs{dp_rank="1",tp_rank="3"} 3.0\n'
    )

    assert found.running == 8


def test_sglang_cache_config_is_read_where_the_gauge_is_missing() -> None:
    found = snapshot('sglang:cache_config_info{num_pages="100",page_size="64"} 1.0\n')

    assert (found.kv_capacity_tokens, found.block_tokens) == (6400, 64)


def test_sglang_page_size_gauge_is_read() -> None:
    assert snapshot('sglang:page_size{model_name="m"} 64.0\n').block_tokens == 64


def test_old_llamacpp_cache_use_is_read() -> None:
    found = snapshot("llamacpp:requests_deferred 2\nllamacpp:kv_cache_usage_ratio 0.5\n")

    assert (found.waiting, found.kv_utilization) == (2, 0.5)


def test_configured_engine_overrules_recognition() -> None:
    page = "vllm:num_requests_running 1\nsglang:num_running_reqs 2\n"

    assert snapshot(page).running == 1
    assert snapshot(page, "sglang").running == 2
    assert read(page.encode(), 1.0, "llamacpp") is None


@pytest.mark.parametrize("page", [b"", b"<html>502</html>", b"process_start_time_seconds 1\n"])
def test_page_of_no_engine_says_nothing(page: bytes) -> None:
    assert read(page, 1.0) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300", "many", "0x10", ""])
def test_sample_that_is_no_sane_number_is_left_out(value: str) -> None:
    found = snapshot(f"vllm:num_requests_waiting 1\nvllm:num_requests_running {value}\n")

    assert (found.waiting, found.running) == (1, 0)


def test_share_outside_its_range_is_clamped() -> None:
    assert snapshot("vllm:kv_cache_usage_perc 1.7\n").kv_utilization == 1.0
    assert snapshot("vllm:kv_cache_usage_perc -0.1\n").kv_utilization == 0.0


def test_odd_labels_line_ends_and_timestamps_are_fine() -> None:
    page = 'vllm:num_requests_running{model_name="a } b \\" c"} 4 1700000000000\r\n'

    assert snapshot(page).running == 4


def test_page_of_5000_series_gives_the_same_figures() -> None:
    page = sample("vllm-0.32/metrics_loaded.response.http")
    filler = b"".join(
        b'vllm:request_params_n_bucket{engine="0",le="%d",model_name="tiny"} 1.0\n' % i
        for i in range(5_000)
    )

    assert read(filler + page + filler, 7.0) == read(page, 7.0)


_LINES = st.sampled_from(
    [
        b"vllm:num_requests_running",
        b"vllm:cache_config_info",
        b"sglang:page_size",
        b"llamacpp:prompt_tokens_total",
        b"process_start_time_seconds",
        b'{engine="0"}',
        b'{block_size="16",num_gpu_blocks="' + b"9" * 30 + b'"}',
        b'{tp_rank="',
        b" 1e17",
        b" -3",
        b" nan",
        b"\n",
        b"\xff\x00}{",
    ]
)


@given(st.lists(st.one_of(_LINES, st.binary(max_size=8)), max_size=40))
def test_no_page_raises(parts: list[bytes]) -> None:
    reading = read(b"".join(parts), 1.0)

    assert reading is None or reading.snapshot.running >= 0
