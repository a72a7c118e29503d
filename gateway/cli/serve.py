"""`radixgate serve`: run the gateway until a signal ends it."""

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading

import uvloop

from gateway import tasks
from gateway.app import App
from gateway.config.load import Loaded
from gateway.source import Source
from gateway.telemetry import logs

_THREADS_S = 2.0  # threads may take to end: look-ups, files on a mount that is dead

HELP = "run the gateway"
EPILOG = """\
signals: SIGTERM says so to load balancers for timeouts.drain_delay_s, then drains; SIGINT (Ctrl-C)
drains; a second one of either ends at once; SIGHUP reloads the configuration
exit codes: 0 ok, 1 failed, 2 bad usage or configuration

examples:
  radixgate serve --backend http://gpu-1:8000 --backend http://gpu-2:8000
  radixgate serve config/gateway.yaml --port 8080
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the YAML file")
    parser.add_argument(
        "--backend",
        dest="backends",
        action="append",
        default=[],
        metavar="URL",
        help="a backend whose models are read from it; may be repeated",
    )
    parser.add_argument("--host", help="address of the data listener (listen.host)")
    parser.add_argument("--port", type=int, help="port of the data listener (listen.port)")
    parser.add_argument("--admin-port", type=int, help="port of the admin listener (admin.port)")
    parser.add_argument("--policy", metavar="NAME", help="routing policy (routing.policy)")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; only 1 so far"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="override one configuration key; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Serve; return when a signal ended it."""
    if args.workers != 1:
        print("--workers: only 1 is supported; run one gateway per host", file=sys.stderr)
        return 2
    source = Source(args.config, tuple(args.backends), tuple(_overrides(args)))
    loaded = source.load()
    config = loaded.config
    if not (config.backends or config.models):
        print("no backends: give a CONFIG or --backend URL", file=sys.stderr)
        return 2
    _raise_file_limit()
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with contextlib.ExitStack() as ended:
        return uvloop.run(_serve(source, loaded, ended))


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets us: a stream takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return `--set` and the short options as overrides, the short ones last: they win."""
    short = {
        "listen.host": args.host,
        "listen.port": args.port,
        "admin.port": args.admin_port,
        "routing.policy": args.policy,
    }
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    return [*args.overrides, *given]


def _reason(error: Exception) -> str:
    """Return what went wrong in words: an address in use needs no error number."""
    if isinstance(error, OSError) and error.strerror and not error.filename:
        return error.strerror
    return str(error)


async def _serve(source: Source, loaded: Loaded, ended: contextlib.ExitStack) -> int:
    installed = logs.setup(loaded.config.log)
    app = App(source, loaded, installed)
    signals = _Signals(app)
    try:
        await app.start()
    except (OSError, ValueError) as error:  # an address in use; a tokenizer that does not load
        print(f"radixgate: {_reason(error)}", file=sys.stderr)
        installed.close()
        return 1 if isinstance(error, OSError) else 2
    signals.started = True
    if not signals.ended.is_set():
        _say(f"radixgate ready: {app.url}/v1 admin {app.admin_url}")
    await signals.ended.wait()
    await app.stop(announced=signals.announced)
    installed.close()
    ended.callback(_leave_behind_threads().cancel)
    return 0


def _say(line: str) -> None:
    """Print a line; a disk that is full, or nobody who reads, is no reason not to serve."""
    try:
        print(line, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def _leave_behind_threads() -> threading.Timer:
    """Have the process end though a thread hangs, which would be waited for without end."""
    timer = threading.Timer(_THREADS_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    return timer


class _Signals:
    """What signals do, from before the start on: the first ends gently, the second at once.

    `announced` = the end is to be seen by load balancers first: whoever sends SIGTERM may be an
    orchestrator that still sends us clients, who types Ctrl-C has none that cannot be cut off.
    """

    def __init__(self, app: App) -> None:
        self.started = self.announced = False
        self.ended = asyncio.Event()
        self._reloading: asyncio.Task[None] | None = None
        self._again = False
        self._app = app
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.end, True)
        loop.add_signal_handler(signal.SIGINT, self.end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def end(self, announced: bool = False) -> None:
        """Drain; when already draining, end what is open. Before the start: right after it."""
        if self.ended.is_set() and self.started:
            self._app.hurry()
        self.announced = announced and self.started
        self.ended.set()

    def reload(self) -> None:
        """Reload in a task: it resolves names. While starting, the file is fresh anyway.

        However many signals come during a reload, one more follows: it reads what is there then.
        """
        if not self.started:
            return
        self._again = True
        if self._reloading is None or self._reloading.done():
            self._reloading = tasks.spawn(self._reload(), name="reload")

    async def _reload(self) -> None:
        while self._again:
            self._again = False
            await self._app.reload()
