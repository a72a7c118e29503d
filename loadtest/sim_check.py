"""The simulator's engine beside a real vLLM on this machine's CPU: the same requests to both.

    python -m loadtest.sim_check --vllm-python PYTHON [--json FILE]

Starts one vLLM with a tiny model and a KV cache small enough to evict, measures prompts alone and
steps of several batches, fits the simulator's linear step model to them, plays four request lists
to both, and compares every request's TTFT and hit tokens. Every list is played to vLLM several times:
how much its own runs differ is what a shared machine allows anyone to predict. Without vLLM it says
so and ends.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson

from gateway.sim.profiles import Profile
from loadtest.sim_fit import Fit, Likeness, among, fit, likeness, usual
from loadtest.sim_play import (
    Lane,
    Run,
    arrivals,
    client,
    long_answers,
    one_by_one,
    sessions,
    simulate,
    stretched,
)
from loadtest.sim_vllm import REPEATS, STEP_TOKENS, Vllm, middle, profile_of, running

PLAYS: Final = 3  # of each list to vLLM; two cannot tell a slow run from a fast one
LOAD: Final = 0.7  # of the capacity the simulator predicts: near 1, any slow moment is an overload

# Bounds. A lane that is alone leaves nothing to timing: vLLM's and the simulator's hits must be the
# same to the token. Together, which block is evicted depends on who ended first, so hits may lie
# outside what vLLM's own runs had, by a few points of the prompt tokens.
HIT_POINTS: Final = 0.03
# TTFT on a shared CPU: vLLM's own runs set what can be asked. Below TOO_NOISY they do not even follow
# each other, and the times judge nothing; else the simulator must rank the requests nearly as well as
# one of them ranks the others, and its median request must not be RATIO times as slow or as fast.
# Beside two runs where the fit gave 0.96 at fixed times, steps twice as long gave 0.5, a quarter of the
# slots or prefill four times as slow less than 0 (and ratios above 20).
RANK_SHARE: Final = 0.8
RANK_ENOUGH: Final = 0.7
RATIO: Final = 2.5
TOO_NOISY: Final = 0.5


@dataclass(frozen=True)
class Compared:
    """One list on both sides: TTFT of vLLM is each request's median over its runs.

    `hits_real` has one sum for each run, `noise` compares each run with the others, `by_length` is the
    rank correlation of TTFT that a prompt's length alone would have.
    """

    name: str
    requests: int
    prompt_tokens: int
    hits_real: list[int]
    hits_sim: int
    hits_unbounded: int
    hits_equal: int
    ttft: Likeness
    noise: Likeness
    by_length: float
    ttft_real_s: float
    ttft_sim_s: float
    queued_real_s: float
    queued_sim_s: float
    preempted_real: int
    preempted_sim: int
    makespan_real_s: float
    makespan_sim_s: float

    @property
    def alone(self) -> bool:
        """Return whether its requests never met."""
        return self.name == "one by one"

    @property
    def judged(self) -> bool:
        """Return whether vLLM's own runs are alike enough for its times to judge by."""
        return self.noise.spearman >= TOO_NOISY

    def faults(self) -> list[str]:
        """Return what is clearly off."""
        found = []
        if self.alone and self.hits_equal < self.requests:
            found.append(f"{self.requests - self.hits_equal} requests differ in hit tokens")
        allowed = HIT_POINTS * self.prompt_tokens
        least, most = min(self.hits_real) - allowed, max(self.hits_real) + allowed
        if not least <= self.hits_sim <= most:
            found.append(f"{self.hits_sim} hit tokens, wanted {least:.0f} to {most:.0f}")
        wanted = min(RANK_ENOUGH, RANK_SHARE * self.noise.spearman)
        if self.judged and self.ttft.spearman < wanted:
            found.append(f"TTFT rank correlation {self.ttft.spearman:.2f}, wanted {wanted:.2f}")
        if self.judged and not 1 / RATIO <= self.ttft.bias <= RATIO:
            found.append(f"TTFT {self.ttft.bias:.2f} times vLLM's, wanted {1 / RATIO} to {RATIO}")
        return [f"{self.name}: {fault}" for fault in found]


