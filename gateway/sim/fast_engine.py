"""The simulated engine for long simulations: the schedule of `sim.engine`, only first tokens shown.

Equal to `Engine` step by step (a property test compares them), but what every decoding sequence
does in every step is kept as one sum for all (`fast_batch`): a step costs what changes in it, not
what runs. Never reads a clock, waits or draws a random number.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop
from math import inf

from gateway.sim.engine import EngineFull
from gateway.sim.fast_batch import Batch, FastJob
from gateway.sim.profiles import Profile
from gateway.sim.runpool import RunPool

Report = Callable[[FastJob, float], None]


class FastEngine(Batch):
    """The scheduler. `due` is when the batch next changes: call `run` then, not later.

    `on_first` and `on_finish` are called from `run`, `submit` and `abort`, with the time of the
    token; they may submit. Every call's `now` is at or after that of the call before. `slow`
    stretches all steps planned from now on.
    """

    def __init__(
        self,
        profile: Profile,
        on_first: Report,
        on_finish: Report,
        *,
        max_waiting: int = 10_000,
    ) -> None:
        super().__init__(profile)
        self.slow = 1.0
        self._on_first = on_first
        self._on_finish = on_finish
        self._max_waiting = max_waiting
        self._waiting: deque[FastJob] = deque()
        self._running: dict[FastJob, None] = {}
        self._admitted = 0
        self._chunks: list[tuple[FastJob, int]] = []
        self._busy = False
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0

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
        """Return the share of KV blocks in use, 0..1, as of the last `settle`."""
        return self.pool.utilization

    def submit(self, job: FastJob, now: float) -> None:
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
        if self.due <= now and not self._busy:
            self.run(now)
        job.live = True
        self._waiting.append(job)
        if self._busy:
            return
        if not self._count:
            self._plan(now)
        elif len(self._waiting) == 1:  # else its head is blocked, and this one behind it
            self._cut(now)

    def abort(self, job: FastJob, now: float) -> bool:
        """Drop a job and free its blocks at once; False = it had already ended."""
        self.settle(now)
        if not job.live:
            return False
        job.live = False
        if job in self._running:
            self._leave(job)
        else:
            self._waiting.remove(job)
        if self._count:
            self._cut(now)
        return True

    def kill(self) -> list[FastJob]:
        """Lose everything, as a process that dies; return the jobs that were alive."""
        lost = [*self._running, *self._waiting]
        for job in lost:
            job.live = job.joined = False
        self.pool = RunPool(self.profile.blocks)
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()
        self._ends.clear()
        self._writing.clear()
        self._chunks = []
        self._phases = [0] * self._block
        self._decoding = self._context = self._count = self._done = 0
        self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self.prompt_tokens = self.generation_tokens = 0
        self.due = inf
        return lost

    def settle(self, now: float) -> None:
        """Book every step that has ended by `now`."""
        if self.due <= now:
            self.run(now)
        if self._count > 1:
            steps = self._steps_by(now)
            if steps > self._done:
                self._decode(steps - self._done)

    def run(self, now: float) -> None:
        """Carry out every change of the batch that is due by `now`."""
        while self.due <= now:
            at = self.due
            self._busy = True
            self._decode(self._count - self._done)
            self._end_decodes(at)
            self._end_chunks(at)
            self._busy = False
            self._plan(at)

    # -- stretches ----------------------------------------------------------------------------

    def _cut(self, now: float) -> None:
        """Let the step in progress be the last of its stretch."""
        if self._count > 1:
            steps = self._steps_by(now) + 1
            if steps < self._count:
                self._count = steps
                self.due = self._end(steps)

    def _end_decodes(self, at: float) -> None:
        ends, step = self._ends, self._step
        while ends and ends[0][0] <= step:
            _, number, job = heappop(ends)
            if job.joined and job.number == number:
                job.finished_at = at
                job.live = False
                self._leave(job)
                self._on_finish(job, at)

    def _end_chunks(self, at: float) -> None:
        for job, chunk in self._chunks:
            if not job.live:
                continue
            job.computed += chunk
            if job.computed == job.tokens:
                self._produce_first(job, at)
        self._chunks = []

    def _produce_first(self, job: FastJob, at: float) -> None:
        """Produce the token that a finished prefill yields."""
        job.produced += 1
        self.generation_tokens += 1
        is_first = job.first_token_at is None
        if is_first:
            job.first_token_at = at
            self.prompt_tokens += job.prompt_tokens
        finished = job.produced >= job.output_tokens
        if finished:
            job.finished_at = at
            job.live = False
            self._leave(job)
        else:
            self._join(job)
        if is_first:
            self._on_first(job, at)
        if finished:
            self._on_finish(job, at)

    # -- the batch ----------------------------------------------------------------------------

    def _leave(self, job: FastJob) -> None:
        """Take a job out of the batch and give its memory back."""
        if job.joined:
            self._part(job)
        else:
            self._prefilling.pop(job, None)
        del self._running[job]
        self.pool.release(job.hashes, job.book)

    def _preempt(self, job: FastJob) -> None:
        self._leave(job)
        job.computed = 0
        job.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(job)

    def _plan(self, now: float) -> None:
        """Compose the next batch and its stretch of steps, starting at `now`."""
        count = self._decoding
        preempted = False
        need = self._phases[-self._step % self._block]
        if need:
            if need <= self.pool.blank + self.pool.idle:
                self.pool.take(need)
            else:
                preempted = self._squeeze()
                count = self._decoding
        budget = self.profile.step_tokens - count
        chunks: list[tuple[FastJob, int]] = []
        for job in self._prefilling:
            if budget:
                budget -= self._chunk(job, min(job.tokens - job.computed, budget), chunks)
        if self._waiting and not preempted:
            self._admit(budget, chunks, now)
        self._done = 0
        self._chunks = chunks
        if not count and not chunks:
            self._count = 0
            self.due = inf
            return
        self._time(chunks)
        self._start = now
        # after a preemption the next step may have room for what waits
        self._count = steps = 1 if chunks or preempted else self._length()
        self.due = self._end(steps)

    def _time(self, chunks: list[tuple[FastJob, int]]) -> None:
        """Set the first step's seconds, and by how many each later one is longer."""
        engine = self.profile.engine
        count = self._decoding
        first = engine.step_s + engine.sequence_s * (count + len(chunks))
        first += engine.context_token_s * self._context
        for job, chunk in chunks:
            first += engine.prefill_token_s * chunk
            first += engine.attention_s * chunk * (job.computed + chunk / 2)
        self._first_s = first * self.slow
        self._growth_s = engine.context_token_s * count * self.slow

    def _length(self) -> int:
        """Return how many steps this batch can run unchanged, memory for all of them included."""
        ends = self._ends
        while not ends[0][2].joined or ends[0][2].number != ends[0][1]:
            heappop(ends)
        steps = ends[0][0] - self._step
        free = self.pool.free
        while steps > 1 and self._growing(self._step + 1, steps - 1) > free:
            steps = (steps + 1) // 2
        return steps

    def _squeeze(self) -> bool:
        """Give each decoding sequence room for one token, preempting the youngest if none is left.

        Returns whether anything was preempted.
        """
        phase = -self._step % self._block
        preempted = False
        for job in list(self._running):
            if not job.joined or job.computed % self._block != phase:
                continue
            while not self.pool.free:
                preempted = True
                youngest = next(reversed(self._running))
                self._preempt(youngest)
                if youngest is job:
                    break
            else:
                self.pool.take(1)
        return preempted

    def _chunk(self, job: FastJob, chunk: int, chunks: list[tuple[FastJob, int]]) -> int:
        """Add a prefill chunk to the step; its blocks were taken at admission."""
        book, hashes = job.book, job.hashes
        upto = min((job.computed + chunk) // self._block, len(hashes))
        if book.published < upto:
            self.pool.publish(hashes, book, upto)
        chunks.append((job, chunk))
        return chunk

    def _admit(self, budget: int, chunks: list[tuple[FastJob, int]], now: float) -> None:
        """Move waiting jobs into the batch in order while budget, slots and KV memory last."""
        pool, waiting, running = self.pool, self._waiting, self._running
        slots = self.profile.engine.max_sequences
        while budget > 0 and waiting and len(running) < slots:
            job = waiting[0]
            tokens = job.tokens
            found = self._match(job.hashes, (tokens - 1) // self._block)
            need = self._blocks_for(tokens) - found.depth
            if need + found.idle > pool.free:
                return
            waiting.popleft()
            pool.hold(found)
            pool.take(need)
            hit = found.depth
            book = job.book
            book.private, book.published = need, hit
            if hit:
                book.spans.append((0, hit))
            job.computed = hit * self._block
            self._admitted += 1
            job.number = self._admitted
            running[job] = None
            self._prefilling[job] = None
            if job.started_at is None:
                job.started_at = now
                job.cached_tokens = job.computed
                self.prefix_queries += tokens
                self.prefix_hits += job.computed
            budget -= self._chunk(job, min(tokens - job.computed, budget), chunks)
