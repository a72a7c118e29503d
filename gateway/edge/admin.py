"""The admin listener: metrics, health, status, the live page, explanations, reload and drain.

Built from what `AdminContext` holds; nothing is wired here. Exactly the contract's admin routes.
Must never show a prompt, a key or a backend's address, nor change anything on a GET.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil
from typing import Any, Protocol

import orjson
from aiohttp import web
from multidict import CIMultiDict

from gateway.config.diff import Change
from gateway.core.request import RequestFault, check_weight
from gateway.core.shadow import Tally
from gateway.core.types import Explanation, HotPrefix
from gateway.edge.admin_connections import AdminConnections
from gateway.edge.admin_key import key_required
from gateway.edge.live import MAX_VIEWERS, TICK_S, Hub
from gateway.edge.live_frame import Scene, Seen
from gateway.edge.live_page import LivePage
from gateway.edge.same_site import Served, same_site_only
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
)
from gateway.telemetry.metrics import Telemetry

_log = logging.getLogger("radixgate.admin")

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Books(Seen, Protocol):
    """What the admin routes use of the dispatcher."""

    def pools(self) -> Iterable[tuple[str, float]]:
        """Return each model with how full its backends are."""

    @property
    def shadow(self) -> Tally | None:
        """Return what the shadow policy would have done; None without one."""

    @property
    def index_bytes(self) -> int:
        """Return the estimated memory of the prefix index."""

    @property
    def index_nodes(self) -> int:
        """Return the nodes of the prefix index."""

    def hot_prefixes(self, backend: str | None = None) -> Iterable[HotPrefix]:
        """Return the prefixes asked for most, as hashes; with a name, those it holds."""

    def decisions(self, request_id: str) -> Explanation | None:
        """Return a remembered decision."""

    def drain(self, backend: str, now: float) -> bool:
        """Send nothing new to a backend; False = no such backend."""

    def undrain(self, backend: str, now: float) -> bool:
        """End that; False = no such backend."""


@dataclass(slots=True, frozen=True)
class ReloadResult:
    """How a reload went. `problems` are the configuration's mistakes, one line each.

    `needs_restart` are changed keys that a reload cannot apply; `changes` all that differ.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(slots=True, frozen=True)
class AdminContext:
    """What the routes act on.

    `explain` takes a request body, its path and the name of its key, and raises `GatewayError` for
    a bad one. `reload` counts itself in the telemetry, as SIGHUP takes the same way. `clock` gives
    monotonic seconds.
    """

    dispatcher: Books
    telemetry: Telemetry
    version: str
    ready: Callable[[], bool]
    reload: Callable[[], Awaitable[ReloadResult]]
    explain: Callable[[bytes, str, str | None], Awaitable[Explanation]]
    clock: Callable[[], float]
    started_at: float
    body_bytes: Callable[[], int] = lambda: 64 * 1024 * 1024
    host: str = ""  # the configured `admin.host`
    keys: Callable[[], frozenset[str]] = frozenset  # SHA-256 of the keys it asks for; empty = open
    connections: AdminConnections = field(default_factory=AdminConnections)


