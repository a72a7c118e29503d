"""A simulated replica alive on an event loop: the engine driven by the clock, its streams fed.

One wake-up per engine event (`loop.call_at`), no task and no future per token: a stream's bytes are
written straight to its transport from that wake-up. When the loop is late, several tokens go out
in one chunk, as vLLM's do. Knows no HTTP beyond "bytes of an event": `http` does.
"""

import asyncio
import time
from collections.abc import Callable

from gateway.sim import faults
from gateway.sim.answer import Answer, Choice, compose
from gateway.sim.asked import Asked, Limits
from gateway.sim.engine import Engine, EngineFull, Progress
from gateway.sim.journal import Journal
from gateway.sim.metrics import Metrics
from gateway.sim.profiles import Profile
from gateway.sim.publish import Publisher
from gateway.sim.sse import Encoder, encoder
from gateway.sim.tokens import Voice

WRITE_HIGH_BYTES = 256 * 1024  # beyond it a client reads slower than it is served: text waits


class Generation:
    """One answer in progress. Whole answers only wait for `done`; streams also send.

    `send` takes whole events; `backlog` says how many bytes of earlier ones are unsent.
    """

    def __init__(self, answer: Answer, metrics: Metrics, interval: int, limits: Limits) -> None:
        self.answer = answer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._encoder: Encoder | None = None
        self._metrics = metrics
        self._interval = interval
        self._limits = limits
        self._left = len(answer.choices)
        self._began = False
        self._send: Callable[[list[bytes]], None] | None = None
        self._backlog: Callable[[], int] = int

    def stream_to(
        self, send: Callable[[list[bytes]], None], backlog: Callable[[], int]
    ) -> list[bytes]:
        """Send events as tokens come; return those that precede any token."""
        self._encoder = encoder(self.answer)
        self._send, self._backlog = send, backlog
        return self._encoder.head()

    def on_progress(self, choice: Choice, progress: Progress) -> None:
        """Count a choice's new tokens and send what is due."""
        choice.produced += progress.tokens
        job = choice.job
        if choice.produced == progress.tokens:
            self._metrics.first_token(job)
        else:
            self._metrics.token(progress.since, progress.at, progress.tokens)
        if progress.finished:
            self._left -= 1
            asked = self.answer.asked
            limit = asked.max_tokens or self._limits.max_model_len - job.prompt_tokens
            self._metrics.finish(job, choice.finish, max_tokens=limit, n=asked.n)
        if self._send is not None:
            self._stream(choice, finished=progress.finished)
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def _stream(self, choice: Choice, *, finished: bool) -> None:
        unsent = choice.produced - choice.sent
        due = finished or not choice.sent or unsent >= self._interval
        if not due or self._encoder is None or self._send is None:
            return
        if not finished and self._backlog() > WRITE_HIGH_BYTES:
            return
        events: list[bytes] = []
        if not self._began:
            self._began = True
            events += self._encoder.first()
        events += self._encoder.delta(choice, last=finished)
        if not self._left:
            events += self._encoder.tail()
        self._send(events)


class Replica:
    """Engine time is loop time divided by `time_scale`: at 0.1 an engine second lasts 0.1 s.

    With a `publisher` (its owner closes it) the cache's events are published as they happen.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        model: str,
        started_at: float,
        time_scale: float = 1.0,
        seed: int = 0,
        stream_interval: int = 1,
        publisher: Publisher | None = None,
        event_arrays: bool = False,
    ) -> None:
        self.profile = profile
        self.limits = Limits(model, profile.max_model_len)
        self._publisher = publisher
        self._journal: Journal | None = None
        if publisher is not None:
            self._journal = Journal(profile.block_tokens, arrays=event_arrays)
        self.engine = Engine(profile, journal=self._journal)
        self.metrics = Metrics(self.engine, model, started_at)
        self.requests = 0
        self._voice = Voice(seed)
        self._loop = asyncio.get_running_loop()
        self._zero = time.monotonic()  # uvloop's own clock stands still for milliseconds
        self._scale = time_scale
        self._interval = stream_interval
        self._sinks: dict[str, tuple[Generation, Choice]] = {}
        self._wake_up: asyncio.TimerHandle | None = None
        self.worst_lag_s = 0.0

    def now(self) -> float:
        """Return the engine's time."""
        return (time.monotonic() - self._zero) / self._scale

    def start(self, asked: Asked, answer_id: str, created: int) -> Generation:
        """Begin to generate.

        Raises:
            Fault: the waiting queue is full.
        """
        answer = compose(
            asked,
            self.limits,
            self._voice,
            self.profile.block_tokens,
            answer_id=answer_id,
            now=created,
        )
        generation = Generation(answer, self.metrics, self._interval, self.limits)
        self.requests += 1
        try:
            for choice in answer.choices:
                self._sinks[choice.job.id] = (generation, choice)
                self.engine.submit(choice.job, self.now())
        except EngineFull:
            self.metrics.rejected += 1
            self.end(generation)
            raise faults.full() from None
        self._arm()
        return generation

    def end(self, generation: Generation) -> None:
        """Forget a generation; what is unfinished is aborted at once. Call exactly once."""
        self.requests -= 1
        for choice in generation.answer.choices:
            self._sinks.pop(choice.job.id, None)
            if self.engine.abort(choice.job, self.now()):
                self.metrics.finished["abort"] += 1
        self._arm()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that nothing running holds."""
        self.engine.reset_prefix_cache()
        self._tell()

    def close(self) -> None:
        """Stop waking up."""
        if self._wake_up is not None:
            self._wake_up.cancel()
            self._wake_up = None

    def _tell(self) -> None:
        if self._publisher is not None and self._journal is not None:
            self._publisher.publish(self._journal.take())

    def _arm(self) -> None:
        self._tell()
        self.close()
        at = self.engine.next_event_at(self._interval)
        if at is not None:
            delay = max(0.0, self._zero + at * self._scale - time.monotonic())
            self._wake_up = self._loop.call_later(delay, self._wake, at)

    def _wake(self, due: float) -> None:
        self._wake_up = None
        now = self.now()
        self.worst_lag_s = max(self.worst_lag_s, (now - due) * self._scale)
        for progress in self.engine.advance(now):
            sink = self._sinks.get(progress.job.id)
            if sink is not None:
                sink[0].on_progress(sink[1], progress)
        self._arm()
