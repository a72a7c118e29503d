"""Print what the index and the way to it cost, beside their budgets (design, section 3).

Run: python -m loadtest.bench_index. Prints figures, asserts nothing: machines differ.
"""

import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable

import orjson

from gateway.core.canonical import canonical
from gateway.core.chain import chain_bytes
from gateway.core.prompter import BytePrompter
from gateway.core.request import UsageOption, parse_json
from gateway.core.splice import replace_model, request_usage
from gateway.core.trie import RadixTrie
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
    trie_cost(rng, backends=64)
    worst_lookup(rng)
    memory(rng)


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


def quantiles_us(took: list[int]) -> tuple[float, float]:
    took.sort()
    return took[len(took) // 2] / 1e3, took[int(len(took) * 0.99)] / 1e3


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


def blocks(rng: random.Random, count: int) -> "array[int]":
    return array("Q", (rng.getrandbits(64) for _ in range(count)))


def trie_cost(rng: random.Random, backends: int) -> None:
    """Growing conversations on 64 backends at their capacity, under a common system prompt."""
    trie = RadixTrie(1 << 40)
    for slot in range(backends):
        trie.add_backend(slot, 6_000)
    systems = [blocks(rng, 128) for _ in range(20)]
    talks = [rng.choice(systems) + blocks(rng, 80) for _ in range(2_000)]
    homes = [rng.randrange(backends) for _ in talks]
    inserts: list[int] = []
    moves: list[int] = []
    gc.collect()
    gc.freeze()
    for step in range(30_000):
        pick = rng.randrange(len(talks))
        talks[pick] = talks[pick] + blocks(rng, 13)
        if len(talks[pick]) > 600:
            talks[pick] = rng.choice(systems) + blocks(rng, 80)
        home = homes[pick] if rng.random() < 0.9 else rng.randrange(backends)
        start = time.thread_time_ns()
        trie.insert(home, talks[pick], float(step))
        if step > 15_000:
            (inserts if home == homes[pick] else moves).append(time.thread_time_ns() - start)
    insert, move = quantiles_us(inserts), quantiles_us(moves)
    show("trie insert of a turn (64 backends, all full)", insert, "<= 10 us p99")
    show("trie insert of a talk on another backend", move)
    print(f"{'':<48} {trie.nodes} nodes, {trie.total_blocks} blocks, {trie.bytes >> 20} MiB")
    talk = talks[0]
    show(
        f"trie lookup of a talk ({len(talk)} blocks)",
        cost_us(lambda: trie.lookup(talk)),
        "<= 10 us p99",
    )
    show("depths of a talk", cost_us(lambda: trie.depths(talk)))


def worst_lookup(rng: random.Random) -> None:
    """4,096 blocks held by 64 backends, each to another depth."""
    trie = RadixTrie(1 << 40)
    chain = blocks(rng, 4096)
    for slot in range(64):
        trie.add_backend(slot, 1 << 30)
        trie.insert(slot, chain[: 64 * (slot + 1)], float(slot))
    show(
        "trie lookup, 4096 blocks, 64 depths (worst)",
        cost_us(lambda: trie.lookup(chain)),
        "worst 20 us",
    )
    for slot in range(64):
        trie.insert(slot, chain, 100.0 + slot)
    show(
        "trie lookup, 4096 blocks, 64 backends", cost_us(lambda: trie.lookup(chain)), "<= 10 us p99"
    )


def memory(rng: random.Random) -> None:
    for turn, bar in ((208, "<= 32 B"), (64, ""), (16, "")):
        trie = RadixTrie(1 << 40)
        for slot in range(64):
            trie.add_backend(slot, 1 << 30)
        systems = [blocks(rng, 128) for _ in range(20)]
        gc.collect()
        tracemalloc.start()
        for step in range(2_000):
            trie.insert(rng.randrange(64), rng.choice(systems) + blocks(rng, turn), float(step))
        gc.collect()
        real = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        each = real / trie.total_blocks
        print(
            f"memory per unique block, {turn} new blocks a prompt: {each:.1f} B {bar} (estimate {trie.bytes / trie.total_blocks:.1f})"
        )


if __name__ == "__main__":
    main()