def build_admin(context: AdminContext, *, tick_s: float = TICK_S) -> web.Application:
    """Return the application; run it with `access_log=None`. `tick_s` is the live page's."""
    app = web.Application(
        middlewares=[
            context.connections.counted(),
            _answer_errors,
            key_required(context.keys, context.telemetry.admin_refused),
            same_site_only(context.host),
        ],
        client_max_size=0,  # aiohttp's limit is fixed at the start; `explain` keeps ours
    )
    routes = _Routes(context)
    # An expectation we do not know is ignored, as on the data listener; aiohttp would refuse it in
    # plain text, before any middleware.
    get = partial(app.router.add_get, expect_handler=_expect)
    post = partial(app.router.add_post, expect_handler=_expect)
    most = min(MAX_VIEWERS, context.connections.most // 2)  # scrapers and shells have the rest
    hub = Hub(_scene(context), tick_s=tick_s, most=most)
    app.on_shutdown.append(hub.close)  # a view never ends by itself
    get("/", LivePage().page)
    get("/events", hub.events, allow_head=False)
    get("/metrics", routes.metrics)
    get("/healthz", routes.healthz)
    get("/readyz", routes.readyz)
    get("/status", routes.status)
    get("/decisions/{request_id}", routes.decision)
    get("/trie", routes.trie)
    post("/explain", routes.explain)
    post("/reload", routes.reload)
    post("/backends/{name}/drain", routes.drain)
    post("/backends/{name}/undrain", routes.undrain)
    return app


def _scene(context: AdminContext) -> Scene:
    return Scene(
        context.dispatcher,
        context.telemetry,
        version=context.version,
        ready=context.ready,
        clock=context.clock,
        started_at=context.started_at,
    )


class _Routes:
    def __init__(self, context: AdminContext) -> None:
        self._context = context

    async def metrics(self, _request: web.Request) -> web.Response:
        body = await self._context.telemetry.scrape()
        return web.Response(body=body, headers={"content-type": _METRICS_TYPE})

    async def healthz(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(self, _request: web.Request) -> web.Response:
        if self._context.ready():
            return _json({"status": "ready"})
        return _json({"status": "not ready"}, status=503)

    async def status(self, _request: web.Request) -> web.Response:
        return _json(status(self._context))

    async def decision(self, request: web.Request) -> web.Response:
        found = self._context.dispatcher.decisions(request.match_info["request_id"])
        if found is None:
            raise NotFound("no decision is remembered for this request id")
        return _json(explained(found))

    async def trie(self, request: web.Request) -> web.Response:
        dispatcher = self._context.dispatcher
        wanted = request.query.get("backend")
        rows = [
            {
                "name": backend.name,
                "mode": "exact" if backend.kv_events.mode == "exact" else "approximate",
                "index_blocks": backend.index_blocks,
                "index_capacity_blocks": backend.index_capacity_blocks,
                "index_capacity_ratio": backend.index_capacity_ratio,
                "trust_ratio": backend.prefix_trust_ratio,
                "hit_tokens_predicted": backend.hit_tokens_predicted,
                "hit_tokens_reported": backend.hit_tokens_reported,
                "error_ratio": backend.prefix_error_ratio,
            }
            for backend in dispatcher.backends(self._context.clock())
            if wanted in (None, backend.name)
        ]
        if wanted is not None and not rows:
            raise self._no_backend("backend")
        size = {"index_bytes": dispatcher.index_bytes, "index_nodes": dispatcher.index_nodes}
        hot = [asdict(prefix) for prefix in dispatcher.hot_prefixes(wanted)]
        return _json({**size, "backends": rows, "hot_prefixes": hot})

    async def explain(self, request: web.Request) -> web.Response:
        body = await _body(request, self._context.body_bytes())
        path = request.query.get("path") or guess_path(body)
        key = request.query.get("key")
        return _json(explained(await self._context.explain(body, path, key)))

    async def reload(self, _request: web.Request) -> web.Response:
        result = await self._context.reload()
        if result.ok:
            restart = list(result.needs_restart)
            changes = [asdict(change) for change in result.changes]
            told = {"changes": changes, "needs_restart": restart}
            return _json({"result": "ok"} | {key: told[key] for key in told if told[key]})
        error = InvalidRequest("the configuration has mistakes; the old one stays in force")
        answer = orjson.loads(error.body()) | {"problems": list(result.problems)}
        return _json(answer, status=error.status)

    async def drain(self, request: web.Request) -> web.Response:
        return self._drained(request, self._context.dispatcher.drain)

    async def undrain(self, request: web.Request) -> web.Response:
        return self._drained(request, self._context.dispatcher.undrain)

    def _no_backend(self, param: str) -> NotFound:
        backends = self._context.dispatcher.backends(self._context.clock())
        known = ", ".join(backend.name for backend in backends) or "none"
        return NotFound(f"no such backend; there are: {known}", param=param)

    def _drained(self, request: web.Request, act: Callable[[str, float], bool]) -> web.Response:
        name = request.match_info["name"]
        if not act(name, self._context.clock()):
            raise self._no_backend("name")
        backends = self._context.dispatcher.backends(self._context.clock())
        backend = next(backend for backend in backends if backend.name == name)
        return _json({"name": name, "draining": backend.draining, "in_flight": backend.in_flight})


def status(context: AdminContext) -> dict[str, Any]:
    """Return `/status` (contract, section 8); `other_backends` serve no model yet."""
    now = context.clock()
    dispatcher = context.dispatcher
    backends = {backend.name: asdict(backend) for backend in dispatcher.backends(now)}
    full = dict(dispatcher.pools())
    models = [
        {
            "name": model.name,
            "aliases": list(model.aliases),
            "saturation": full.get(model.name),  # JSON has no infinity: null = none is up
            "backends": [backends[name] for name in model.backends if name in backends],
        }
        for model in dispatcher.models
    ]
    serving = {name for model in dispatcher.models for name in model.backends}
    return {
        "version": context.version,
        "uptime_s": round(now - context.started_at, 3),
        "policy": dispatcher.policy,
        "shadow": None if dispatcher.shadow is None else asdict(dispatcher.shadow),
        "models": models,
        "other_backends": [row for name, row in backends.items() if name not in serving],
        "classes": [asdict(cls) for cls in dispatcher.classes(now)],
    }


def explained(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as scripts read it (contract, section 8)."""
    fields = asdict(explanation)
    return {"class": fields.pop("cls"), **fields}


def guess_path(body: bytes) -> str:
    """Return the route a bare request body was probably meant for."""
    try:
        check_weight(body)
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError, RequestFault):
        value = None
    keys = value.keys() if isinstance(value, dict) else ()
    if "prompt" in keys:
        return "/v1/completions"
    if "input" in keys:
        return "/v1/responses"
    return "/v1/chat/completions"


@web.middleware
async def _answer_errors(request: web.Request, handler: Served) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        return _refusal(error)
    except web.HTTPMethodNotAllowed as error:
        allow = ", ".join(sorted(error.allowed_methods))
        return _refusal(MethodNotAllowed(f"allowed: {allow}"), {"allow": allow})
    except web.HTTPException as error:
        if error.status == 404:
            return _refusal(NotFound("no such route"))
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the caller gets JSON
        _log.exception("admin route %s failed", request.path)
        return _refusal(InternalError("internal error"))


async def _body(request: web.Request, most: int) -> bytes:
    pieces, size = [], 0
    async for piece in request.content.iter_any():
        size += len(piece)
        if size > most:
            raise BodyTooLarge("the body is over limits.body_mib")
        pieces.append(piece)
    return b"".join(pieces)


async def _expect(request: web.Request) -> None:
    if request.headers.get("expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


def _json(value: object, *, status: int = 200) -> web.Response:
    headers = {"cache-control": "no-store"}
    return web.Response(
        body=orjson.dumps(value), status=status, content_type="application/json", headers=headers
    )


def _refusal(error: GatewayError, headers: dict[str, str] | None = None) -> web.Response:
    told = CIMultiDict([*error.headers, *(headers or {}).items()])
    if error.retry_after_s is not None:
        told["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    return web.Response(
        body=error.body(), status=error.status, content_type="application/json", headers=told
    )