def unbounded(profile: Profile) -> Profile:
    """Return the same engine with a KV cache that never evicts in a list of ours."""
    return replace(profile, engine=replace(profile.engine, kv_tokens=1 << 24))


def capacity(lanes: Sequence[Lane], profile: Profile) -> float:
    """Return the requests a second the simulated engine ends when all come at once."""
    blank = {
        (number, index): [0] * turn.output_tokens
        for number, lane in enumerate(lanes)
        for index, turn in enumerate(lane.turns)
    }
    done = simulate(stretched(lanes, 0.0), profile, 0.0, blank)
    return len(done.outcomes) / done.makespan_s


def compare(name: str, runs: Sequence[Run], sim: Run, free: Run) -> Compared:
    """Compare a list's runs; `free` is the simulator without evictions."""
    first, told = runs[0].ordered(), sim.ordered()
    times = [[o.ttft_s for o in run.ordered()] for run in runs]
    ttft, ttft_sim = usual(times), [o.ttft_s for o in told]
    return Compared(
        name=name,
        requests=len(first),
        prompt_tokens=sum(len(o.prompt) for o in first),
        hits_real=[run.hit_tokens for run in runs],
        hits_sim=sim.hit_tokens,
        hits_unbounded=free.hit_tokens,
        hits_equal=sum(
            a.cached_tokens == b.cached_tokens for a, b in zip(first, told, strict=True)
        ),
        ttft=likeness(ttft, ttft_sim),
        noise=among(times),
        by_length=likeness(ttft, [len(o.prompt) for o in first]).spearman,
        ttft_real_s=statistics.mean(ttft),
        ttft_sim_s=statistics.mean(ttft_sim),
        queued_real_s=statistics.median(run.queued_s for run in runs) / len(first),
        queued_sim_s=sim.queued_s / len(told),
        preempted_real=statistics.median_low([run.preemptions for run in runs]),
        preempted_sim=sim.preemptions,
        makespan_real_s=statistics.median(run.makespan_s for run in runs),
        makespan_sim_s=sim.makespan_s,
    )


async def measure(
    url: str, seed: int, repeats: int
) -> tuple[Fit, list[Compared], list[dict[str, Any]]]:
    """Calibrate, play every list, calibrate again; return the fit, the comparisons and the requests."""
    rng = Random(seed)
    open_loop = arrivals(Random(seed), requests=70, burst=14)
    async with client() as session:
        vllm = Vllm(session, url)
        await vllm.calibrate(rng, 1)  # warms the engine up; not used
        measured = await vllm.calibrate(rng, repeats)
        draft = profile_of(fit(middle(measured), STEP_TOKENS))
        say(f"calibrated: {len(measured)} measurements")
        lists = {
            "one by one": one_by_one(Random(seed), requests=70),
            "arrivals": stretched(open_loop, 1 / (LOAD * capacity(open_loop, draft))),
            "sessions": sessions(Random(seed), count=12, turns=6, think_s=0.5),
            "long answers": long_answers(Random(seed), requests=12),
        }
        played: dict[str, list[Run]] = {name: [] for name in lists}
        for _ in range(PLAYS):  # in turns, so that a slow minute does not have one list alone
            for name, lanes in lists.items():
                played[name].append(await vllm.run(lanes))
                say(f"{name}: played, {played[name][-1].makespan_s:.1f} s")
        measured += await vllm.calibrate(rng, repeats)  # the machine may have changed meanwhile
    fitted = fit(middle(measured), STEP_TOKENS)
    profile, compared, rows = profile_of(fitted), [], []
    for name, runs in played.items():
        answers = runs[0].answers
        sim = simulate(lists[name], profile, fitted.overhead_s, answers)
        free = simulate(lists[name], unbounded(profile), fitted.overhead_s, answers)
        compared.append(compare(name, runs, sim, free))
        rows += requests_of(name, [*runs, sim])
    return fitted, compared, rows


