"""What the core's steps cost in CPU: `python -m loadtest.bench_decide`. Prints figures, judges nothing.

First a request's whole way through the core at 2 backends (a conversation of `--size` bytes in
`--turns` turns, 16 in flight), then `admit` and the end alone per policy and pool size, with about
12 in flight on each backend. Process CPU time of batches; the least of the rounds, because a busy
machine only ever adds.
"""

import argparse
from array import array
from collections.abc import Callable, Iterable
from random import Random
from time import process_time
from typing import Any

from gateway.core.classify import Features
from gateway.core.dispatcher import Dispatcher
from gateway.core.policies import POLICIES
from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.settings import (
    BackendSpec,
    ClassSpec,
    CoreSettings,
    MatchRule,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import Api, Chain, Finish, Outcome, Query, Ticket, Usage
from loadtest.bench.load import conversation

_ROUND = 25
_PER_BACKEND = 12
_BATCH = 16
_CONVERSATIONS = 64
_DONE = Finish(Outcome.OK, True, Usage(2600, 200, None), 200)
_AGENTS = ("claude-cli*", "codex*", "cline*", "aider*", "continue*", "opencode*")
_CLASSES = (
    ClassSpec(
        "coding",
        (
            MatchRule(path=Api.MESSAGES.value),
            MatchRule(tools=True),
            MatchRule(min_prompt_tokens=8000),
            *[MatchRule(user_agent=agent) for agent in _AGENTS],
        ),
    ),
    ClassSpec("chat", default=True),
)


class Stopwatch:
    """Microseconds per item of each step, the least of its rounds."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[float]] = {}

    def run(
        self, step: str, work: Callable[..., Any], items: Iterable[tuple[Any, ...]]
    ) -> list[Any]:
        """Time `work` over the argument tuples and return its results."""
        batch = list(items)
        start = process_time()
        results = [work(*item) for item in batch]
        spent = process_time() - start
        if batch:
            self._rounds.setdefault(step, []).append(1e6 * spent / len(batch))
        return results

    def figures(self) -> dict[str, float]:
        """Return what each step costs; the first tenth of the rounds was warming up."""
        return {step: min(rounds[len(rounds) // 10 :]) for step, rounds in self._rounds.items()}


def settings(count: int, policy: str, shadow: str | None = None) -> CoreSettings:
    names = tuple(f"b{index}" for index in range(count))
    return CoreSettings(
        models=(ModelSpec("m", names),),
        backends=tuple(BackendSpec(name) for name in names),
        classes=_CLASSES,
        routing=RoutingSpec(policy=policy, shadow=shadow),
    )


def life(size: int, turns: int, rounds: int, *, stream: bool) -> dict[str, float]:
    """Return the microseconds of every step of a request at 2 backends."""
    core = Dispatcher(settings(2, "cost"), Random(1), 0.0)
    prompter = BytePrompter(1)
    watch = Stopwatch()
    options = b',"stream":true' if stream else b""
    bodies = [conversation(size, turns, seed, options) for seed in range(_CONVERSATIONS)]
    agent = "OpenAI/Python 3.57.0 "
    tokens = size // 4
    for turn in range(rounds):
        now = turn * 0.01
        batch = [bodies[(turn * _BATCH + i) % _CONVERSATIONS] for i in range(_BATCH)]
        parsed = watch.run("parse", parse_json, [(Api.CHAT, body) for body in batch])
        chains = watch.run("chain", prompter.chain, [(request,) for request in parsed])
        seen = [
            Features(
                Api.CHAT.value, tools=False, prompt_tokens=chain.tokens, user_agent=agent.strip()
            )
            for chain in chains
        ]
        verdicts = watch.run("classify", core.classify, [(features,) for features in seen])
        asked = [
            Query("m", cls, chain, 250, None, rule, None, stream)
            for chain, (cls, rule) in zip(chains, verdicts, strict=True)
        ]
        done = Finish(Outcome.OK, True, Usage(tokens, 40, None), 40, now + 0.005)
        tickets = watch.run("admit", core.admit, [(query, now) for query in asked])
        named = [(f"{turn}-{i}", ticket, now) for i, ticket in enumerate(tickets)]
        watch.run("remember", core.remember, named)
        watch.run("first_token", core.first_token, [(ticket, now + 0.002) for ticket in tickets])
        watch.run("finish", core.finish, [(ticket, done, now + 0.005) for ticket in tickets])
        watch.run("learn", prompter.learn, [("m", "chat", chain, tokens) for chain in chains])
    return watch.figures()


def queries(count: int, rng: Random) -> list[Query]:
    common = [rng.getrandbits(64) for _ in range(20)]
    return [Query("m", "chat", Chain(_hashes(common, rng), 64.0, 2600), 250) for _ in range(count)]


def _hashes(common: list[int], rng: Random) -> "array[int]":
    return array("Q", common + [rng.getrandbits(64) for _ in range(20)])


def pool(count: int, policy: str, rounds: int, shadow: str | None = None) -> dict[str, float]:
    """Return the microseconds of `admit`, `first_token` and `finish` at `count` backends.

    Every request shares half of its prompt with the others of its round.
    """
    rng = Random(1)
    core = Dispatcher(settings(count, policy, shadow), rng, 0.0)
    live: list[Ticket] = []
    watch = Stopwatch()
    warm = count * _PER_BACKEND // _ROUND + 5
    for turn in range(rounds + warm):
        if turn == warm:
            watch = Stopwatch()
        now = 1.0 + turn
        live += watch.run("admit", core.admit, [(query, now) for query in queries(_ROUND, rng)])
        leaving = live[: max(0, len(live) - count * _PER_BACKEND)]
        del live[: len(leaving)]
        watch.run("first_token", core.first_token, [(ticket, now) for ticket in leaving])
        watch.run("finish", core.finish, [(ticket, _DONE, now) for ticket in leaving])
    return watch.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--policy", action="append", choices=[*POLICIES, "none"])
    parser.add_argument("--shadow", choices=list(POLICIES), help="score this one beside each")
    arguments = parser.parse_args()
    steps = life(arguments.size, arguments.turns, 10 * arguments.rounds, stream=arguments.stream)
    for step, cost in (*steps.items(), ("sum", sum(steps.values()))):
        print(f"{step:<16}{cost:>8.2f}us")
    sizes = (1, 8, 64, 256)
    policies = [name for name in arguments.policy or POLICIES if name != "none"]
    if policies:
        print("\nadmit".ljust(17) + "".join(f"{size:>10}" for size in sizes) + "   256/8   end@8")
    for policy in policies:
        figures = [pool(size, policy, arguments.rounds, arguments.shadow) for size in sizes]
        cells = "".join(f"{figure['admit']:>8.1f}us" for figure in figures)
        ratio = figures[3]["admit"] / figures[1]["admit"]
        end = figures[1]["first_token"] + figures[1]["finish"]
        print(f"{policy:<16}{cells}{ratio:>8.1f}{end:>6.1f}us", flush=True)


if __name__ == "__main__":
    main()
