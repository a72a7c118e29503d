"""One request list, played to a real engine over HTTP and to the simulator's engine on virtual time.

A list is made of lanes: a lane sends its turns one after another, each a while after the answer to
the one before. Prompts are token ids, so that the blocks are the same on both sides; a conversation's
next prompt goes on from the ids the real engine answered with. Never judges.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import aiohttp
import orjson

from gateway.core.chain import chain_tokens, token_seed
from gateway.sim.engine import Engine, Job
from gateway.sim.profiles import Profile

MODEL: Final = "tiny"

_FIRST_ID, _LAST_ID = 300, 3999  # of a vocabulary of 4,096: none of the special tokens
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Turn:
    """`new` ids after all of its conversation so far; sent `delay_s` after the answer before it."""

    conversation: int
    new: tuple[int, ...]
    output_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class Lane:
    """Turns one after another. A conversation belongs to one lane."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What became of one turn; seconds count from the list's start."""

    lane: int
    turn: int
    prompt: list[int]
    answer: list[int]
    cached_tokens: int
    sent_s: float
    first_s: float
    last_s: float
    queued_s: float = 0.0  # only the simulator tells it for each request

    @property
    def key(self) -> tuple[int, int]:
        """Return which turn it is."""
        return self.lane, self.turn

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token, as the client sees it."""
        return self.first_s - self.sent_s


@dataclass(slots=True)
class Run:
    """A list's outcomes, by lane and turn."""

    outcomes: list[Outcome] = field(default_factory=list)
    preemptions: int = 0
    queued_s: float = 0.0  # over all requests

    def ordered(self) -> list[Outcome]:
        """Return the outcomes in the list's own order."""
        return sorted(self.outcomes, key=lambda outcome: outcome.key)

    @property
    def answers(self) -> dict[tuple[int, int], list[int]]:
        """Return the ids each turn was answered with."""
        return {outcome.key: outcome.answer for outcome in self.outcomes}

    @property
    def hit_tokens(self) -> int:
        """Return the prompt tokens that were cached."""
        return sum(outcome.cached_tokens for outcome in self.outcomes)

    @property
    def makespan_s(self) -> float:
        """Return when the last answer ended."""
        return max(outcome.last_s for outcome in self.outcomes)


def random_ids(rng: Random, count: int) -> tuple[int, ...]:
    """Return ids that share no block with any other such run."""
    return tuple(rng.choices(range(_FIRST_ID, _LAST_ID + 1), k=count))


def one_by_one(rng: Random, requests: int) -> list[Lane]:
    """Return one lane: growing conversations, shared prefixes and unique prompts, never two at once."""
    prefixes = [random_ids(rng, 640) for _ in range(3)]
    turns = []
    for number in range(requests):
        kind = rng.random()
        output = rng.randrange(4, 40)
        if kind < 0.45:
            conversation = rng.randrange(4)
            turns.append(Turn(conversation, random_ids(rng, rng.randrange(60, 260)), output))
        elif kind < 0.75:
            new = rng.choice(prefixes) + random_ids(rng, rng.randrange(20, 200))
            turns.append(Turn(100 + number, new, output))
        else:
            turns.append(Turn(100 + number, random_ids(rng, rng.randrange(100, 1400)), output))
    return [Lane(tuple(turns))]


def arrivals(rng: Random, requests: int, burst: int) -> list[Lane]:
    """Return a lane for each request, `burst` of them at once and the others one a second on average.

    Growing documents (an agent that sends its whole context again), shared prefixes, unique prompts.
    """
    documents = [random_ids(rng, 2000) for _ in range(4)]
    lengths = [400] * len(documents)
    prefixes = [random_ids(rng, 500) for _ in range(3)]
    lanes, at = [], 0.0
    for number in range(requests):
        kind = rng.random()
        if kind < 0.35:
            which = rng.randrange(len(documents))
            lengths[which] = min(lengths[which] + rng.randrange(60, 260), len(documents[which]))
            new = documents[which][: lengths[which]]
        elif kind < 0.7:
            new = rng.choice(prefixes) + random_ids(rng, rng.randrange(20, 400))
        else:
            new = random_ids(rng, rng.randrange(60, 1200))
        at += rng.expovariate(1.0) if number >= burst else 0.0
        lanes.append(Lane((Turn(number, new, rng.randrange(4, 48)),), at))
    return lanes


def stretched(lanes: Sequence[Lane], factor: float) -> list[Lane]:
    """Return the same list with every start at `factor` times its seconds."""
    return [Lane(lane.turns, lane.start_s * factor) for lane in lanes]


def sessions(rng: Random, count: int, turns: int, think_s: float) -> list[Lane]:
    """Return conversations of two shared openings, each turn a while after the answer."""
    openings = [random_ids(rng, 420) for _ in range(2)]
    lanes = []
    for number in range(count):
        said = [openings[number % 2] + random_ids(rng, rng.randrange(40, 200))]
        said += [random_ids(rng, rng.randrange(30, 220)) for _ in range(turns - 1)]
        lanes.append(
            Lane(
                tuple(
                    Turn(number, new, rng.randrange(8, 48), rng.expovariate(1.0) * think_s)
                    for new in said
                )
            )
        )
    return lanes


def long_answers(rng: Random, requests: int) -> list[Lane]:
    """Return requests that come at once and whose answers outgrow the KV cache: some are preempted."""
    opening = random_ids(rng, 256)
    return [
        Lane(
            (
                Turn(
                    number,
                    (opening if rng.random() < 0.3 else ())
                    + random_ids(rng, rng.randrange(600, 900)),
                    rng.randrange(250, 450),
                ),
            ),
            0.02 * number,  # apart enough that both sides see them in one order
        )
        for number in range(requests)
    ]


