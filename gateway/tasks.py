"""Background tasks that are never lost: a reference is kept and a crash is logged."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("radixgate.tasks")
_live: set[asyncio.Task[Any]] = set()


def spawn(coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Run `coro` on the running loop; its reference lives until it ends, its crash is logged."""
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _live.add(task)
    task.add_done_callback(_ended)
    return task


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended, whatever it raises."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _ended(task: asyncio.Task[Any]) -> None:
    _live.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s crashed", task.get_name(), exc_info=error)
