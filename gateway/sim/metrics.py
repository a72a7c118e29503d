"""The `/metrics` page of one simulated replica, in vLLM's names, labels and text form.

Counters are flat numbers; the text is made when scraped. What the engine does not model (FLOPs,
external caches, multimodal) stays at zero. Never decides anything.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import ProcessCollector

from gateway.sim.engine import Engine, Job
from gateway.sim.metrics_table import CACHE_CONFIG, CACHE_CONFIG_HELP, FAMILIES, Family

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def _number(value: float) -> str:
    """Return a value as Prometheus' Python client prints it: from a million on with an exponent."""
    text = repr(float(value))
    point = text.find(".")
    if value > 0 and point > 6 and "e" not in text:
        digits = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
        return f"{digits}e+{point - 1:02d}"
    return text


class Histogram:
    """Cumulative only when printed: `counts[i]` belongs to values at most `bounds[i]`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metrics:
    """Counts what finished jobs and tokens say; `created` is the Unix time the replica started."""

    def __init__(self, engine: Engine, model: str, created: float) -> None:
        self._engine = engine
        self._base = f'model_name="{model}"'
        self._created = created
        self._process = ProcessCollector(registry=None)
        self.histograms = {f.name: Histogram(f.buckets) for f in FAMILIES if f.kind == "histogram"}
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.rejected = 0
        self._itl = self.histograms["vllm:inter_token_latency_seconds"]

    def token(self, since: float | None, at: float, tokens: int) -> None:
        """Count `tokens` decode gaps that together lasted from `since` to `at`."""
        if since is not None:
            self._itl.observe((at - since) / tokens, tokens)

    def first_token(self, job: Job) -> None:
        """Count a job's time to first token."""
        if job.first_token_at is not None:
            waited = job.first_token_at - job.submitted_at
            self.histograms["vllm:time_to_first_token_seconds"].observe(waited)

    def finish(self, job: Job, reason: str, *, max_tokens: int, n: int) -> None:
        """Count a finished job; `max_tokens` and `n` are what its request asked for."""
        self.finished[reason] += 1
        if job.started_at is None or job.first_token_at is None or job.last_token_at is None:
            return
        decode = job.last_token_at - job.first_token_at
        prefill = job.first_token_at - job.started_at
        observed = {
            "vllm:request_prompt_tokens": job.prompt_tokens,
            "vllm:request_generation_tokens": job.produced,
            "vllm:request_max_num_generation_tokens": job.produced,
            "vllm:request_params_n": n,
            "vllm:request_params_max_tokens": max_tokens,
            "vllm:request_time_per_output_token_seconds": decode / max(1, job.produced - 1),
            "vllm:e2e_request_latency_seconds": job.last_token_at - job.submitted_at,
            "vllm:request_queue_time_seconds": job.started_at - job.submitted_at,
            "vllm:request_inference_time_seconds": prefill + decode,
            "vllm:request_prefill_time_seconds": prefill,
            "vllm:request_decode_time_seconds": decode,
            "vllm:request_num_preemptions": job.preemptions,
            "vllm:request_prefill_kv_computed_tokens": job.prompt_tokens - job.cached_tokens,
        }
        for name, value in observed.items():
            self.histograms[name].observe(value)

    def render(self) -> bytes:
        """Return the page."""
        live = self._live()
        lines = list(self._process_lines())
        for family in FAMILIES:
            lines += self._family(family, live)
        lines += self._cache_config()
        return ("\n".join(lines) + "\n").encode()

    def _live(self) -> dict[str, float]:
        """Return the values of simple series by name, or `name/label value`."""
        engine = self._engine
        cached = engine.prompt_tokens_cached
        live: dict[str, float] = {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": engine.waiting,
            "vllm:num_requests_waiting_by_reason/capacity": engine.waiting,
            "vllm:engine_sleep_state/awake": 1,
            "vllm:kv_cache_usage_perc": engine.kv_utilization,
            "vllm:prefix_cache_queries_total": engine.prefix_queries,
            "vllm:prefix_cache_hits_total": engine.prefix_hits,
            "vllm:num_preemptions_total": engine.preemptions,
            "vllm:prompt_tokens_total": engine.prompt_tokens,
            "vllm:prompt_tokens_by_source_total/local_compute": engine.prompt_tokens - cached,
            "vllm:prompt_tokens_by_source_total/local_cache_hit": cached,
            "vllm:prompt_tokens_cached_total": cached,
            "vllm:prompt_tokens_cached_by_source_total/device": cached,
            "vllm:generation_tokens_total": engine.generation_tokens,
            "vllm:admission_rejections_total/max_num_queued_reqs": self.rejected,
        }
        for reason, total in self.finished.items():
            live[f"vllm:request_success_total/{reason}"] = total
        return live

    def _labels(self, family: Family, value: str = "", le: str = "") -> str:
        pairs = [self._base]
        if family.per_engine:
            pairs.append('engine="0"')
        if value:
            pairs.append(f'{family.label}="{value}"')
        if le:
            pairs.append(f'le="{le}"')
        return "{" + ",".join(sorted(pairs)) + "}"

    def _family(self, family: Family, live: dict[str, float]) -> Iterator[str]:
        name, kind, text = family[:3]
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        if kind == "histogram":
            yield from self._histogram(family)
        else:
            for value in family.values:
                number = live.get(f"{name}/{value}" if value else name, 0)
                yield f"{name}{self._labels(family, value)} {_number(number)}"
        if kind != "gauge":
            created = name.removesuffix("_total") if kind == "counter" else name
            yield f"# HELP {created}_created {text}"
            yield f"# TYPE {created}_created gauge"
            for value in family.values:
                stamp = _number(self._created)
                yield f"{created}_created{self._labels(family, value)} {stamp}"

    def _histogram(self, family: Family) -> Iterator[str]:
        histogram = self.histograms[family.name]
        total = 0
        for bound, number in zip((*histogram.bounds, None), histogram.counts, strict=True):
            total += number
            le = "+Inf" if bound is None else _number(bound)
            yield f"{family.name}_bucket{self._labels(family, le=le)} {_number(total)}"
        labels = self._labels(family)
        yield f"{family.name}_count{labels} {_number(total)}"
        yield f"{family.name}_sum{labels} {_number(histogram.total)}"

    def _cache_config(self) -> Iterator[str]:
        profile = self._engine.profile
        block = str(profile.block_tokens)
        tokens = profile.blocks * profile.block_tokens
        labels = CACHE_CONFIG | {
            "block_size": block,
            "effective_attention_block_size": block,
            "kv_cache_max_concurrency": str(tokens / profile.max_model_len),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(profile.blocks),
            "num_gpu_blocks_override": "None",
        }
        yield f"# HELP vllm:cache_config_info {CACHE_CONFIG_HELP}"
        yield "# TYPE vllm:cache_config_info gauge"
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        yield f"vllm:cache_config_info{{{pairs}}} 1.0"

    def _process_lines(self) -> Iterator[str]:
        """Yield the process's own figures; its start is the replica's, several may share one."""
        for family in self._process.collect():
            name = family.samples[0].name
            yield f"# HELP {name} {family.documentation}"
            yield f"# TYPE {name} {family.type}"
            started = name == "process_start_time_seconds"
            value = self._created if started else family.samples[0].value
            yield f"{name} {_number(value)}"
