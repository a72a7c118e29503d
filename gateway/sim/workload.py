"""Synthetic traffic: timed conversations of coding agents and bursty chat, deterministic by seed.

Values only: who starts when, what each turn says, how long its user thinks. Times are engine
seconds from the start; lengths are tokens of the toy tokeniser (four bytes). After results.md: W1
(coding: one common prefix, repositories, growing turns) and W2 (chat: gamma arrivals, few system
prompts, few turns).
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from gateway.sim.tokens import TOKEN_BYTES

_CORPUS_BYTES = 256 * 1024
_TOOL_NAMES = ("read_file", "write_file", "run_tests", "search", "list_files", "apply_patch")


@dataclass(slots=True, frozen=True)
class Turn:
    """One request: the user thinks `think_s` after the last answer, then sends `text`."""

    text: str
    max_tokens: int
    think_s: float


@dataclass(slots=True, frozen=True)
class Session:
    """One conversation. `tools` are OpenAI tool definitions; empty = none are offered."""

    id: str
    cls: str
    start_s: float
    system: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]


@dataclass(slots=True, frozen=True)
class CodingShape:
    """Coding agents: `common` + `repository` tokens before a dialogue that grows by `step`."""

    users: int = 64
    common: int = 12_000
    repositories: int = 30
    repository: int = 7_000
    turns: int = 12
    step: int = 3_000
    output: int = 310
    think_s: float = 5.0
    ramp_s: float = 60.0

    def scaled(self, divisor: int) -> "CodingShape":
        """Return the same shape with every context length divided."""
        return replace(
            self,
            common=self.common // divisor,
            repository=self.repository // divisor,
            step=self.step // divisor,
        )


@dataclass(slots=True, frozen=True)
class ChatShape:
    """Chat: sessions arrive `rate` per second with coefficient of variation `cv`."""

    rate: float = 2.0
    cv: float = 4.0
    prompts: int = 12
    shortest: int = 300
    longest: int = 3_000
    turns: float = 3.5
    question: int = 120
    output: int = 120
    think_s: float = 5.0

    def scaled(self, divisor: int) -> "ChatShape":
        """Return the same shape with every context length divided."""
        return replace(
            self,
            shortest=self.shortest // divisor,
            longest=self.longest // divisor,
            question=max(8, self.question // divisor),
        )


class Prose:
    """Text of any length in tokens; two texts never share a prefix unless asked twice."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        words = [
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(4096)
        ]
        self._corpus = " ".join(rng.choices(words, k=_CORPUS_BYTES // 5))[:_CORPUS_BYTES]

    def text(self, length: int) -> str:
        """Return a new text of `length` tokens (at least four)."""
        size = max(4, length) * TOKEN_BYTES
        opening = f"{self._rng.getrandbits(60):015x} "
        at = self._rng.randrange(_CORPUS_BYTES)
        repeats = (at + size) // _CORPUS_BYTES + 1
        return (opening + (self._corpus * repeats)[at : at + size])[:size]


def coding(shape: CodingShape, seconds: float, seed: int) -> list[Session]:
    """Return coding sessions that keep `shape.users` agents busy for `seconds`.

    Each user is a sequence of sessions; the next begins when the last has ended, so all but the
    first of a user have `start_s` after its expected end.
    """
    rng = Random(f"coding {seed}")  # noqa: S311 - reproducible traffic, not secrets
    prose = Prose(rng)
    tools = _tools(prose, shape.common // 2)
    common = prose.text(shape.common - shape.common // 2)
    repositories = [prose.text(shape.repository) for _ in range(shape.repositories)]
    turn_s = shape.think_s + 2.0
    sessions = []
    for user in range(shape.users):
        # Users begin spread over the ramp, and some in short sessions: not all end together.
        start = shape.ramp_s * user / shape.users
        number = 0
        while start < seconds:
            turns = max(2, round(rng.gauss(shape.turns, shape.turns / 4)))
            repository = rng.choice(repositories)
            made = [_coding_turn(rng, prose, shape, first=not i) for i in range(turns)]
            name = f"coding-{user}-{number}"
            system = common + repository
            sessions.append(Session(name, "coding", start, system, tools, tuple(made)))
            start += turns * turn_s
            number += 1
    return sorted(sessions, key=lambda session: session.start_s)


def _coding_turn(rng: Random, prose: Prose, shape: CodingShape, *, first: bool) -> Turn:
    length = max(8, round(rng.expovariate(1 / max(1, shape.step - shape.output))))
    output = max(4, round(rng.expovariate(1 / shape.output)))
    think = 0.0 if first else rng.expovariate(1 / shape.think_s)
    return Turn(prose.text(min(length, 4 * shape.step)), min(output, 4 * shape.output), think)


def chat(shape: ChatShape, seconds: float, seed: int) -> list[Session]:
    """Return chat sessions arriving within `seconds`, in bursts (gamma gaps)."""
    rng = Random(f"chat {seed}")  # noqa: S311
    prose = Prose(rng)
    spread = range(shape.prompts)
    step = (shape.longest - shape.shortest) / max(1, shape.prompts - 1)
    systems = [prose.text(round(shape.shortest + step * i)) for i in spread]
    sessions = []
    for number, start in enumerate(_arrivals(shape, seconds, rng)):
        turns = 1
        while rng.random() > 1 / shape.turns:
            turns += 1
        made = tuple(_chat_turn(rng, prose, shape, first=not i) for i in range(min(turns, 20)))
        name = f"chat-{number}"
        sessions.append(Session(name, "chat", start, rng.choice(systems), (), made))
    return sessions


def _arrivals(shape: ChatShape, seconds: float, rng: Random) -> Iterator[float]:
    """Yield arrival times with gamma gaps: shape 1/cv^2, mean 1/rate."""
    form = 1 / shape.cv**2
    now = rng.gammavariate(form, 1 / (shape.rate * form))
    while now < seconds:
        yield now
        now += rng.gammavariate(form, 1 / (shape.rate * form))


def _chat_turn(rng: Random, prose: Prose, shape: ChatShape, *, first: bool) -> Turn:
    length = max(4, round(rng.expovariate(1 / shape.question)))
    output = max(4, round(rng.expovariate(1 / shape.output)))
    think = 0.0 if first else rng.expovariate(1 / shape.think_s)
    return Turn(prose.text(min(length, 8 * shape.question)), min(output, 4 * shape.output), think)


def _tools(prose: Prose, length: int) -> tuple[dict[str, Any], ...]:
    """Return tool definitions of about `length` tokens together."""
    each = max(4, length // len(_TOOL_NAMES) - 40)
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return tuple(
        {
            "type": "function",
            "function": {"name": name, "description": prose.text(each), "parameters": parameters},
        }
        for name in _TOOL_NAMES
    )


# Traffic of one `demo` replica at load 1: the highest at which longest-prefix-plus-least-owed
# routing kept about 90 % of requests within SLO (simulated, 4 replicas, 120 s: 0.96 at 0.8, 0.91 at
# 0.9, 0.78 at 1.1; round robin 0.65, 0.53, 0.53).
_AGENTS_PER_REPLICA = 10.0
_CHATS_PER_REPLICA_PER_S = 0.25
_DEMO_DIVISOR = 8  # lengths of the `demo` profile


def demo(replicas: int, load: float, seconds: float, seed: int) -> list[Session]:
    """Return the demonstration's traffic: coding agents and chat, lengths for the `demo` profile.

    The agents' contexts together exceed one replica's KV cache and fit the pool's.
    """
    agents = CodingShape(
        users=max(1, round(_AGENTS_PER_REPLICA * load * replicas)),
        repositories=2 * replicas,
        output=80,
        ramp_s=seconds / 5,
    )
    talk = ChatShape(rate=_CHATS_PER_REPLICA_PER_S * load * replicas)
    return coding(agents.scaled(_DEMO_DIVISOR), seconds, seed) + chat(
        talk.scaled(_DEMO_DIVISOR), seconds, seed
    )
