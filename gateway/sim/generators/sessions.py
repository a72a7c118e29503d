"""Closed-loop conversations: coding agents (W1), bursty chat (W2), their mix (W3), tools (TA).

Shapes after the workloads of the simulation notes; every number that the notes leave open has its
reason beside it. Deterministic by seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from gateway.sim.generators.arrivals import around, bursty, geometric, log_normal, poisson
from gateway.sim.traffic import Ask, Dialogue, blocks_in, fresh, in_order, join


@dataclass(slots=True, frozen=True)
class Coding:
    """Coding agents: `common` + `repository` tokens before a dialogue that grows by `step`.

    12 turns of 3,400 tokens over 19k end at 60k; the mean prompt is about 40k. Think times are
    exponential with one of the means in `think_s`: a tool that runs, or a person who reads.
    """

    common: int = 12_000
    repositories: int = 30
    repository: int = 7_000
    turns: int = 12
    step: int = 3_400
    output: int = 310
    think_s: tuple[float, ...] = (2.0, 15.0)


@dataclass(slots=True, frozen=True)
class Chat:
    """Chat: sessions in bursts, one of a few system prompts, short questions and answers."""

    cv: float = 4.0
    systems: int = 12
    shortest: int = 300
    longest: int = 3_000
    turns: float = 3.5
    question: int = 120
    output: int = 200
    think_s: float = 8.0
    most_turns: int = 20


@dataclass(slots=True, frozen=True)
class Mix:
    """Chat with a `share` of the sessions coding."""

    chat: Chat = field(default_factory=lambda: Chat(cv=3.0))
    coding: Coding = field(default_factory=Coding)
    share: float = 0.15


@dataclass(slots=True, frozen=True)
class Agents:
    """A tool and agent mix: two hot templates with tiny answers, and long multi-turn work.

    `hot` is the templates' share of the requests.
    """

    templates: tuple[int, ...] = (6_144, 2_560)
    hot: float = 0.52
    question: int = 150
    shortest_output: int = 3
    longest_output: int = 40
    systems: int = 20
    system: int = 2_048
    opening: int = 5_000
    step: int = 1_500
    output: int = 250
    turns: float = 4.0
    think_s: float = 6.0
    most_turns: int = 16


def coding(rng: Random, rate: float, seconds: float, shape: Coding) -> list[Dialogue]:
    """Return coding sessions that together ask `rate` times per second."""
    common = fresh(rng, blocks_in(shape.common))
    base = shape.common + shape.repository
    repositories = [
        common + fresh(rng, blocks_in(base) - len(common)) for _ in range(shape.repositories)
    ]
    made = []
    for start in poisson(rng, rate / shape.turns, seconds):
        turns = max(2, round(rng.gauss(shape.turns, shape.turns / 4)))
        tokens = base
        asks = []
        for _ in range(turns):
            tokens += around(rng, shape.step - shape.output, least=16)
            output = around(rng, shape.output)
            asks.append(Ask(tokens, output, rng.expovariate(1 / rng.choice(shape.think_s))))
            tokens += output
        chain = join(rng, tokens, rng.choice(repositories))
        made.append(Dialogue(start, "coding", chain, tuple(asks)))
    return made


def chat(rng: Random, rate: float, seconds: float, shape: Chat) -> list[Dialogue]:
    """Return chat sessions that together ask `rate` times per second."""
    spread = (shape.longest - shape.shortest) / max(1, shape.systems - 1)
    lengths = [round(shape.shortest + spread * number) for number in range(shape.systems)]
    systems = [(length, fresh(rng, blocks_in(length))) for length in lengths]
    made = []
    for start in bursty(rng, rate / shape.turns, seconds, shape.cv):
        tokens, system = rng.choice(systems)
        asks = []
        for _ in range(geometric(rng, shape.turns, shape.most_turns)):
            tokens += around(rng, shape.question, most=8.0)
            output = around(rng, shape.output)
            asks.append(Ask(tokens, output, rng.expovariate(1 / shape.think_s)))
            tokens += output
        made.append(Dialogue(start, "chat", join(rng, tokens, system), tuple(asks)))
    return made


def mix(rng: Random, rate: float, seconds: float, shape: Mix) -> list[Dialogue]:
    """Return both kinds of sessions, which together ask `rate` times per second."""
    chat_shape, coding_shape, share = shape.chat, shape.coding, shape.share
    turns = (1 - share) * chat_shape.turns + share * coding_shape.turns
    talk = rate * (1 - share) * chat_shape.turns / turns
    code = rate * share * coding_shape.turns / turns
    return in_order(
        [*chat(rng, talk, seconds, chat_shape), *coding(rng, code, seconds, coding_shape)]
    )


def agents(rng: Random, rate: float, seconds: float, shape: Agents) -> list[Dialogue]:
    """Return the tool and agent mix at `rate` requests per second."""
    return in_order([*_tools(rng, rate, seconds, shape), *_work(rng, rate, seconds, shape)])


def _tools(rng: Random, rate: float, seconds: float, shape: Agents) -> Iterator[Dialogue]:
    templates = [(length, fresh(rng, blocks_in(length))) for length in shape.templates]
    for start in poisson(rng, rate * shape.hot, seconds):
        tokens, template = rng.choice(templates)
        tokens += around(rng, shape.question)
        output = rng.randint(shape.shortest_output, shape.longest_output)
        chain = join(rng, tokens + output, template)
        yield Dialogue(start, "chat", chain, (Ask(tokens, output),))


def _work(rng: Random, rate: float, seconds: float, shape: Agents) -> Iterator[Dialogue]:
    systems = [fresh(rng, blocks_in(shape.system)) for _ in range(shape.systems)]
    for start in poisson(rng, rate * (1 - shape.hot) / shape.turns, seconds):
        tokens = shape.system + log_normal(rng, shape.opening, 1.0, least=100, most=60_000)
        asks = []
        for _ in range(geometric(rng, shape.turns, shape.most_turns)):
            output = around(rng, shape.output)
            asks.append(Ask(tokens, output, rng.expovariate(1 / shape.think_s)))
            tokens += output + around(rng, shape.step - shape.output)
        chain = join(rng, tokens, rng.choice(systems))
        yield Dialogue(start, "coding", chain, tuple(asks))
