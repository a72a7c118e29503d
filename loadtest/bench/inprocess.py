"""The gateway's own work per request, without sockets: what profilers and counters are run on.

Prints microseconds of CPU per request: `python -m loadtest.bench.inprocess [SIZE TURNS [COUNT]]`;
`--events N` streams N chunks per request and prints the cost of one; `--profile` runs cProfile.
`--log FORMAT` and `--traces SHARE` add what is written and sent about a request, to nowhere.
"""

import argparse
import asyncio
import cProfile
import pstats
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from gateway.collector import Collector
from gateway.config.schema import Config, LogConfig
from gateway.core.prompter import BytePrompter
from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, MatchRule, ModelSpec
from gateway.edge.handler import Handler, Parts
from gateway.edge.server import Listener
from gateway.edge.traced import traced
from gateway.edge.upstreams import Upstreams, UpstreamSpec
from gateway.relay.connection import UpstreamConnection
from gateway.telemetry.logs import setup
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.otlp import Exporter
from gateway.telemetry.traces import Tracing
from gateway.watch.catalog import Catalog
from loadtest.bench import load
from loadtest.bench.upstream import _ANSWER, _EVENT, _HEAD, _LAST


class FakeTransport:
    """As much of a transport as the protocols use."""

    def __init__(self) -> None:
        self.protocol: Any = None
        self.answer: list[bytes] = []
        self.written = 0
        self.loop = asyncio.get_running_loop()

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += sum(map(len, pieces))

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def build(backends: int) -> tuple[Handler, Listener]:
    """Wire a handler as `app` does, without pollers."""
    clock = asyncio.get_running_loop().time
    rng = random.Random(1)
    names = [f"b{i}" for i in range(backends)]
    agents = ("claude-cli*", "codex*", "cline*", "aider*", "continue*", "opencode*")
    rules = [
        MatchRule(path="/v1/messages"),
        MatchRule(tools=True),
        MatchRule(min_prompt_tokens=8000),
    ]
    coding = ClassSpec("coding", (*rules, *(MatchRule(user_agent=a) for a in agents)))
    settings = CoreSettings(
        models=(ModelSpec("m", tuple(names)),),
        backends=tuple(BackendSpec(name) for name in names),
        classes=(coding, ClassSpec("chat", default=True)),
    )
    dispatcher = QueuedDispatcher(settings, rng, clock())
    telemetry = Telemetry(dispatcher, clock=clock, version="bench")
    telemetry.set_labels(["coding", "chat"], ["m"], names)
    upstreams = Upstreams()
    upstreams.replace(
        upstreams.plan(
            [UpstreamSpec(name, f"http://127.0.0.1:{9000 + i}") for i, name in enumerate(names)]
        )
    )
    config = Config()
    prompter = BytePrompter(1)
    parts = Parts(
        config, dispatcher, telemetry, upstreams, Catalog(clock), {}, prompter, clock, rng
    )
    handler = Handler(parts)
    return handler, Listener(handler, config.limits, config.timeouts, clock)


def connect(handler: Handler) -> list[UpstreamConnection]:
    """Give every backend's pool one open connection."""
    made = []
    for upstream in handler.upstreams.all():
        connection = UpstreamConnection(upstream.pool._release)  # noqa: SLF001
        connection.connection_made(FakeTransport())  # type: ignore[arg-type]
        connection.idle_since = 1e18
        upstream.pool._open.add(connection)  # noqa: SLF001
        upstream.pool._idle[connection] = None  # noqa: SLF001
        made.append(connection)
    return made


class Nowhere(SpanExporter):
    """Takes spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert spans
        return SpanExportResult.SUCCESS


@contextmanager
def told(handler: Handler, options: argparse.Namespace) -> Iterator[None]:
    """Add log lines and traces as asked."""
    with ExitStack() as closing:
        if options.log:
            nowhere = closing.enter_context(Path("/dev/null").open("wb"))
            settings = LogConfig(format=options.log, sample=options.sample)
            logs = setup(settings, nowhere)
            closing.callback(logs.close)
            handler.telemetry.log = logs.access
        if options.traces is not None:
            sampler = ParentBased(TraceIdRatioBased(options.traces))
            exporter = Exporter(Nowhere(), Resource({}), sampler)
            closing.callback(exporter.close)
            handler.exchange = traced(Tracing(exporter, random.Random(1)))
        yield


async def run(options: argparse.Namespace) -> float:
    """Return the seconds that the requests took."""
    size, turns, count, events = options.size, options.turns, options.count, options.events
    handler, listener = build(2)
    links = connect(handler)
    client = listener.protocol()
    client.connection_made(FakeTransport())  # type: ignore[arg-type]
    extra = b',"stream":true' if events else b""
    requests = [load.request(load.conversation(size, turns, i, extra)) for i in range(64)]
    pieces = [requests[i % 64] for i in range(count)]
    stream = [_HEAD, *([_EVENT] * events), _LAST] if events else [_ANSWER]
    with told(handler, options), Collector():
        start = time.process_time()
        for data in pieces:
            client.data_received(data)
            link = next(link for link in links if link.sink is not None)
            for part in stream:
                link.data_received(part)
        return time.process_time() - start


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", type=int, nargs="?", default=1024)
    parser.add_argument("turns", type=int, nargs="?", default=1)
    parser.add_argument("count", type=int, nargs="?", default=1500)
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--log", choices=["json", "console"])
    parser.add_argument("--sample", type=float, default=1.0, help="log.sample")
    parser.add_argument("--traces", type=float, metavar="SHARE")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    spent = min(uvloop.run(run(args)) for _ in range(1 if args.profile else args.runs))
    units = args.count * max(1, args.events)
    print(f"{spent / units * 1e6:.2f} µs per {'chunk' if args.events else 'request'}")
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(140)


if __name__ == "__main__":
    main()
