"""What waiting costs: microseconds to enter and to be let go, bytes a waiter, with many waiting.

`python -m loadtest.bench_queue [--waiting 10000]`. Budgets: 30 us each, 2 KB besides the body.
"""

import argparse
import gc
import tracemalloc
from array import array
from random import Random
from time import process_time

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, ModelSpec, QueueSpec
from gateway.core.types import Chain, Finish, Outcome, Query, Ticket, Usage

BUDGET_US, BUDGET_BYTES = 30.0, 2048
_BATCH = 2000


def build(backends: int) -> QueuedDispatcher:
    """Return a dispatcher whose backends close at once."""
    names = tuple(f"b{i}" for i in range(backends))
    settings = CoreSettings(
        models=(ModelSpec("m", names),),
        backends=tuple(BackendSpec(name) for name in names),
        classes=(
            ClassSpec("coding", max_wait_s=3600.0, max_waiting=10**6),
            ClassSpec("chat", default=True, max_wait_s=3600.0, max_waiting=10**6),
        ),
        queue=QueueSpec(owed_s=0.01, steal_s=0.0),
    )
    return QueuedDispatcher(settings, Random(1), 0.0)


def asked(rng: Random) -> Query:
    """Return a request of 2k tokens that shares nothing."""
    chain = Chain(array("Q", [rng.getrandbits(64) for _ in range(32)]), 64.0, 2048)
    return Query("m", rng.choice(("coding", "chat")), chain, 250)


def measure(waiting: int, backends: int) -> tuple[float, float, float, float]:
    """Return microseconds to admit without waiting, to enter, to let go; bytes a waiter."""
    rng = Random(2)
    core = build(backends)
    queries = [asked(rng) for _ in range(waiting + 2 * _BATCH)]
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    running = [ticket for query in queries[:waiting] if not (ticket := _admit(core, query)).held]
    used = tracemalloc.get_traced_memory()[0] / len(core._queue.room)  # noqa: SLF001
    tracemalloc.stop()
    start = process_time()
    running += [
        t for query in queries[waiting : waiting + _BATCH] if not (t := _admit(core, query)).held
    ]
    entering = process_time() - start
    released = 0
    start = process_time()
    while released < _BATCH:
        ticket = running.pop()
        core.finish(ticket, Finish(Outcome.OK, True, Usage()), 1.0)
        started = core.take_started()
        released += len(started)
        running += started
    leaving = process_time() - start
    free = build(backends)
    start = process_time()
    for query in queries[-_BATCH:]:
        ticket = _admit(free, query)
        free.finish(ticket, Finish(Outcome.OK, True, Usage()), 0.0)
    plain = process_time() - start
    return plain / _BATCH * 1e6, entering / _BATCH * 1e6, leaving / released * 1e6, used


def _admit(core: QueuedDispatcher, query: Query) -> Ticket:
    ticket = core.admit(query, 0.0)
    assert isinstance(ticket, Ticket)
    return ticket


def main() -> None:
    """Measure and print beside the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--backends", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    runs = [measure(args.waiting, args.backends) for _ in range(args.runs)]
    plain, entering, leaving, used = (min(run[i] for run in runs) for i in range(4))
    print(f"{args.waiting} waiting before {args.backends} backends")
    print(f"  admit and finish, nobody waits  {plain:7.1f} us")
    print(f"  admit into the queue            {entering:7.1f} us (the decision included)")
    print(f"  finish and let the next go      {leaving:7.1f} us (two learnings included)")
    print(f"  queue's part, enter             {entering - plain:7.1f} us of {BUDGET_US:g}")
    print(f"  queue's part, let go            {leaving - plain:7.1f} us of {BUDGET_US:g}")
    print(
        f"  memory a waiter                 {used:7.0f} B of {BUDGET_BYTES} (tickets and trails too)"
    )


if __name__ == "__main__":
    main()
