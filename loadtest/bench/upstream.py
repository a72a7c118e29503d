"""A fake engine that costs next to nothing: fixed answers, paced streams. argv: PORT.

`max_tokens` of a streamed request is the number of events, `seed` the pace in microseconds.
"""

import asyncio
import re
import sys
from typing import Any, cast

import httptools
import uvloop

_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_PACE = re.compile(rb'"seed":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_USAGE = (
    b'"usage":{"prompt_tokens":300,"total_tokens":340,"completion_tokens":40,'
    b'"prompt_tokens_details":null}'
)
_TEXT = b"All work and no play makes Jack a dull boy. " * 8


def _json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


_ANSWER = _json(
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}],%b}' % (_TEXT, _USAGE)
)
_MODELS = _json(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"fake"}]}')
_INFO = _json(b'{"model_path":"m","served_model_name":"m","max_model_len":1000000}')
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT = _chunk(
    b'data: {"id":"chatcmpl-86c4d7e7ec740eb6","object":"chat.completion.chunk","created":1796039868,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" something"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}],"pad":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}\n\n'
)
_LAST = (
    _chunk(b'data: {"id":"c","object":"chat.completion.chunk","choices":[],%b}\n\n' % _USAGE)
    + _chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Engine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser: Any = httptools.HttpRequestParser(self)
        self.timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, part: bytes) -> None:
        self.body.append(part)

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"GET":
            self.transport.write(self._get())
            return
        body = b"".join(self.body)
        tail = body[-400:]  # the options stand behind the messages
        if not _STREAM.search(tail):
            self.transport.write(_ANSWER)
            return
        tokens, pace = _TOKENS.search(tail), _PACE.search(tail)
        self.left = int(tokens[1]) if tokens else 40
        self.pace = int(pace[1]) / 1e6 if pace else 0.005
        self.transport.write(_HEAD)
        self.due = asyncio.get_running_loop().time()
        self._tick()

    def _get(self) -> bytes:
        if self.url.startswith(b"/v1/models"):
            return _MODELS
        if self.url.startswith((b"/health", b"/v1/health")):
            return _json(b"")
        return _INFO

    def _tick(self) -> None:
        if self.left == 0:
            self.transport.write(_LAST)
            return
        self.left -= 1
        self.transport.write(_EVENT)
        self.due += self.pace
        self.timer = asyncio.get_running_loop().call_at(self.due, self._tick)


async def main() -> None:
    loop = asyncio.get_running_loop()
    port = int(sys.argv[1])
    server = await loop.create_server(Engine, "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
