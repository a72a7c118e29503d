"""What a run of traffic amounted to: percentiles, hit rate, goodput, per class and in total.

Pure. The keys are those of the contract's section 8; seconds are whatever the records hold.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from math import ceil
from typing import Any

from gateway.core.settings import Slo

SLOS: dict[str, Slo] = {  # results.md, Workloads
    "coding": Slo(ttft_s=5.0, tpot_s=0.1),
    "chat": Slo(ttft_s=2.0, tpot_s=0.1),
}


@unique
class Result(StrEnum):
    """How a request of the load generator ended."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503
    FAILED = "failed"  # any other status, a broken or unfinished stream
    CUT = "cut"  # still running when the run ended


@dataclass(slots=True)
class Record:
    """One request as its client saw it, in seconds; None = it did not get that far."""

    cls: str
    sent_at: float
    result: Result = Result.CUT
    ttft_s: float | None = None
    tpot_s: float | None = None
    longest_gap_s: float = 0.0
    total_s: float | None = None
    waited_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    backend: str = ""

    def within(self, slo: Slo) -> bool:
        """Return whether the request ended well and inside its targets."""
        if self.result is not Result.OK or self.ttft_s is None:
            return False
        return self.ttft_s <= slo.ttft_s and (self.tpot_s or 0.0) <= slo.tpot_s


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the q-quantile of sorted values (nearest rank); None without values."""
    if not values:
        return None
    return values[max(0, ceil(q * len(values)) - 1)]


def summarise(
    records: Sequence[Record],
    seconds: float,
    head: Mapping[str, Any],
    *,
    split: bool = True,
    slos: Mapping[str, Slo] = SLOS,
) -> dict[str, Any]:
    """Return the figures of `records` over `seconds`; `head` are keys put before them.

    `slos` has every class of the records.

    A request that the run cut off without a first token counts as missed, its wait as its TTFT, if
    that was beyond its target; any other cut one does not count: its outcome is unknown.
    """
    judged = [r for r in records if r.result is not Result.CUT or _overdue(r, slos[r.cls])]
    done = [r for r in judged if r.result is Result.OK]
    within = sum(1 for r in judged if r.within(slos[r.cls]))
    ttft = sorted(_ttft(r) for r in judged if r.result in (Result.OK, Result.CUT))
    tpot = sorted(r.tpot_s for r in done if r.tpot_s is not None)
    prompt = sum(r.prompt_tokens for r in done)
    totals = [r.total_s for r in done if r.total_s is not None]
    report: dict[str, Any] = {
        **head,
        "requests": len(judged),
        "ttft_mean_s": _rounded(sum(ttft) / len(ttft) if ttft else None),
        "ttft_p50_s": _rounded(quantile(ttft, 0.5)),
        "ttft_p95_s": _rounded(quantile(ttft, 0.95)),
        "ttft_p99_s": _rounded(quantile(ttft, 0.99)),
        "tpot_p95_s": _rounded(quantile(tpot, 0.95)),
        "e2e_mean_s": _rounded(sum(totals) / len(totals) if totals else None),
        "slo_ratio": _rounded(within / len(judged) if judged else None),
        "goodput_rps": _rounded(within / seconds),
        "hit_rate": _rounded(sum(r.cached_tokens for r in done) / prompt if prompt else None),
        "imbalance": _rounded(_imbalance(done)),
        "refused": sum(1 for r in judged if r.result is Result.REFUSED),
        "failed": sum(1 for r in judged if r.result is Result.FAILED),
    }
    if split:
        names = sorted({r.cls for r in records})
        report["classes"] = {
            name: summarise(
                [r for r in records if r.cls == name], seconds, head, split=False, slos=slos
            )
            for name in names
        }
    return report


def _overdue(record: Record, slo: Slo) -> bool:
    return record.ttft_s is None and record.waited_s > slo.ttft_s


def _ttft(record: Record) -> float:
    """Return the time to first token, or what the client had waited when the run was cut."""
    return record.waited_s if record.ttft_s is None else record.ttft_s


def _imbalance(done: Sequence[Record]) -> float | None:
    """Return the busiest backend's uncached prompt tokens over the mean."""
    work: Counter[str] = Counter()
    for record in done:
        work[record.backend] += record.prompt_tokens - record.cached_tokens
    mean = sum(work.values()) / len(work) if work else 0
    return max(work.values()) / mean if mean else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
