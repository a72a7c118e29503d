"""A simulated replica that misbehaves when told to, and writes down which requests it began.

For `make chaos` alone: `POST /chaos` with `{"metrics": bool, "hole": bool, "delay_s": number}` cuts its
metrics page, makes it accept requests and never answer, or think before each.
"""

import argparse
import asyncio
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import uvloop
from aiohttp import web

from gateway.sim import http
from gateway.sim.profiles import PROFILES
from gateway.sim.replica import Replica


class ChaosFace(http.Face):
    """The routes of a replica with a journal: a line per request that it began, its request id."""

    journal: BinaryIO
    metrics_cut = False
    hole = False
    delay_s = 0.0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, or do what was told instead."""
        if request.path == "/chaos":
            told = orjson.loads(await request.read())
            self.metrics_cut = told.get("metrics", self.metrics_cut)
            self.hole = told.get("hole", self.hole)
            self.delay_s = told.get("delay_s", self.delay_s)
            return web.Response(body=b"{}")
        if self.hole or (self.metrics_cut and request.path == "/metrics"):
            await asyncio.Event().wait()  # until its client leaves
        if request.method == "POST":
            self.journal.write(request.headers.get("x-request-id", "?").encode() + b"\n")
            self.journal.flush()
            await asyncio.sleep(self.delay_s)
        return await super().handle(request)


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    with Path(args.journal).open("ab") as journal:  # noqa: ASYNC230 - before anything runs
        ChaosFace.journal = journal
        http.Face = ChaosFace  # type: ignore[misc] # `listen` makes the one there is
        options: dict[str, Any] = {"model": "sim", "time_scale": args.time_scale}
        started_at = time.time()  # noqa: TID251 - `process_start_time_seconds` is a date
        replica = Replica(PROFILES["h100_8b"], started_at=started_at, seed=args.port, **options)
        runner, _ = await http.listen(replica, port=args.port, seed=args.port)
        await stop.wait()
        await runner.cleanup()
        replica.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", required=True)
    parser.add_argument("--time-scale", type=float, default=1.0)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
