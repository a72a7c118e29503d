"""One simulated vLLM engine, sans-io: requests in, progress out, on whatever time it is told.

A model of vLLM V1's scheduler: continuous batching, a token budget per step with decodes first,
chunked prefill, FCFS, prefix cache, preemption by recompute, linear step time (results.md). Never
reads a clock, waits, or draws a random number: the same calls give the same answers.

Steps between two changes of the batch differ only by the growing context, so they are planned
together as one stretch with a closed form for every step's end. A simulator may therefore jump
from change to change (`next_change_at`), and a server follows each step (`next_event_at`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from gateway.sim.journal import Journal
from gateway.sim.kvcache import BlockPool
from gateway.sim.profiles import Profile


class EngineFull(Exception):
    """The waiting queue is at its cap."""


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to generate.

    `hashes[i]` is the chained hash of full blocks 0..i of prompt and answer together; what it
    leaves out is never shared; `ids` are the packed tokens and `salt` the cache salt behind them, for
    an engine that keeps a journal. The engine writes every field from `submitted_at` on; times are
    engine seconds, None until it happens. `cached_tokens` is the prefix hit at first scheduling.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int]
    ids: bytes = b""
    salt: str = ""
    submitted_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int = 0
    produced: int = 0
    preemptions: int = 0
    computed: int = 0
    live: bool = False
    decoding: bool = False
    held: list[int] = field(default_factory=list)
    private: int = 0
    published: int = 0

    @property
    def tokens(self) -> int:
        """Return prompt plus produced tokens: what must be computed before the next one."""
        return self.prompt_tokens + self.produced


class Progress(NamedTuple):
    """`tokens` new tokens of a job, the last of them at `at`; `since` is the token before them."""

    job: Job
    tokens: int
    at: float
    since: float | None
    finished: bool


@dataclass(slots=True)
class _Stretch:
    """`count` consecutive steps of one batch; step k (from 1) ends at `end(k)`."""

    start: float
    decodes: list[Job]
    chunks: list[tuple[Job, int]]
    first_s: float
    growth_s: float
    count: int
    done: int = 0

    def end(self, steps: int) -> float:
        return self.start + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_by(self, until: float) -> int:
        """Return how many of the steps have ended by `until`."""
        if until >= self.end(self.count):
            return self.count
        half = self.first_s - self.growth_s / 2
        span = max(0.0, until - self.start)
        root = sqrt(half * half + 2 * self.growth_s * span) if self.growth_s else 0.0
        steps = int((root - half) / self.growth_s if self.growth_s else span / self.first_s)
        steps = min(self.count, max(self.done, steps))
        while steps > self.done and self.end(steps) > until:
            steps -= 1
        while steps < self.count and self.end(steps + 1) <= until:
            steps += 1
        return steps


class Engine:
    """The scheduler. Every call's `now` (or `until`) is at or after that of the call before."""

    def __init__(
        self, profile: Profile, *, max_waiting: int = 10_000, journal: Journal | None = None
    ) -> None:
        self.profile = profile
        self.pool = BlockPool(profile.blocks, journal)
        self._journal = journal
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stretch: _Stretch | None = None
        self._events: list[Progress] = []
        self._max_waiting = max_waiting
        self._block = profile.block_tokens
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.aborted = 0
        self.steps = 0

    @property
    def running(self) -> int:
        """Return the sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the sequences not (or no longer) in the batch."""
        return len(self._waiting)

    @property
    def kv_utilization(self) -> float:
        """Return the share of KV blocks in use, 0..1."""
        return self.pool.utilization

    def submit(self, job: Job, now: float) -> None:
        """Queue a job.

        Raises:
            EngineFull: the waiting queue is at its cap.
            ValueError: the job could never fit, or produces nothing.
        """
        if job.output_tokens < 1 or job.prompt_tokens < 1:
            raise ValueError("a job needs at least one prompt and one output token")
        if self._blocks_for(job.prompt_tokens + job.output_tokens) > self.pool.total:
            raise ValueError("the job is larger than the KV cache")
        if len(self._waiting) >= self._max_waiting:
            raise EngineFull
        self._settle(now)
        job.submitted_at = now
        job.live = True
        self._waiting.append(job)
        self._replan(now)

    def abort(self, job: Job, now: float) -> bool:
        """Drop a job and free its blocks at once; False = it had already ended."""
        self._settle(now)
        if not job.live:
            return False
        job.live = False
        self.aborted += 1
        if job in self._running:
            self._running.remove(job)
            self._release(job)
        else:
            self._waiting.remove(job)
        self._replan(now)
        return True

    def next_event_at(self, steps: int = 1) -> float | None:
        """Return when `steps` more steps of this batch will have ended; None = nothing to do.

        Progress that `submit` or `abort` came across is already due: its own time is returned.
        """
        if self._events:
            return self._events[0].at
        stretch = self._stretch
        if stretch is None:
            return None
        return stretch.end(min(stretch.count, stretch.done + steps))

    def next_change_at(self) -> float | None:
        """Return when the batch next changes (a first token, a finish, a prefill chunk)."""
        if self._events:
            return self._events[0].at
        return None if self._stretch is None else self._stretch.end(self._stretch.count)

    def advance(self, until: float) -> list[Progress]:
        """Run every step that ends by `until`; return the progress since the last call."""
        self._settle(until)
        events, self._events = self._events, []
        return events

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no sequence holds."""
        self.pool.forget_idle()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def _replan(self, now: float) -> None:
        """Let the step in progress be the last of its stretch: the queue or the batch changed."""
        if self._stretch is None:
            self._plan(now)
        else:
            self._stretch.count = min(self._stretch.count, self._stretch.done + 1)

    def _settle(self, until: float) -> None:
        while (stretch := self._stretch) is not None:
            steps = stretch.steps_by(until)
            if steps > stretch.done:
                self._apply(stretch, steps - stretch.done, stretch.end(steps))
                stretch.done = steps
            if steps < stretch.count:
                return
            self._plan(stretch.end(steps))

    def _apply(self, stretch: _Stretch, steps: int, at: float) -> None:
        """Book `steps` ended steps, the last one at `at`."""
        self.steps += steps
        decodes = [job for job in stretch.decodes if job.live]
        ahead = int(stretch.done + steps < stretch.count)  # the next step is in progress already
        for job in decodes:  # all memory of these steps is taken before any of it is given back
            job.computed += steps
            self._grow(job, job.computed + ahead)
        for job in decodes:
            self._produce(job, steps, at)
        for job, chunk in stretch.chunks:
            if job.live:
                job.computed += chunk
                if job.computed == job.tokens:
                    self._produce(job, 1, at)

    def _produce(self, job: Job, tokens: int, at: float) -> None:
        since = job.last_token_at
        if job.first_token_at is None:
            job.first_token_at = at
            self.prompt_tokens += job.prompt_tokens
            self.prompt_tokens_cached += job.cached_tokens
        job.produced += tokens
        job.decoding = True
        job.last_token_at = at
        self.generation_tokens += tokens
        finished = job.produced >= job.output_tokens
        if finished:
            job.live = False
            job.finished_at = at
            self._running.remove(job)
            self._release(job)
        self._events.append(Progress(job, tokens, at, since, finished))

    def _plan(self, now: float) -> None:
        """Compose the next batch and its stretch of steps, starting at `now`."""
        decodes, preempted = self._schedule_decodes()
        budget = self.profile.step_tokens - len(decodes)
        chunks: list[tuple[Job, int]] = []
        for job in self._running:
            if budget and not job.decoding:
                chunk = min(job.tokens - job.computed, budget)
                budget -= self._schedule_chunk(job, chunk, chunks)
        if not preempted:
            self._admit(budget, chunks, now)
        if not decodes and not chunks:
            self._stretch = None
            return
        first, growth = self._step_time(decodes, chunks)
        # after a preemption the next step may have room for what waits
        count = 1 if chunks or preempted else self._stretch_length(decodes)
        self._stretch = _Stretch(now, decodes, chunks, first, growth, count)

    def _schedule_decodes(self) -> tuple[list[Job], bool]:
        """Give each decoding sequence room for one token, preempting the youngest if none is left.

        Returns the decodes of the step, and whether anything was preempted.
        """
        decodes: list[Job] = []
        preempted = False
        for job in list(self._running):
            if not job.decoding:
                continue  # prefilling, or preempted a moment ago
            while not self._grow(job, job.computed + 1):
                preempted = True
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is job:
                    break
            else:
                decodes.append(job)
        return decodes, preempted

    def _schedule_chunk(self, job: Job, chunk: int, chunks: list[tuple[Job, int]]) -> int:
        """Add a prefill chunk to the step; its blocks were taken at admission."""
        self._grow(job, job.computed + chunk)
        chunks.append((job, chunk))
        return chunk

    def _admit(self, budget: int, chunks: list[tuple[Job, int]], now: float) -> None:
        """Move waiting jobs into the batch in order while budget, slots and KV memory last."""
        while budget > 0 and self._waiting and self.running < self.profile.engine.max_sequences:
            job = self._waiting[0]
            tokens = job.tokens
            hit, idle = self.pool.match(job.hashes, (tokens - 1) // self._block)
            need = self._blocks_for(tokens) - hit
            if need + idle > self.pool.free:
                return
            self._waiting.popleft()
            self._running.append(job)
            self.pool.hold(job.hashes[:hit])
            self.pool.take(need)
            job.held, job.private, job.published = list(job.hashes[:hit]), need, hit
            job.computed = hit * self._block
            if job.started_at is None:
                job.started_at = now
                job.cached_tokens = job.computed
                self.prefix_queries += tokens
                self.prefix_hits += job.computed
            budget -= self._schedule_chunk(job, min(tokens - job.computed, budget), chunks)

    def _step_time(self, decodes: list[Job], chunks: list[tuple[Job, int]]) -> tuple[float, float]:
        """Return the first step's seconds, and by how many each later one is longer."""
        profile = self.profile.engine
        prefill = sum(chunk for _, chunk in chunks)
        attention = sum(chunk * (job.computed + chunk / 2) for job, chunk in chunks)
        read = sum(job.computed for job in decodes)
        first = (
            profile.step_s
            + profile.prefill_token_s * prefill
            + profile.attention_s * attention
            + profile.sequence_s * (len(decodes) + len(chunks))
            + profile.context_token_s * read
        )
        return first, profile.context_token_s * len(decodes)

    def _stretch_length(self, decodes: list[Job]) -> int:
        """Return how many steps this batch can run unchanged, memory for all of them included."""
        steps = min(job.output_tokens - job.produced for job in decodes)
        need = sum(
            self._blocks_for(job.computed + steps) - len(job.held) - job.private for job in decodes
        )
        return steps if need <= self.pool.free else 1

    def _grow(self, job: Job, tokens: int) -> bool:
        """Hold memory for the first `tokens` tokens and publish their full blocks; False = full."""
        need = self._blocks_for(tokens) - len(job.held) - job.private
        if need > 0:
            if need > self.pool.free:
                return False
            self.pool.take(need)
            job.private += need
        full = min(tokens // self._block, len(job.hashes))
        while job.published < full:
            block = job.hashes[job.published]
            if self.pool.publish(block):
                job.held.append(block)
                job.private -= 1
                if self._journal is not None:
                    self._journal.stored(job.hashes, job.published, job.ids, job.salt)
            job.published += 1
        return True

    def _preempt(self, job: Job) -> None:
        self._running.remove(job)
        self._release(job)
        job.computed = 0
        job.decoding = False
        job.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(job)

    def _release(self, job: Job) -> None:
        self.pool.release(job.held, job.private)
        job.held, job.private, job.published = [], 0, 0
