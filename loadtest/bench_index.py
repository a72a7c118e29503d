"""Print what the prefix index costs at a million and ten million blocks, beside its budgets.

Run: python -m loadtest.bench_index [--json] [--blocks N,...] [--backends N,...] [--turn N].
CPU time per call, of the same calls in several runs the least each: what a neighbour on the machine
takes is not ours. The collector runs as in the gateway, its pauses are shown apart. Prints figures,
asserts nothing: machines differ.
"""

import argparse
import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import orjson

from gateway.collector import Collector
from gateway.core.trie import RadixTrie

SYSTEMS = 20
SYSTEM_BLOCKS = 128
LONG_BLOCKS = 4096
CALLS = 4_000
TIDY_EVERY = 500  # prompts: 2,000 a second
BUDGET_US = 10.0
BUDGET_BYTES = 32.0
STALL_BUDGET_MS = 5.0


def _clock_ns() -> int:
    """What reading the clock twice takes."""
    pairs = [(time.thread_time_ns(), time.thread_time_ns()) for _ in range(2_000)]
    return sorted(after - before for before, after in pairs)[len(pairs) // 2]


CLOCK_NS = _clock_ns()


class Calls:
    """CPU microseconds of each call of one kind."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def time(self, call: Callable[..., object], *given: object) -> object:
        """Make the call and note what it took; return what it does."""
        start = time.thread_time_ns()
        answer = call(*given)
        self.took.append((time.thread_time_ns() - start - CLOCK_NS) / 1e3)
        return answer

    def least(self, other: "Calls") -> None:
        """Keep of each call the quicker of two runs."""
        self.took = [min(pair) for pair in zip(self.took, other.took, strict=True)]

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.took)
        last = len(ordered) - 1
        return {
            "p50_us": round(ordered[last // 2], 2),
            "p99_us": round(ordered[int(last * 0.99)], 2),
            "worst_us": round(ordered[-1], 1),
        }


@dataclass
class Row:
    """One size of the index: what each operation costs there."""

    blocks: int
    backends: int
    turn_blocks: int
    calls: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_per_block: float = 0.0
    estimated_bytes_per_block: float = 0.0
    nodes: int = 0
    forgetting_ms: float = 0.0
    collector_worst_ms: float = 0.0
    collections: int = 0


def main() -> None:
    options = arguments()
    rows = []
    for blocks in options.blocks:
        for backends in options.backends:
            row = measure(blocks, backends, options.turn, options.runs)
            rows.append(row)
            if not options.json:
                show(row)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps([asdict(row) for row in rows]) + b"\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=numbers, default=[1_000_000, 10_000_000])
    parser.add_argument("--backends", type=numbers, default=[8, 64, 256])
    parser.add_argument("--turn", type=int, default=208, help="new blocks per prompt")
    parser.add_argument("--runs", type=int, default=3, help="of the same calls, the least counts")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of tables")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def chain(rng: random.Random, count: int) -> "array[int]":
    return array("Q", rng.randbytes(8 * count))


class Traffic:
    """Prompts under a few common system prompts, each at a home of its own, as in a busy fleet."""

    def __init__(self, rng: random.Random, backends: int, turn: int) -> None:
        self.rng = rng
        self.backends = backends
        self.turn = turn
        self.now = 0.0
        self.systems = [chain(rng, SYSTEM_BLOCKS) for _ in range(SYSTEMS)]
        self.recent: list[tuple[int, array[int]]] = []

    def prompt(self) -> "tuple[int, array[int]]":
        self.now += 1.0
        fresh = self.rng.choice(self.systems) + chain(self.rng, self.turn)
        made = self.rng.randrange(self.backends), fresh
        if len(self.recent) < CALLS:
            self.recent.append(made)
        else:
            self.recent[self.rng.randrange(CALLS)] = made
        return made

    def next_turn(self) -> "tuple[int, array[int]]":
        """A conversation that has grown by one turn, where it was before."""
        self.now += 1.0
        pick = self.rng.randrange(len(self.recent))
        home, before = self.recent[pick]
        grown = home, before + chain(self.rng, self.turn)
        self.recent[pick] = grown if len(grown[1]) < LONG_BLOCKS else (home, before[:SYSTEM_BLOCKS])
        return grown


def measure(blocks: int, backends: int, turn: int, runs: int) -> Row:
    row = Row(blocks, backends, turn)
    row.bytes_per_block = memory(turn, backends)
    kinds = Run(row).kinds
    for _ in range(runs - 1):
        for name, calls in Run(row).kinds.items():
            kinds[name].least(calls)
    row.calls = {name: calls.figures() for name, calls in kinds.items()}
    forgotten = ("evict half a backend", "drop a backend", "sweep, a slice")
    row.forgetting_ms = round(sum(sum(kinds[name].took) for name in forgotten) / 1e3, 1)
    return row


class Run:
    """One index, filled, used and emptied; every run of a row makes the same calls."""

    def __init__(self, row: Row) -> None:
        self.kinds: dict[str, Calls] = {}
        self.row = row
        self.puts = 0
        self.trie = RadixTrie(1 << 44)
        self.traffic = Traffic(random.Random(1), row.backends, row.turn_blocks)
        with Collector() as self.collector:
            self.fill()
            self.look()
            self.insert()
            self.forget()
            row.collections = self.collector.collections
            worst_ms = round(self.collector.worst_s * 1e3, 2)
            row.collector_worst_ms = min(row.collector_worst_ms or worst_ms, worst_ms)

    def calls(self, kind: str) -> Calls:
        return self.kinds.setdefault(kind, Calls())

    def put(self, calls: Calls, home: int, prompt: "array[int]") -> None:
        calls.time(self.trie.insert, home, prompt, self.traffic.now)
        self.puts += 1
        if self.puts % TIDY_EVERY == 0:
            self.collector.tidy(idle=False)

    def fill(self) -> None:
        trie, row = self.trie, self.row
        for slot in range(row.backends):
            trie.add_backend(slot, 1 << 30)
        calls = self.calls("insert of a prompt, growing")
        while trie.total_blocks < row.blocks:
            self.put(calls, *self.traffic.prompt())
        calls = self.calls("insert of a turn, growing")
        for _ in range(CALLS):
            self.put(calls, *self.traffic.next_turn())
        for slot in range(row.backends):
            trie.set_capacity(slot, trie.blocks(slot))
        row.nodes = trie.nodes
        row.estimated_bytes_per_block = round(trie.bytes / trie.total_blocks, 1)

    def look(self) -> None:
        lookup, traffic = self.trie.lookup, self.traffic
        calls = self.calls("lookup, a known prompt")
        for _, prompt in traffic.recent:
            calls.time(lookup, prompt)
        calls = self.calls("lookup, nothing known")
        for _ in range(CALLS):
            calls.time(lookup, chain(traffic.rng, LONG_BLOCKS))
        prompt = traffic.systems[0] + chain(traffic.rng, LONG_BLOCKS - SYSTEM_BLOCKS)
        for slot in range(traffic.backends):
            self.put(Calls(), slot, prompt)
        calls = self.calls(f"lookup, {LONG_BLOCKS} blocks, everywhere")
        for _ in range(CALLS):
            calls.time(lookup, prompt)
        while self.trie.sweep():  # as between requests
            pass

    def insert(self) -> None:
        """Into a full index: each request also ends, which is when its room is made."""
        for what, next_ in (("turn", self.traffic.next_turn), ("prompt", self.traffic.prompt)):
            calls = self.calls(f"insert of a {what}, full")
            after = self.calls(f"settle after a {what}")
            for _ in range(CALLS):
                home, prompt = next_()
                self.put(calls, home, prompt)
                after.time(self.trie.settle, home)

    def forget(self) -> None:
        """Halve one backend, drop another, and give the memory of both back in slices."""
        trie = self.trie
        half = trie.blocks(0) // 2
        self.calls("evict half a backend").time(trie.set_capacity, 0, half)
        self.calls("drop a backend").time(trie.drop, 1)
        calls = self.calls("sweep, a slice")
        while calls.time(trie.sweep):
            pass


def memory(turn: int, backends: int) -> float:
    """Real bytes per unique block, of a smaller index of the same make."""
    traffic = Traffic(random.Random(1), backends, turn)
    prompts = [traffic.prompt() for _ in range(400_000 // turn)]
    gc.collect()
    tracemalloc.start()
    trie = RadixTrie(1 << 44)
    for slot in range(backends):
        trie.add_backend(slot, 1 << 30)
    for at, (home, prompt) in enumerate(prompts):
        trie.insert(home, prompt, float(at))
    gc.collect()
    real = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return round(real / trie.total_blocks, 1)


def show(row: Row) -> None:
    print(
        f"\n{row.blocks:,} blocks, {row.backends} backends, {row.turn_blocks} new blocks a prompt"
    )
    for name, figures in row.calls.items():
        request = name.startswith(("lookup", "insert"))
        bar = f"<= {BUDGET_US:g} us p99" if request else f"worst <= {STALL_BUDGET_MS:g} ms"
        print(
            f"  {name:<34} p50 {figures['p50_us']:>9.2f}  p99 {figures['p99_us']:>9.2f}"
            f"  worst {figures['worst_us']:>9.1f} us   {bar}"
        )
    print(f"  {'evict and drop, to the last byte':<34} {row.forgetting_ms} ms in all")
    print(
        f"  {'memory per unique block':<34} {row.bytes_per_block} B"
        f" (estimate {row.estimated_bytes_per_block}, {row.nodes:,} nodes)   <= {BUDGET_BYTES:g} B"
    )
    print(
        f"  {'collector':<34} {row.collections} collections, worst {row.collector_worst_ms} ms"
        f"   <= {STALL_BUDGET_MS:g} ms"
    )


if __name__ == "__main__":
    main()
