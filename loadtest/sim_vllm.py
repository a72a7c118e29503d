"""One real vLLM on this machine's CPU for the simulator's check: started, measured, played to.

Its KV cache is small enough to evict, its steps small enough that prompts take several. Ends with the
block that started it. Never judges.
"""

import asyncio
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp

from gateway.core.settings import EngineProfile
from gateway.sim.profiles import Profile
from loadtest.sim_fit import Alone, Decode, Fit
from loadtest.sim_play import MODEL, Lane, Run, Streamed, ask, play, random_ids

ROOT: Final = Path(__file__).resolve().parents[1]
ENGINES: Final = ROOT / "tests" / "engines"

BLOCK_TOKENS: Final = 32  # the smallest vLLM takes on a CPU
BLOCKS: Final = 256  # 8,192 tokens: a few long prompts fill it
STEP_TOKENS: Final = 512  # small, so that most prompts take several steps
SLOTS: Final = 8
MAX_LEN: Final = 4096
LAYERS: Final = 24  # slow enough that what it computes outweighs HTTP and the machine's noise

REPEATS: Final = 3
LENGTHS: Final = (64, 256, 500, 1000, 1500, 2500, 3500)
CACHED: Final = ((1024, 200), (2048, 200), (2048, 900))  # cached, then new tokens
BATCHES: Final = ((1, 64), (1, 1500), (2, 600), (4, 64), (4, 900), (8, 64), (8, 600))
DECODED: Final = 40  # tokens of each sequence of a batch


def profile_of(fitted: Fit) -> Profile:
    """Return the fitted engine as the simulator takes it."""
    return Profile(
        name="vllm_cpu",
        engine=EngineProfile(
            step_s=fitted.step_s,
            prefill_token_s=fitted.prefill_token_s,
            attention_s=fitted.attention_s,
            sequence_s=fitted.sequence_s,
            context_token_s=fitted.context_s,
            kv_tokens=(BLOCKS - 1) * BLOCK_TOKENS,  # vLLM keeps one block for itself
            max_sequences=SLOTS,
        ),
        max_model_len=MAX_LEN,
        source="fitted by loadtest.sim_check",
        block_tokens=BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
    )


def step_of(answers: Sequence[Streamed], prompt_tokens: int) -> Decode | None:
    """Return the mean step while all the answers were decoding together; None if they never were."""
    since = max(answer.chunks[0][0] for answer in answers)
    until = min(answer.chunks[-1][0] for answer in answers)
    tokens = sum(count for answer in answers for at, count in answer.chunks if since < at <= until)
    steps = tokens / len(answers)
    if steps < DECODED / 4:
        return None
    context = len(answers) * (prompt_tokens + DECODED / 2)
    return Decode(len(answers), context, (until - since) / steps)


def middle(measured: Sequence[Alone | Decode]) -> list[Alone | Decode]:
    """Return one measurement of each kind, with the median of its repeats' seconds."""
    kinds: dict[tuple[Any, ...], list[Alone | Decode]] = {}
    for one in measured:
        kind = (
            ("alone", one.uncached, one.cached)
            if isinstance(one, Alone)
            else ("decode", one.sequences, one.context)
        )
        kinds.setdefault(kind, []).append(one)
    return [
        replace(same[0], seconds=statistics.median(one.seconds for one in same))
        for same in kinds.values()
    ]


class Vllm:
    """The running engine, and what is asked of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def calibrate(self, rng: Random, repeats: int) -> list[Alone | Decode]:
        """Measure prompts alone and batches of decodes, in an order that spreads a slow moment."""
        found: list[Alone | Decode] = []
        for _ in range(repeats):
            found += [
                Alone(length, 0, await self._alone(random_ids(rng, length)))
                for length in rng.sample(LENGTHS, len(LENGTHS))
            ]
            for cached, new in CACHED:
                await self.forget()  # what is kept must not be evicted between the two
                opening = random_ids(rng, cached + 1)
                await self._alone(opening)
                seconds = await self._alone(opening[:cached] + random_ids(rng, new))
                found.append(Alone(new, cached, seconds))
            for sequences, prompt_tokens in rng.sample(BATCHES, len(BATCHES)):
                prompts = [random_ids(rng, prompt_tokens) for _ in range(sequences)]
                step = step_of(await asyncio.gather(*map(self._decode, prompts)), prompt_tokens)
                found += [] if step is None else [step]
        return found

    async def _alone(self, prompt: Sequence[int]) -> float:
        told = await ask(self._session, self._url, prompt, 1)
        return told.chunks[0][0] - told.sent_s

    async def _decode(self, prompt: Sequence[int]) -> Streamed:
        return await ask(self._session, self._url, prompt, DECODED)

    async def forget(self) -> None:
        """Empty the prefix cache."""
        async with self._session.post(self._url + "/reset_prefix_cache") as answer:
            answer.raise_for_status()

    async def run(self, lanes: Sequence[Lane]) -> Run:
        """Play a list to an empty cache, with vLLM's own account of queueing."""
        await self.forget()
        before = await self._counters()
        run = await play(self._session, self._url, lanes)
        after = await self._counters()
        run.queued_s = after["queue"] - before["queue"]
        run.preemptions = int(after["preempted"] - before["preempted"])
        return run

    async def _counters(self) -> dict[str, float]:
        names = {
            "vllm:request_queue_time_seconds_sum": "queue",
            "vllm:num_preemptions_total": "preempted",
        }
        async with self._session.get(self._url + "/metrics") as answer:
            page = await answer.text()
        found = dict.fromkeys(names.values(), 0.0)
        for line in page.splitlines():
            name = names.get(line.split("{", 1)[0])
            if name is not None:
                found[name] += float(line.rsplit(" ", 1)[1])
        return found


@contextmanager
def running(python: str, made: Path) -> Iterator[str]:
    """Make the model, run one vLLM and yield its URL."""
    model = made / "model"
    argv = [sys.executable, str(ENGINES / "make_tiny_model.py"), "--out", str(model)]
    argv += ["--layers", str(LAYERS)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    argv = [sys.executable, str(ENGINES / "run_replicas.py"), "--engine", "vllm", "--count", "1"]
    argv += ["--bin", python, "--model", str(model), "--name", MODEL, "--log-dir", str(made)]
    argv += ["--block-size", str(BLOCK_TOKENS), "--blocks", str(BLOCKS), "--slots", str(SLOTS)]
    argv += ["--max-len", str(MAX_LEN), "--dev-mode", "--timeout", "600"]
    argv += ["--", "--max-num-batched-tokens", str(STEP_TOKENS)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["READY"]:
            log = (made / "vllm-0.log").read_text(errors="replace").splitlines()
            raise SystemExit("\n".join([*log[-20:], "vLLM did not start: its log's end is above"]))
        yield ready[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
