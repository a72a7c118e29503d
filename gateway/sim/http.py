"""The HTTP face of a simulated replica: vLLM 0.32's routes, heads and bodies on aiohttp's server.

Thin: it parses, asks the replica, frames bytes. A client that leaves aborts its request at once.
Left out, as no gateway's data path uses it: LoRA and sleep control, logprobs, token ids in streams.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from xxhash import xxh3_64_hexdigest

from gateway.sim import asked as ask
from gateway.sim import faults, tokens, wire
from gateway.sim.metrics import CONTENT_TYPE
from gateway.sim.replica import Generation, Replica

KEEPALIVE_S = 5.0  # vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
MAX_BODY_BYTES = 512 * 1024 * 1024  # vLLM has no limit; this one protects the machine
_JSON = "application/json"
_STREAM = "text/event-stream; charset=utf-8"
_PREFIX = {ask.CHAT: "chatcmpl-", ask.COMPLETIONS: "cmpl-", ask.MESSAGES: "chatcmpl-"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _head(content_type: str | None = None) -> dict[str, str]:
    head = {"server": "uvicorn", "vary": "Origin"}
    if content_type:
        head["content-type"] = content_type
    return head


def _json(value: Any, status: int = 200) -> web.Response:
    return _answer(orjson.dumps(value), status)


def _answer(body: bytes, status: int = 200, content_type: str | None = _JSON) -> web.Response:
    return web.Response(body=body, status=status, headers=_head(content_type))


class Face:
    """Routes of one replica. `seed` makes the ids it invents reproducible."""

    def __init__(self, replica: Replica, *, seed: int = 0) -> None:
        self._replica = replica
        self._seed = seed
        self._numbers = itertools.count()
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._empty},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/reset_prefix_cache": {"POST": self._reset},
            "/v1/messages/count_tokens": {"POST": self._count},
        }
        for path in ask.GENERATING:
            self._routes[path] = {"POST": self._generate}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path = request.path
        methods = self._routes.get(path)
        if methods is None:
            return self._unknown(request)
        handler = methods.get(request.method)
        if handler is None:
            refused = _json({"detail": "Method Not Allowed"}, 405)
            refused.headers["allow"] = ", ".join(methods)
            return refused
        try:
            return await handler(request)
        except faults.Fault as fault:
            return _answer(fault.body(anthropic=path.startswith(ask.MESSAGES)), fault.status)

    def _unknown(self, request: web.BaseRequest) -> web.Response:
        """Answer a path nobody serves; stored responses are never kept, so none is found."""
        path = request.path
        if request.method == "POST" and path.endswith("/cancel"):
            path = path.removesuffix("/cancel")
        elif request.method != "GET":
            path = ""
        head, _, response = path.rpartition("/")
        if head == ask.RESPONSES:
            text = f"Response with id '{response}' not found."
            fault = faults.Fault(404, text, "invalid_request_error", "response_id")
            return _answer(fault.body(), 404)
        return _json({"detail": "Not Found"}, 404)

    async def _empty(self, _: web.BaseRequest) -> web.Response:
        return web.Response(headers=_head())

    async def _version(self, _: web.BaseRequest) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _load(self, _: web.BaseRequest) -> web.Response:
        return _json({"server_load": self._replica.requests})

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        return _answer(self._replica.metrics.render(), content_type=CONTENT_TYPE)

    async def _models(self, _: web.BaseRequest) -> web.Response:
        now, limits = _unix_time(), self._replica.limits
        permission = {
            "id": self._new_id("modelperm-"),
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": limits.model,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": limits.model,
            "parent": None,
            "max_model_len": limits.max_model_len,
            "permission": [permission],
        }
        return _json({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        data = await self._body(request)
        ask.check_model(data, self._replica.limits)
        if isinstance(data.get("prompt"), str):
            packed = tokens.encode(data["prompt"])
        else:
            packed = ask.conversation(ask.CHAT, data)
        width = tokens.TOKEN_BYTES
        pieces = [tokens.decode(packed[i : i + width]) for i in range(0, len(packed), width)]
        return _json(
            {
                "count": tokens.count(packed),
                "max_model_len": self._replica.limits.max_model_len,
                "tokens": tokens.unpack(packed),
                "token_strs": pieces if data.get("return_token_strs") else None,
            }
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        data = await self._body(request)
        ask.check_model(data, self._replica.limits)
        ids = data.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
            raise faults.missing("tokens", len(data))
        return _json({"prompt": tokens.decode(tokens.pack(ids))})

    async def _reset(self, _: web.BaseRequest) -> web.Response:
        self._replica.reset_prefix_cache()
        return _json({"success": True})

    async def _count(self, request: web.BaseRequest) -> web.Response:
        data = await self._body(request)
        if data.get("messages") is None:
            raise faults.missing("messages", len(data))
        ask.check_model(data, self._replica.limits)
        count = tokens.count(ask.conversation(ask.MESSAGES, data))
        management = {"original_input_tokens": count}
        return _json({"input_tokens": count, "context_management": management})

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        data = await self._body(request)
        asked = ask.parse(request.path, data, self._replica.limits)
        generation = self._replica.start(asked, self._answer_id(request), _unix_time())
        try:
            if asked.stream:
                return await self._stream(request, generation)
            await generation.done
            return _answer(wire.whole(generation.answer))
        finally:
            self._replica.end(generation)

    async def _stream(self, request: web.BaseRequest, generation: Generation) -> web.StreamResponse:
        """Send the head, then let the replica write each event into the transport by itself."""
        response = web.StreamResponse(headers=_head(_STREAM))
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("client left before the answer's head")

        def send(events: list[bytes]) -> None:
            if not transport.is_closing():  # the client left, which the handler hears of later
                transport.write(b"".join([b"%x\r\n%b\r\n" % (len(e), e) for e in events]))

        head = generation.stream_to(send, transport.get_write_buffer_size)
        await response.write(b"")  # the answer's head, before any token: as uvicorn does
        if head:
            send(head)
        await generation.done
        await response.write_eof()
        return response

    async def _body(self, request: web.BaseRequest) -> dict[str, Any]:
        body = await request.read()
        return ask.parse_body(body, request.headers.get("content-type", ""))

    def _answer_id(self, request: web.BaseRequest) -> str:
        if request.path == ask.RESPONSES:
            return self._new_id("resp_")
        prefix = _PREFIX[request.path]
        own = request.headers.get("x-request-id")
        return prefix + own if own else self._new_id(prefix)

    def _new_id(self, prefix: str) -> str:
        return prefix + xxh3_64_hexdigest(str(next(self._numbers)).encode(), self._seed)


def _unix_time() -> int:
    return int(time.time())  # noqa: TID251 - `created` is a date


def _request_factory(*parts: Any) -> web.BaseRequest:
    made: web.BaseRequest = _BigRequest(*parts, asyncio.get_running_loop())
    return made


class _BigRequest(web.BaseRequest):
    """A request whose body may be as long as prompts are."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts, client_max_size=MAX_BODY_BYTES)


async def listen(
    replica: Replica, *, host: str = "127.0.0.1", port: int = 0, seed: int = 0
) -> tuple[web.ServerRunner, int]:
    """Serve a replica; return the runner (await its `cleanup`) and the port it listens on."""
    server = web.Server(
        Face(replica, seed=seed).handle,
        request_factory=_request_factory,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=4 * 1024 * 1024,  # uvicorn under vLLM: h11_max_incomplete_event_size
        max_field_size=4 * 1024 * 1024,
        max_headers=256,
        auto_decompress=False,
    )
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=2048)
    await site.start()
    return runner, runner.addresses[0][1]
