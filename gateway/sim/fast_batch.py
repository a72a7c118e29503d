"""What the decoding sequences of a simulated batch do, kept as sums for all of them together.

The half of `fast_engine` that makes a step cost the same for two sequences and for two hundred.
Never decides what runs; never reads a clock.
"""

from collections.abc import Sequence
from heapq import heappush
from math import inf, sqrt

from gateway.sim.profiles import Profile
from gateway.sim.runpool import Holding, Match, RunPool


class FastJob:
    """One sequence to generate; `owner` is the caller's and comes back with each report.

    `hashes[i]` is the chained hash of full blocks 0..i of prompt and answer together; it may be
    longer, and must not change while the engine exists. Answers that repeat one another while both
    run are the one thing whose caching may differ from `Engine` by when it happens.
    """

    __slots__ = (
        "book",
        "cached_tokens",
        "computed",
        "ends",
        "finished_at",
        "first_token_at",
        "hashes",
        "joined",
        "live",
        "number",
        "output_tokens",
        "owner",
        "preemptions",
        "produced",
        "prompt_tokens",
        "started_at",
    )

    def __init__(
        self, prompt_tokens: int, output_tokens: int, hashes: Sequence[int], owner: object = None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes
        self.owner = owner
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.produced = 0
        self.computed = 0  # while decoding: less the engine's step count
        self.ends = 0  # the step count at which it has produced all
        self.joined = False  # decoding
        self.live = False
        self.number = 0
        self.book = Holding()

    @property
    def tokens(self) -> int:
        """Return prompt plus produced tokens: what must be computed before the next one."""
        return self.prompt_tokens + self.produced


class Batch:
    """The decoding sequences, and the stretch of equal steps in progress.

    A stretch is `_count` steps of one batch, `_done` of them booked; its last ends at `due`. The
    memory of a step is taken before it begins.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.pool = RunPool(profile.blocks)
        self.due = inf
        self.generation_tokens = 0
        self._block = profile.block_tokens
        self._prefilling: dict[FastJob, None] = {}  # in order
        # decoding sequences, together
        self._decoding = 0
        self._step = 0
        self._context = 0
        self._phases = [0] * self._block  # by (computed - step) modulo block: who needs memory when
        self._ends: list[tuple[int, int, FastJob]] = []
        self._writing: dict[int, FastJob] = {}  # by the block it will cache next
        # the stretch
        self._start = 0.0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._count = 0
        self._done = 0

    @property
    def steps(self) -> int:
        """Return how many steps have ended with something decoding."""
        return self._step

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def _end(self, steps: int) -> float:
        return self._start + steps * self._first_s + self._growth_s * steps * (steps - 1) / 2

    def _steps_by(self, now: float) -> int:
        """Return how many of the stretch's steps have ended by `now`."""
        half = self._first_s - self._growth_s / 2
        span = max(0.0, now - self._start)
        growth = self._growth_s
        root = (sqrt(half * half + 2 * growth * span) - half) / growth if growth else span / half
        steps = min(self._count, max(self._done, int(root)))
        while steps > self._done and self._end(steps) > now:
            steps -= 1
        while steps < self._count and self._end(steps + 1) <= now:
            steps += 1
        return steps

    def _growing(self, first: int, steps: int) -> int:
        """Return the blocks that decoding takes in `steps` steps from step count `first` on."""
        whole, rest = divmod(steps, self._block)
        need = whole * self._decoding
        if rest:
            phases, block = self._phases, self._block
            at = -first % block
            for _ in range(rest):
                need += phases[at]
                at = at - 1 if at else block - 1
        return need

    def _decode(self, steps: int) -> None:
        """Book `steps` steps; when another is in progress then, its memory is taken too."""
        count = self._decoding
        self._done += steps
        if count:
            more = steps if self._done < self._count else steps - 1
            if more:
                need = self._growing(self._step + 1, more)
                if need:
                    self.pool.take(need)
            self._step += steps
            self._context += count * steps
            self.generation_tokens += count * steps

    def _join(self, job: FastJob) -> None:
        """Begin decoding: from now on the sums say what it does."""
        self._prefilling.pop(job, None)
        step = self._step
        job.joined = True
        self._context += job.computed
        job.computed -= step
        job.ends = step + job.output_tokens - job.produced
        self._decoding += 1
        self._phases[job.computed % self._block] += 1
        heappush(self._ends, (job.ends, job.number, job))
        self._expect(job)

    def _expect(self, job: FastJob) -> None:
        """Note which block `job` will cache next, unless another writes the same."""
        at = job.book.published
        if at < len(job.hashes):
            self._writing.setdefault(job.hashes[at], job)

    def _part(self, job: FastJob) -> None:
        """Take a decoding job out of the sums: its own figures are right again."""
        job.joined = False
        self._phases[job.computed % self._block] -= 1
        self._decoding -= 1
        job.computed += self._step
        job.produced = job.computed + 1 - job.prompt_tokens
        self._context -= job.computed
        ahead = int(self._done < self._count)  # memory for the step in progress
        book = job.book
        blocks = self._blocks_for(job.computed + ahead)
        book.private = blocks - sum([end - start for start, end in book.spans])
        self._publish(job, job.computed + ahead)

    def _publish(self, job: FastJob, tokens: int) -> None:
        """Cache the full blocks of the job's first `tokens` tokens."""
        book, hashes = job.book, job.hashes
        at = book.published
        upto = min(tokens // self._block, len(hashes))
        if at < len(hashes) and self._writing.get(hashes[at]) is job:
            del self._writing[hashes[at]]
        if at < upto:
            self.pool.publish(hashes, book, upto)

    def _match(self, hashes: Sequence[int], limit: int) -> Match:
        """Return the cached prefix, what decoding sequences have written so far included."""
        pool = self.pool
        found = pool.match(hashes, limit)
        limit = min(limit, len(hashes))
        while found.depth < limit:
            writer = self._writing.get(hashes[found.depth])
            if writer is None:
                break
            self._publish(writer, writer.computed + self._step + 1)
            self._expect(writer)
            depth = found.depth
            found = pool.match(hashes, limit)  # anew: the writer's last run may have grown
            if found.depth == depth:
                break
        return found
