"""Finds what only the cycle collector would free, in an interpreter that runs nothing else.

In the suite's own process a thread, a log record or a held exception of an earlier test may let go
of what it held at any moment, and the collector cannot tell whose garbage it finds.
"""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def leaves_nothing(work: Callable[[], object]) -> None:
    """Assert that `work`, a function of a module without arguments, leaves no cyclic garbage."""
    code = f"from tests.garbage import hold; from {work.__module__} import {work.__name__} as work; hold(work)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def hold(work: Callable[[], object]) -> None:
    """Do `work` with the collector off; exit with 1 and say what it left, if anything."""
    gc.collect()
    gc.disable()
    held = work()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    left = [one for one in gc.garbage if type(one).__module__.startswith("gateway.")]
    if left:
        sys.exit(f"{len(left)} objects, as {left[0]!r}; beside {held!r:.80}")
