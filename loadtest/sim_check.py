"""The simulator's engine beside a real vLLM on this machine's CPU: the same requests to both.

    python -m loadtest.sim_check --vllm-python PYTHON [--json FILE]

Starts one vLLM with a tiny model and a KV cache small enough to evict, measures prompts alone and
steps of several batches, fits the simulator's linear step model to them, plays three request lists
to both, and compares every request's TTFT and hit tokens. Every list is played to vLLM twice: how much
its two runs differ is what a shared machine allows anyone to predict. Without vLLM it says so and ends.
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
from loadtest.sim_fit import Fit, Likeness, fit, likeness
from loadtest.sim_play import (
    Lane,
    Run,
    arrivals,
    client,
    one_by_one,
    sessions,
    simulate,
    stretched,
)
from loadtest.sim_vllm import REPEATS, STEP_TOKENS, Vllm, middle, profile_of, running

LOAD: Final = 0.9  # of the capacity the simulator predicts for the list

# Bounds. A lane that is alone leaves nothing to timing: vLLM's and the simulator's hits must be the
# same to the token. Together, which block is evicted depends on who ended first, so hits may part by
# a few points of the prompt tokens more than vLLM's two runs do.
HIT_POINTS: Final = 0.03
# TTFT on a shared CPU: vLLM's two runs set what can be asked. Below TOO_NOISY they do not even follow
# each other, and the times judge nothing; else the simulator must rank the requests nearly as well.
RANK_SHARE: Final = 0.85
RANK_ENOUGH: Final = 0.8
TOO_NOISY: Final = 0.5


@dataclass(frozen=True)
class Compared:
    """One list on both sides. `twice` compares vLLM's second run with its first."""

    name: str
    requests: int
    prompt_tokens: int
    hits_real: int
    hits_sim: int
    hits_again: int
    hits_unbounded: int
    hits_equal: int
    ttft: Likeness
    twice: Likeness
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
        """Return whether vLLM's two runs are alike enough for its times to judge by."""
        return self.twice.spearman >= TOO_NOISY

    def faults(self) -> list[str]:
        """Return what is clearly off."""
        found = []
        if self.alone and self.hits_equal < self.requests:
            found.append(f"{self.requests - self.hits_equal} requests differ in hit tokens")
        allowed = abs(self.hits_real - self.hits_again) + HIT_POINTS * self.prompt_tokens
        if abs(self.hits_real - self.hits_sim) > allowed:
            found.append(f"hit tokens {self.hits_sim} instead of {self.hits_real} ± {allowed:.0f}")
        wanted = min(RANK_ENOUGH, RANK_SHARE * self.twice.spearman)
        if self.judged and self.ttft.spearman < wanted:
            found.append(f"TTFT rank correlation {self.ttft.spearman:.2f}, wanted {wanted:.2f}")
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


def compare(name: str, real: Run, again: Run, sim: Run, free: Run) -> Compared:
    """Compare a list's runs; `free` is the simulator without evictions."""
    first, second, told = real.ordered(), again.ordered(), sim.ordered()
    ttft, ttft_sim = [o.ttft_s for o in first], [o.ttft_s for o in told]
    return Compared(
        name=name,
        requests=len(first),
        prompt_tokens=sum(len(o.prompt) for o in first),
        hits_real=sum(o.cached_tokens for o in first),
        hits_sim=sum(o.cached_tokens for o in told),
        hits_again=sum(o.cached_tokens for o in second),
        hits_unbounded=sum(o.cached_tokens for o in free.outcomes),
        hits_equal=sum(
            a.cached_tokens == b.cached_tokens for a, b in zip(first, told, strict=True)
        ),
        ttft=likeness(ttft, ttft_sim),
        twice=likeness(ttft, [o.ttft_s for o in second]),
        ttft_real_s=statistics.mean(ttft),
        ttft_sim_s=statistics.mean(ttft_sim),
        queued_real_s=real.queued_s / len(first),
        queued_sim_s=sim.queued_s / len(told),
        preempted_real=real.preemptions,
        preempted_sim=sim.preemptions,
        makespan_real_s=real.makespan_s,
        makespan_sim_s=sim.makespan_s,
    )


