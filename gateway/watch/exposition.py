"""Reads the few figures that routing uses out of an engine's `/metrics` page.

vLLM (old and new names, one or several engines), SGLang (ranks) and llama.cpp. Pure: bytes in,
`Reading` out. Must stay cheap on pages of thousands of series (only the wanted lines are touched),
and must never raise, whatever the page holds.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import fmean

from gateway.core.types import Snapshot


@dataclass(slots=True, frozen=True)
class Reading:
    """One page's content: which engine wrote it, and its figures."""

    engine: str
    snapshot: Snapshot


_WANTED = {
    "vllm": (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "gpu_prefix_cache_queries_total",
        "gpu_prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ),
    "sglang": (
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "max_total_num_tokens",
        "page_size",
        "cache_config_info",
        "num_retracted_requests_total",
        "prompt_tokens_total",
        "cached_tokens_total",
        "generation_tokens_total",
    ),
    "llamacpp": (
        "requests_processing",
        "requests_deferred",
        "kv_cache_usage_ratio",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "tokens_predicted_total",
    ),
}

_names = "|".join(f"{engine}:(?:{'|'.join(names)})" for engine, names in _WANTED.items())
_LINE = re.compile(rf"\n({_names}|process_start_time_seconds)(?:\{{(.*)\}})?[ \t]+(\S+)".encode())
_RANK = re.compile(rb'\b(?:tp|pp|moe_ep|attn_cp|moe_dp)_rank="[^"]*",?')
_LABEL = re.compile(rb'([A-Za-z_]\w*)="([^"]*)"')

_ABSURD = 1e18  # no count, token total or date is this large

_Values = dict[bytes, float]  # by label set, the ranks of one model copy taken together
_Page = dict[str, _Values]


def read(page: bytes, at: float, engine: str = "auto") -> Reading | None:
    """Return what `page` says, or None when `engine` (auto: no engine we know) wrote it.

    `at` is when the engine answered, monotonic seconds. Samples that are no finite number are left
    out; figures the page lacks are None.
    """
    found = _samples(page)
    for name, build in _ENGINES:
        if engine in (name, "auto") and any(key.startswith(f"{name}:") for key in found):
            return Reading(name, build(found, at))
    return None


def wanted(engine: str) -> list[str]:
    """Return the names of the series that `read` uses of an engine's page."""
    return [*(f"{engine}:{name}" for name in _WANTED[engine]), "process_start_time_seconds"]


def _samples(page: bytes) -> _Page:
    found: _Page = {}
    for name, labels, text in _LINE.findall(b"\n" + page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not abs(value) < _ABSURD:  # NaN and the infinities too
            continue
        key = _RANK.sub(b"", labels) if b"_rank" in labels else labels
        values = found.setdefault(name.decode(), {})
        values[key] = max(values.get(key, value), value)
    return found


def _vllm(page: _Page, at: float) -> Snapshot:
    capacity, block = _vllm_cache(page.get("vllm:cache_config_info", {}))
    return Snapshot(
        at=at,
        running=_count(page, "vllm:num_requests_running"),
        waiting=_count(page, "vllm:num_requests_waiting"),
        kv_utilization=_share(page, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_capacity_tokens=capacity,
        block_tokens=block,
        prefix_queries=_sum(
            page, "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
        ),
        prefix_hits=_sum(page, "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        preemptions=_sum(page, "vllm:num_preemptions_total"),
        prompt_tokens=_sum(page, "vllm:prompt_tokens_total"),
        generation_tokens=_sum(page, "vllm:generation_tokens_total"),
        start_time=_sum(page, "process_start_time_seconds"),
    )


def _sglang(page: _Page, at: float) -> Snapshot:
    capacity, block = _cache_info(
        page.get("sglang:cache_config_info", {}), size=b"page_size", count=b"num_pages"
    )
    gauge = _sum(page, "sglang:max_total_num_tokens")
    return Snapshot(
        at=at,
        running=_count(page, "sglang:num_running_reqs"),
        waiting=_count(page, "sglang:num_queue_reqs"),
        kv_utilization=_share(page, "sglang:token_usage"),
        kv_capacity_tokens=capacity if gauge is None else int(gauge),
        block_tokens=block
        or int(max(page.get("sglang:page_size", {}).values(), default=0))
        or None,
        prefix_queries=_sum(page, "sglang:prompt_tokens_total"),
        prefix_hits=_sum(page, "sglang:cached_tokens_total"),
        preemptions=_sum(page, "sglang:num_retracted_requests_total"),
        prompt_tokens=_sum(page, "sglang:prompt_tokens_total"),
        generation_tokens=_sum(page, "sglang:generation_tokens_total"),
        start_time=_sum(page, "process_start_time_seconds"),
    )


def _llamacpp(page: _Page, at: float) -> Snapshot:
    fresh = _sum(page, "llamacpp:prompt_tokens_total")
    cached = _sum(page, "llamacpp:prompt_tokens_cached_total")
    return Snapshot(
        at=at,
        running=_count(page, "llamacpp:requests_processing"),
        waiting=_count(page, "llamacpp:requests_deferred"),
        kv_utilization=_share(page, "llamacpp:kv_cache_usage_ratio"),
        prefix_queries=None if fresh is None or cached is None else fresh + cached,
        prefix_hits=cached,
        prompt_tokens=fresh,
        generation_tokens=_sum(page, "llamacpp:tokens_predicted_total"),
        start_time=_sum(page, "process_start_time_seconds"),
    )


_ENGINES: tuple[tuple[str, Callable[[_Page, float], Snapshot]], ...] = (
    ("vllm", _vllm),
    ("sglang", _sglang),
    ("llamacpp", _llamacpp),
)


def _sum(page: _Page, *names: str) -> float | None:
    """Return the sum over label sets of the first name the page has: engines add up."""
    for name in names:
        if values := page.get(name):
            return sum(values.values())
    return None


def _count(page: _Page, name: str) -> int:
    return max(0, int(_sum(page, name) or 0))


def _share(page: _Page, *names: str) -> float | None:
    """Return the mean over label sets, 0..1: engines of one process have caches of one size."""
    for name in names:
        if values := page.get(name):
            return min(1.0, max(0.0, fmean(values.values())))
    return None


def _vllm_cache(info: Collection[bytes]) -> tuple[int | None, int | None]:
    """Return (capacity, block size) in tokens; newer vLLM states the capacity itself."""
    capacity, block = _cache_info(info, size=b"block_size", count=b"num_gpu_blocks")
    stated = [_whole(dict(_LABEL.findall(labels)).get(b"kv_cache_size_tokens")) for labels in info]
    if stated and all(stated):
        return sum(stated), block
    return capacity, block


def _cache_info(
    info: Collection[bytes], *, size: bytes, count: bytes
) -> tuple[int | None, int | None]:
    total, block = 0, 0
    for labels in info:
        values = dict(_LABEL.findall(labels))
        block = _whole(values.get(size)) or block
        total += _whole(values.get(size)) * _whole(values.get(count))
    return total or None, block or None


def _whole(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else 0
