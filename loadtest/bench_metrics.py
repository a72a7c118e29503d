"""What a scrape of `/metrics` costs: `python -m loadtest.bench_metrics`. Prints figures, judges nothing.

A page of `--backends` x `--classes` x `--models` on which every series there can be is shown: each
class and model has used each backend, and ended in every outcome. Process CPU time of the whole page,
the least and the median of `--rounds`, because a busy machine only ever adds; then the longest time
that one scrape kept the event loop from anything else, in CPU time of its thread.
"""

import argparse
import asyncio
import random
import statistics
from time import perf_counter, process_time, thread_time

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import BackendSpec, BucketSpec, ClassSpec, CoreSettings, ModelSpec
from gateway.core.types import Outcome, Snapshot
from gateway.telemetry.metrics import RequestRecord, Telemetry

_KEYS = 16


def build(backends: int, classes: int, models: int) -> Telemetry:
    """Return a telemetry with all that its names allow on the page."""
    clock = perf_counter
    backend_names = [f"vllm-{i}.pool.svc:8000" for i in range(backends)]
    model_names = [f"Qwen/Qwen3-Coder-{i}" for i in range(models)]
    class_names = [f"class-{i}" for i in range(classes)]
    keys = [f"team-{i}" for i in range(_KEYS)]
    bucket = BucketSpec(1_000.0, 10_000.0)
    settings = CoreSettings(
        models=tuple(ModelSpec(name, tuple(backend_names)) for name in model_names),
        backends=tuple(BackendSpec(name) for name in backend_names),
        classes=tuple(
            ClassSpec(name, default=not i, bucket=bucket) for i, name in enumerate(class_names)
        ),
    )
    dispatcher = QueuedDispatcher(settings, random.Random(1), clock())
    for i, name in enumerate(backend_names):
        shot = Snapshot(clock(), i, i, 0.37, kv_capacity_tokens=400_000, block_tokens=16)
        dispatcher.observe(name, shot, clock())
    telemetry = Telemetry(dispatcher, clock=clock, version="bench")
    telemetry.set_labels(class_names, model_names, backend_names, keys)
    fill(telemetry, class_names, model_names, backend_names, keys)
    return telemetry


def fill(
    telemetry: Telemetry,
    classes: list[str],
    models: list[str],
    backends: list[str],
    keys: list[str],
) -> None:
    """Count a request of every kind, with figures as long as a month makes them."""
    for i, outcome in enumerate(Outcome):
        for model in models:
            for cls in classes:
                telemetry.itl(cls, model).observe_all([0.0123, 0.0456, 1.5])
                for j, backend in enumerate(backends):
                    record = RequestRecord(
                        "r-1", "/v1/chat/completions", 1.0, cls, model, backend, keys[j % len(keys)]
                    )
                    record.outcome, record.ran = outcome, True
                    record.queue_s, record.ttft_s, record.total_s = 0.1234 * i, 0.4321, 7.654321
                    record.prompt_tokens, record.completion_tokens = 123_456_789 + i, 12_345_678
                    record.predicted_tokens, record.cached_tokens = 98_765_432, 98_765_411
                    telemetry.finished(record)


async def longest_block_s(telemetry: Telemetry) -> float:
    """Return the most CPU time between two turns of the loop while it makes a page."""
    longest, done = 0.0, False

    async def tick() -> None:
        nonlocal longest
        before = thread_time()
        while not done:
            await asyncio.sleep(0)
            now = thread_time()
            longest, before = max(longest, now - before), now

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    await telemetry.scrape()
    done = True
    await ticking
    return longest


def measure(telemetry: Telemetry, rounds: int) -> tuple[float, float, int, int]:
    """Return the least and the median CPU seconds of a page, its bytes and its samples."""
    took, page = [], b""
    for _ in range(rounds):
        start = process_time()
        page = telemetry.render()
        took.append(process_time() - start)
    samples = sum(1 for line in page.splitlines() if not line.startswith(b"#"))
    return min(took), statistics.median(took), len(page), samples


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", type=int, default=64)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    telemetry = build(args.backends, args.classes, args.models)
    least, median, size, samples = measure(telemetry, args.rounds)
    print(f"{args.backends} backends x {args.classes} classes x {args.models} models:")
    print(f"  {samples} samples, {size / 1024:.0f} KiB")
    print(f"  a page   {1000 * least:6.2f} ms of CPU at best, {1000 * median:.2f} at the median")
    blocks = [asyncio.run(longest_block_s(telemetry)) for _ in range(args.rounds)]
    print(f"  the loop {1000 * min(blocks):6.2f} ms held at best, ", end="")
    print(f"{1000 * statistics.median(blocks):.2f} at the median of {args.rounds} pages")


if __name__ == "__main__":
    main()
