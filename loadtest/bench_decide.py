"""What one decision costs in CPU: `python -m loadtest.bench_decide`. Prints figures, judges nothing.

Every request shares half of its prompt with all others; each backend has about 12 in flight. Only
`admit` is timed (process CPU time, the median of rounds), `finish` runs beside it.
"""

import argparse
from array import array
from random import Random
from statistics import median
from time import process_time

from gateway.core.dispatcher import Dispatcher
from gateway.core.policies import POLICIES
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, ModelSpec, RoutingSpec
from gateway.core.types import Chain, Finish, Outcome, Query, Ticket, Usage

_ROUND = 100
_PER_BACKEND = 12
_DONE = Finish(Outcome.OK, True, Usage(2600, 200, None), 200)


def settings(count: int, policy: str) -> CoreSettings:
    names = tuple(f"b{index}" for index in range(count))
    return CoreSettings(
        models=(ModelSpec("m", names),),
        backends=tuple(BackendSpec(name) for name in names),
        classes=(ClassSpec("chat", default=True),),
        routing=RoutingSpec(policy=policy),
    )


def queries(count: int, rng: Random) -> list[Query]:
    common = [rng.getrandbits(64) for _ in range(20)]
    return [Query("m", "chat", Chain(_hashes(common, rng), 64.0, 2600), 250) for _ in range(count)]


def _hashes(common: list[int], rng: Random) -> "array[int]":
    return array("Q", common + [rng.getrandbits(64) for _ in range(20)])


def admit_us(count: int, policy: str, rounds: int) -> tuple[float, float]:
    """Return (median microseconds of `admit`, of first_token + finish) at `count` backends."""
    rng = Random(1)
    dispatcher = Dispatcher(settings(count, policy), rng, 0.0)
    live: list[Ticket] = []
    admits, ends = [], []
    now = 0.0
    warm = count * _PER_BACKEND // _ROUND + 5
    for turn in range(rounds + warm):
        batch = queries(_ROUND, rng)
        now += 1.0
        start = process_time()
        tickets = [dispatcher.admit(query, now) for query in batch]
        middle = process_time()
        live += [ticket for ticket in tickets if isinstance(ticket, Ticket)]
        leaving = live[: max(0, len(live) - count * _PER_BACKEND)]
        del live[: len(leaving)]
        begin = process_time()
        for ticket in leaving:
            dispatcher.first_token(ticket, now)
            dispatcher.finish(ticket, _DONE, now)
        end = process_time()
        if turn >= warm:
            admits.append((middle - start) / _ROUND)
            ends.append((end - begin) / max(1, len(leaving)))
    return 1e6 * median(admits), 1e6 * median(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    arguments = parser.parse_args()
    sizes = (1, 8, 64, 256)
    print("policy".ljust(16) + "".join(f"{size:>10}" for size in sizes) + "   256/8   end@8")
    for policy in arguments.policy or list(POLICIES):
        figures = [admit_us(size, policy, arguments.rounds) for size in sizes]
        cells = "".join(f"{admit:>8.1f}us" for admit, _ in figures)
        ratio = figures[3][0] / figures[1][0]
        print(f"{policy:<16}{cells}{ratio:>8.1f}{figures[1][1]:>6.1f}us", flush=True)


if __name__ == "__main__":
    main()