async def measure(
    url: str, seed: int, repeats: int
) -> tuple[Fit, list[Compared], list[dict[str, Any]]]:
    """Calibrate, play every list, calibrate again; return the fit, the comparisons and the requests."""
    rng = Random(seed)
    async with client() as session:
        vllm = Vllm(session, url)
        await vllm.calibrate(rng, 1)  # warms the engine up; not used
        measured = await vllm.calibrate(rng, repeats)
        draft = profile_of(fit(middle(measured), STEP_TOKENS))
        say(f"calibrated: {len(measured)} measurements")
        open_loop = arrivals(rng, requests=70, burst=14)
        lists = {
            "one by one": one_by_one(rng, requests=70),
            "arrivals": stretched(open_loop, 1 / (LOAD * capacity(open_loop, draft))),
            "sessions": sessions(rng, count=12, turns=6, think_s=0.2),
        }
        runs = {}
        for name, lanes in lists.items():
            runs[name] = await vllm.run(lanes), await vllm.run(lanes)
            say(f"{name}: played twice, {runs[name][0].makespan_s:.1f} s")
        measured += await vllm.calibrate(rng, repeats)  # the machine may have changed meanwhile
    fitted = fit(middle(measured), STEP_TOKENS)
    profile, compared, rows = profile_of(fitted), [], []
    for name, (real, again) in runs.items():
        sim = simulate(lists[name], profile, fitted.overhead_s, real.answers)
        free = simulate(lists[name], unbounded(profile), fitted.overhead_s, real.answers)
        compared.append(compare(name, real, again, sim, free))
        rows += requests_of(name, real, again, sim)
    return fitted, compared, rows


def requests_of(name: str, real: Run, again: Run, sim: Run) -> list[dict[str, Any]]:
    """Return each request of a list with what all three runs made of it."""
    return [
        {
            "list": name,
            "lane": a.lane,
            "turn": a.turn,
            "prompt_tokens": len(a.prompt),
            "output_tokens": len(a.answer),
            "hit_tokens": [a.cached_tokens, b.cached_tokens, c.cached_tokens],
            "ttft_s": [a.ttft_s, b.ttft_s, c.ttft_s],
        }
        for a, b, c in zip(real.ordered(), again.ordered(), sim.ordered(), strict=True)
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
        rates = [
            hits / one.prompt_tokens
            for hits in (one.hits_real, one.hits_again, one.hits_sim, one.hits_unbounded)
        ]
        print(
            f"  hit rate         vLLM {rates[0]:.2%}, again {rates[1]:.2%}, simulator {rates[2]:.2%}"
            f" (without evictions {rates[3]:.2%}); {one.hits_equal} of {one.requests} equal"
        )
        for what, like in (("simulator", one.ttft), ("vLLM again", one.twice)):
            print(
                f"  TTFT, {what:10} Spearman {like.spearman:.3f}, Pearson {like.pearson:.3f},"
                f" error median {like.median_error:.1%} p90 {like.p90_error:.1%},"
                f" ratio {like.bias:.2f}"
            )
        print(
            f"  mean TTFT        vLLM {one.ttft_real_s * 1e3:.0f} ms,"
            f" simulator {one.ttft_sim_s * 1e3:.0f} ms\n"
            f"  mean wait in queue vLLM {one.queued_real_s * 1e3:.0f} ms,"
            f" simulator {one.queued_sim_s * 1e3:.0f} ms; preemptions"
            f" {one.preempted_real} and {one.preempted_sim}; all done after"
            f" {one.makespan_real_s:.1f} s and {one.makespan_sim_s:.1f} s"
        )
        if not one.judged:
            print("  vLLM's own two runs differ too much: the times of this list judge nothing")


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
