"""Open-loop single requests: hot documents (W4), prefix groups (W5), unique (W6), short prompts.

Deterministic by seed.
"""

from dataclasses import dataclass
from random import Random

from gateway.sim.generators.arrivals import around, log_normal, poisson
from gateway.sim.traffic import Ask, Dialogue, blocks_in, fresh, join


@dataclass(slots=True, frozen=True)
class Hot:
    """One document that a share of all requests begins with, some more, and unique prompts.

    All documents together fit one replica's KV cache (60 x 5k + 24k of 420k tokens), as they do
    where spreading costs little.
    """

    document: int = 24_000
    hot: float = 0.3
    documents: int = 60
    length: int = 5_000
    warm: float = 0.5
    unique: int = 2_000
    question: int = 200
    output: int = 200


@dataclass(slots=True, frozen=True)
class Groups:
    """`groups` prefixes, each asked about by several users, nothing else shared."""

    groups: int = 150
    prefix: int = 6_000
    question: int = 1_200
    output: int = 500


@dataclass(slots=True, frozen=True)
class Unique:
    """Prompts that share nothing, log-normal lengths."""

    prompt: int = 3_500
    sigma: float = 1.0
    output: int = 250
    least: int = 32
    most: int = 60_000


SHORT = Unique(prompt=150, sigma=0.7, output=150, least=16, most=1_000)


def hot(rng: Random, rate: float, seconds: float, shape: Hot) -> list[Dialogue]:
    """Return questions about documents, `rate` per second."""
    document = fresh(rng, blocks_in(shape.document))
    others = [fresh(rng, blocks_in(shape.length)) for _ in range(shape.documents)]
    made = []
    for start in poisson(rng, rate, seconds):
        drawn = rng.random()
        if drawn < shape.hot:
            tokens, shared = shape.document, document
        elif drawn < shape.hot + shape.warm:
            tokens, shared = shape.length, rng.choice(others)
        else:
            tokens, shared = around(rng, shape.unique), fresh(rng, 0)
        tokens += around(rng, shape.question)
        output = around(rng, shape.output)
        chain = join(rng, tokens + output, shared)
        made.append(Dialogue(start, "chat", chain, (Ask(tokens, output),)))
    return made


def groups(rng: Random, rate: float, seconds: float, shape: Groups) -> list[Dialogue]:
    """Return questions on one of the groups' prefixes, `rate` per second."""
    prefixes = [fresh(rng, blocks_in(shape.prefix)) for _ in range(shape.groups)]
    tokens = shape.prefix + shape.question
    made = []
    for start in poisson(rng, rate, seconds):
        output = max(16, round(rng.gauss(shape.output, shape.output / 5)))
        chain = join(rng, tokens + output, rng.choice(prefixes))
        made.append(Dialogue(start, "chat", chain, (Ask(tokens, output),)))
    return made


def unique(rng: Random, rate: float, seconds: float, shape: Unique) -> list[Dialogue]:
    """Return prompts that nobody has sent before, `rate` per second."""
    made = []
    for start in poisson(rng, rate, seconds):
        tokens = log_normal(rng, shape.prompt, shape.sigma, least=shape.least, most=shape.most)
        output = around(rng, shape.output)
        made.append(Dialogue(start, "chat", join(rng, tokens + output), (Ask(tokens, output),)))
    return made