def simulate(
    lanes: Sequence[Lane],
    profile: Profile,
    overhead_s: float,
    answers: Mapping[tuple[int, int], list[int]],
) -> Run:
    """Play the list on a simulated engine whose answers are the ids given, `overhead_s` away."""
    return _Simulation(lanes, profile, overhead_s, answers).run()


class _Simulation:
    def __init__(
        self,
        lanes: Sequence[Lane],
        profile: Profile,
        overhead_s: float,
        answers: Mapping[tuple[int, int], list[int]],
    ) -> None:
        self._lanes = lanes
        self._answers = answers
        self._overhead_s = overhead_s
        self._engine = Engine(profile)
        self._block = profile.block_tokens
        self._history: dict[tuple[int, int], list[int]] = {}
        self._flying: dict[str, Outcome] = {}
        self._due: list[tuple[float, int, int]] = []
        self._done = Run()

    def run(self) -> Run:
        for number, lane in enumerate(self._lanes):
            heapq.heappush(self._due, (lane.start_s + lane.turns[0].delay_s, number, 0))
        now = 0.0
        while True:
            change = self._engine.next_change_at()
            sent = self._due[0][0] + self._overhead_s if self._due else None
            if sent is not None and (change is None or sent < change):
                now = max(now, sent)
                self._send(now, *heapq.heappop(self._due))
            elif change is not None:
                now = max(now, change)
                for progress in self._engine.advance(now):
                    if progress.finished:
                        self._finish(progress.job)
            else:
                self._done.preemptions = self._engine.preemptions
                return self._done

    def _send(self, now: float, sent: float, number: int, index: int) -> None:
        turn = self._lanes[number].turns[index]
        prompt = [*self._history.get((number, turn.conversation), ()), *turn.new]
        answer = self._answers[number, index]
        self._history[number, turn.conversation] = prompt + answer
        hashes = chain_tokens(prompt + answer, token_seed(0, model=MODEL), self._block)
        job = Job(f"{number}.{index}", len(prompt), len(answer), hashes)
        self._flying[job.id] = Outcome(number, index, prompt, answer, 0, sent, 0.0, 0.0)
        self._engine.submit(job, now)

    def _finish(self, job: Job) -> None:
        outcome = self._flying.pop(job.id)
        assert job.started_at is not None
        assert job.first_token_at is not None
        assert job.finished_at is not None
        outcome.cached_tokens = job.cached_tokens
        outcome.first_s, outcome.last_s = job.first_token_at, job.finished_at
        outcome.queued_s = job.started_at - job.submitted_at
        self._done.queued_s += outcome.queued_s
        self._done.outcomes.append(outcome)
        turns = self._lanes[outcome.lane].turns
        if outcome.turn + 1 < len(turns):
            at = outcome.last_s + turns[outcome.turn + 1].delay_s
            heapq.heappush(self._due, (at, outcome.lane, outcome.turn + 1))


@dataclass(slots=True)
class Streamed:
    """A streamed answer: when each of its chunks came and how many tokens it brought."""

    sent_s: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    def take(self, at: float, event: Mapping[str, Any]) -> None:
        """Add one event of the stream."""
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ids:
                self.chunks.append((at, len(ids)))
                self.ids.extend(ids)
        usage = event.get("usage")
        if usage:
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Refused(Exception):
    """The engine answered with an error, or with another number of tokens than it was asked for."""


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], output_tokens: int
) -> Streamed:
    """Stream one completion of exactly `output_tokens` tokens; seconds are those of the clock.

    Raises:
        Refused: the engine would not, or answered with fewer.
    """
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    data = orjson.dumps(body)
    told = Streamed(time.monotonic())
    headers = {"content-type": "application/json"}
    async with session.post(url + "/v1/completions", data=data, headers=headers) as answer:
        if answer.status != 200:
            raise Refused(f"{answer.status} {(await answer.read())[:200]!r}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                told.take(time.monotonic(), orjson.loads(line[6:]))
    if len(told.ids) != output_tokens:
        raise Refused(f"{len(told.ids)} tokens instead of {output_tokens}")
    return told


def client() -> aiohttp.ClientSession:
    """Return a client that opens as many connections as there are requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
    )


async def play(session: aiohttp.ClientSession, url: str, lanes: Sequence[Lane]) -> Run:
    """Play the list to the engine at `url`."""
    run = Run()
    ask_it = partial(ask, session, url)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, lane in enumerate(lanes):
            group.create_task(_play_lane(ask_it, number, lane, began, run))
    return run


async def _play_lane(
    ask_it: Callable[[list[int], int], Awaitable[Streamed]],
    number: int,
    lane: Lane,
    began: float,
    run: Run,
) -> None:
    history: dict[int, list[int]] = {}
    await asyncio.sleep(began + lane.start_s - time.monotonic())
    for index, turn in enumerate(lane.turns):
        await asyncio.sleep(turn.delay_s)
        prompt = [*history.get(turn.conversation, ()), *turn.new]
        told = await ask_it(prompt, turn.output_tokens)
        history[turn.conversation] = prompt + told.ids
        run.outcomes.append(
            Outcome(
                number,
                index,
                prompt,
                told.ids,
                told.cached_tokens,
                told.sent_s - began,
                told.chunks[0][0] - began,
                told.chunks[-1][0] - began,
            )
        )
