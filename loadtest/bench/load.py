"""The load: closed loops of whole answers, paced streams, and TTFT at a fixed rate."""

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, cast

import httptools

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "engineers",
    "argue",
    "about",
    "cache",
    "lines",
    "and",
    "scheduling",
    "policies",
    "for",
    "large",
    "language",
    "models",
    "served",
    "on",
    "many",
    "accelerators",
)


def conversation(size: int, turns: int, seed: int, options: bytes) -> bytes:
    """Return a chat body of about `size` bytes in `turns` turns; the last message is unique."""
    rng = random.Random(seed)
    share = max(1, size // turns - 40)
    messages = []
    for turn in range(turns):
        text = ""
        while len(text) < share:
            text += rng.choice(WORDS) + " "
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append(b'{"role":"%b","content":"%b"}' % (role.encode(), text.encode()))
    joined = b",".join(messages)
    return b'{"model":"m","messages":[%b]%b}' % (joined, options)


def request(body: bytes) -> bytes:
    """Return the request as the OpenAI SDK sends it."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway:8080\r\nAccept: application/json\r\n"
        b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 3.57.0\r\n"
        b"Authorization: Bearer none\r\nX-Stainless-Lang: python\r\n"
        b"X-Stainless-Package-Version: 3.57.0\r\nX-Stainless-Retry-Count: 0\r\n"
        b"X-Stainless-Read-Timeout: 600\r\nAccept-Encoding: identity\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


@dataclass
class Tally:
    """What a run saw. `first_s` are times from sending to the first body byte."""

    answers: int = 0
    errors: int = 0
    chunks: int = 0
    first_s: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that sends its requests one after the other."""

    def __init__(self, requests: list[bytes], count: int, tally: Tally) -> None:
        self.requests, self.left, self.tally = requests, count, tally
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser: Any = httptools.HttpResponseParser(self)
        self.next()

    def next(self) -> None:
        if self.left == 0:
            self.transport.close()
            self.done.set_result(None)
            return
        self.left -= 1
        self.fresh = True
        self.sent_at = perf_counter()
        self.transport.write(self.requests[self.left % len(self.requests)])

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, _: bytes) -> None:
        self.tally.chunks += 1
        if self.fresh:
            self.fresh = False
            self.tally.first_s.append(perf_counter() - self.sent_at)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() == 200:
            self.tally.answers += 1
        else:
            self.tally.errors += 1
        self.next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.tally.errors += 1 + self.left
            self.done.set_result(None)


async def run_clients(port: int, requests: list[list[bytes]], each: int) -> Tally:
    """Run one connection per list of requests, `each` requests on every one."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    clients = []
    for own in requests:
        factory = partial(Client, own, each, tally)
        _, client = await loop.create_connection(factory, "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return tally


async def run_rate(port: int, requests: list[bytes], per_s: float, seconds: float) -> Tally:
    """Send requests at a fixed rate over reused connections; one stream at a time on each."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    start = loop.time()
    pending: set[asyncio.Task[None]] = set()

    async def one(body: bytes) -> None:
        _, client = await loop.create_connection(
            lambda: Client([body], 1, tally), "127.0.0.1", port
        )
        await client.done

    for number in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, start + number / per_s - loop.time()))
        task = loop.create_task(one(requests[number % len(requests)]))
        pending.add(task)
        task.add_done_callback(pending.discard)
    await asyncio.gather(*pending)
    return tally
