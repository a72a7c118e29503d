"""Print what the way from a request to its block chain costs, beside the budgets.

Run: python -m loadtest.bench_prompt. Prints figures, asserts nothing: machines differ.
"""

import random
import statistics
import time
from collections.abc import Callable

import orjson

from gateway.core.canonical import canonical
from gateway.core.chain import chain_bytes
from gateway.core.prompter import BytePrompter
from gateway.core.request import UsageOption, parse_json
from gateway.core.splice import replace_model, request_usage
from gateway.core.types import Api

WORDS = [
    *["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "returns"],
    '"def',
    "value:\n   ",
    "{}",
]


def main() -> None:
    rng = random.Random(1)
    for size in (1, 32, 128):
        request_path(chat_body(rng, size * 1024), size)
    chain_cost(rng)


def chat_body(rng: random.Random, size: int) -> bytes:
    """A coding conversation: a system prompt, tools for a third of it, then messages."""
    tools: list[dict[str, object]] = []
    messages = [{"role": "system", "content": text(rng, size // 8)}]
    while size > 4096 and len(orjson.dumps(tools)) < size // 3:
        properties = {f"p{i}": {"type": "string", "description": text(rng, 80)} for i in range(8)}
        parameters = {"type": "object", "properties": properties}
        about = text(rng, 2000)
        function = {"name": f"tool_{len(tools)}", "description": about, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    body = {"model": "qwen3-coder", "stream": True, "tools": tools, "messages": messages}
    while (missing := size - len(orjson.dumps(body))) > 50:
        content = text(rng, min(1500, max(1, missing - 45)))
        messages.append({"role": "user", "content": content})
    return orjson.dumps(body)


def text(rng: random.Random, size: int) -> str:
    return " ".join(rng.choices(WORDS, k=size // 5 + 1))[:size]


def cost_us(call: Callable[[], object], seconds: float = 0.3) -> tuple[float, float]:
    """Median and 99th percentile of CPU microseconds a call, over batches of some 20 us."""
    start = time.thread_time_ns()
    for _ in range(20):
        call()
    batch = max(1, 400_000 // max(1, time.thread_time_ns() - start))
    end = time.perf_counter() + seconds
    took: list[float] = []
    while time.perf_counter() < end:
        start = time.thread_time_ns()
        for _ in range(batch):
            call()
        took.append((time.thread_time_ns() - start) / batch)
    took.sort()
    return statistics.median(took) / 1e3, took[int(len(took) * 0.99)] / 1e3


def show(what: str, figures: tuple[float, float], bar: str = "") -> None:
    print(f"{what:<48} {figures[0]:>9.2f} us  p99 {figures[1]:>9.2f} us  {bar}")


def request_path(body: bytes, size: int) -> None:
    request = parse_json(Api.CHAT, body)
    prompter = BytePrompter(7)
    bar = {1: "~10 us together", 128: "<= 250 us together"}.get(size, "")
    show(f"{size} KB: parse", cost_us(lambda: parse_json(Api.CHAT, body)))
    show(f"{size} KB: canonical", cost_us(lambda: canonical(request)))
    show(f"{size} KB: canonical + chain + count", cost_us(lambda: prompter.chain(request)))
    show(f"{size} KB: all", cost_us(lambda: prompter.chain(parse_json(Api.CHAT, body))), bar)
    show(f"{size} KB: splice model", cost_us(lambda: replace_model(body, "other")))
    show(f"{size} KB: splice usage", cost_us(lambda: request_usage(body, UsageOption.ABSENT)))


def chain_cost(rng: random.Random) -> None:
    for size in (1, 128, 1024):
        data = rng.randbytes(size * 1024)
        bar = "<= 150 us" if size == 128 else ""
        show(f"chain of {size} KB", cost_us(lambda data=data: chain_bytes(data, 7)), bar)  # type: ignore[misc]


if __name__ == "__main__":
    main()
