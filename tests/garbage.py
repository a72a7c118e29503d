"""Finds what only the cycle collector would free. Whatever other threads leave is told apart by type."""

import gc


def unreachable(module: str) -> list[object]:
    """Return the objects of `module`'s classes that are garbage and not freed; they are freed now."""
    before = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [one for one in gc.garbage if type(one).__module__.startswith(module)]
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