def requests_of(name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return each request of a list with what every run made of it, the simulator's last."""
    return [
        {
            "list": name,
            "lane": same[0].lane,
            "turn": same[0].turn,
            "prompt_tokens": len(same[0].prompt),
            "output_tokens": len(same[0].answer),
            "hit_tokens": [outcome.cached_tokens for outcome in same],
            "ttft_s": [outcome.ttft_s for outcome in same],
        }
        for same in zip(*(run.ordered() for run in runs), strict=True)
    ]


def say(line: str) -> None:
    """Tell how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def show(fitted: Fit, compared: Sequence[Compared]) -> None:
    """Print the fit and a block of lines for each list."""
    print(
        f"\nfit over {fitted.measurements} kinds of measurement, each the median of its repeats:\n"
        f"  step {fitted.step_s * 1e3:.2f} ms, prefill {fitted.prefill_token_s * 1e6:.1f} us a token,"
        f" attention {fitted.attention_s * 1e9:.2f} ns, sequence {fitted.sequence_s * 1e6:.0f} us,"
        f" context {fitted.context_s * 1e9:.1f} ns a token, outside the engine"
        f" {fitted.overhead_s * 1e3:.1f} ms\n"
        f"  relative error: median {fitted.median_error:.1%}, worst {fitted.worst_error:.1%}"
    )
    for one in compared:
        print(f"\n{one.name}: {one.requests} requests, {one.prompt_tokens} prompt tokens")
        real, sim, free = (
            ", ".join(f"{hits / one.prompt_tokens:.2%}" for hits in each)
            for each in (one.hits_real, [one.hits_sim], [one.hits_unbounded])
        )
        print(
            f"  hit rate           vLLM {real}; simulator {sim} (without evictions {free});"
            f" {one.hits_equal} of {one.requests} equal"
        )
        for what, like in (("simulator", one.ttft), ("vLLM's runs", one.noise)):
            print(
                f"  TTFT, {what:12} Spearman {like.spearman:.3f}, Pearson {like.pearson:.3f},"
                f" error median {like.median_error:.1%} p90 {like.p90_error:.1%},"
                f" ratio {like.bias:.2f}"
            )
        print(f"  TTFT, length alone Spearman {one.by_length:.3f}")
        print(
            f"  mean TTFT          vLLM {one.ttft_real_s * 1e3:.0f} ms,"
            f" simulator {one.ttft_sim_s * 1e3:.0f} ms\n"
            f"  mean wait in queue vLLM {one.queued_real_s * 1e3:.0f} ms,"
            f" simulator {one.queued_sim_s * 1e3:.0f} ms; preemptions"
            f" {one.preempted_real} and {one.preempted_sim}; all done after"
            f" {one.makespan_real_s:.1f} s and {one.makespan_sim_s:.1f} s"
        )
        if not one.judged:
            print("  vLLM's own runs differ too much: the times of this list judge nothing")


def main() -> None:
    """Check, print, and exit 1 if the simulator is clearly off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", default=os.environ.get("E2E_VLLM_PYTHON", ""))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each measurement, twice")
    parser.add_argument("--json", type=Path, help="also write everything here, request by request")
    asked = parser.parse_args()
    if not asked.vllm_python or not Path(asked.vllm_python).exists():
        print("skipped: vLLM is not installed here (`make e2e-vllm` installs it)")
        return
    with tempfile.TemporaryDirectory() as made, running(asked.vllm_python, Path(made)) as url:
        say(f"vLLM runs; load of the machine {os.getloadavg()[0]:.1f}")
        fitted, compared, rows = asyncio.run(measure(url, asked.seed, asked.repeats))
    show(fitted, compared)
    if asked.json:
        told = {"fit": asdict(fitted), "lists": list(map(asdict, compared)), "requests": rows}
        asked.json.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))
    faults = [fault for one in compared for fault in one.faults()]
    print("\n" + ("\n".join(faults) if faults else "within bounds"))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
