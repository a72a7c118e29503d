"""What the data listener serves: routes, keys, local answers, and the parts an exchange needs.

The handler holds references and small tables with caps; a request's own state is its `Exchange`.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import unquote

from gateway.config.build import effective_classes
from gateway.config.schema import Config, KeyConfig
from gateway.core.prompter import Prompter
from gateway.core.queued import QueuedDispatcher
from gateway.core.types import Chain, Explanation
from gateway.edge import routes
from gateway.edge.answers import JSON, Cors, RequestIds, error_lines, limit_lines
from gateway.edge.client import ClientConnection
from gateway.edge.endings import Endings
from gateway.edge.exchange import Exchange
from gateway.edge.homes import ResponseHomes
from gateway.edge.http import HttpRequest, Plan, client_request_id, path_of, patience_of
from gateway.edge.keys import KeyRing
from gateway.edge.parking import Parking
from gateway.edge.proxies import Proxies
from gateway.edge.query import (
    build_query,
    model_not_found,
    parse_body,
    resolve_model,
    start_chain,
)
from gateway.edge.routes import Local, Route
from gateway.edge.upstreams import Upstreams
from gateway.errors import (
    Draining,
    GatewayError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
)
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.recorder import Recorder

_log = logging.getLogger("radixgate.edge")
ExchangeOf = Callable[["Handler", ClientConnection, HttpRequest, Route], Exchange]
_SHOWN_MAX = 4096  # (backend, class, policy) whose header lines are kept


class ModelList(Protocol):
    """What `GET /v1/models` is answered from."""

    def body(self, allowed: tuple[str, ...] | None = None) -> bytes:
        """Return the JSON list of what the globs allow."""

    def one(self, name: str, allowed: tuple[str, ...] | None = None) -> bytes | None:
        """Return one model's JSON."""


def _utc_day() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(slots=True)
class Parts:
    """What the handler is wired to; `app` builds it."""

    config: Config
    dispatcher: QueuedDispatcher
    telemetry: Telemetry
    upstreams: Upstreams
    catalog: ModelList
    prompters: Mapping[str, Prompter]
    default_prompter: Prompter
    clock: Callable[[], float]
    rng: random.Random
    today: Callable[[], str] = _utc_day


class Handler:
    """The listener's handler (`server.Handler`)."""

    def __init__(self, parts: Parts) -> None:
        self.dispatcher = parts.dispatcher
        self.telemetry = parts.telemetry
        self.upstreams = parts.upstreams
        self.clock = parts.clock
        self.responses = ResponseHomes()
        self.live: set[Endings] = set()
        self.leaving = self.draining = False
        self.awaiting_models = False  # set by `app`: a backend has not told its models yet
        self.quiet = asyncio.Event()
        self.parking = Parking(parts.dispatcher)
        self.recorder: Recorder | None = None  # set by `app`, if a trace is recorded
        self.exchange: ExchangeOf = Exchange  # `app` sets another while tracing is on
        self._catalog = parts.catalog
        self._today = parts.today
        self._rng = parts.rng
        self._ids = RequestIds()
        self._default_prompter = parts.default_prompter
        self.configure(parts.config, parts.prompters)

    def configure(self, config: Config, prompters: Mapping[str, Prompter]) -> None:
        """Take a new configuration; requests in progress keep what they have."""
        self.prompters = prompters
        self._key_configs = config.keys
        self.keys = KeyRing(config.keys, self._today())
        self.cors = Cors(config.cors.origins)
        self.timeouts = config.timeouts
        # A wait that begins after a look at the deadlines must be seen before it is over.
        waits = (config.timeouts.first_byte_s, config.timeouts.idle_s)
        self.look_again_s = min((wait for wait in waits if wait), default=math.inf)
        self.keepalive_s = config.streams.keepalive_s
        self.inject_usage = config.streams.inject_usage
        self.isolate_keys = config.index.isolate_keys
        classes = effective_classes(config).items()
        self.priorities = {
            name: cls.engine_priority for name, cls in classes if cls.engine_priority is not None
        }
        self.max_attempts = config.retries.attempts
        self.body_limit = config.limits.body_mib * 1024 * 1024
        self.max_streams = config.limits.streams
        self._debug = config.debug_headers
        # The debug lines of first attempts by (backend, class, policy), where they are all there is.
        self.shown: dict[tuple[str | None, str | None, str], bytes] = {}
        self.era = object()  # another one with every configuration
        trusted = config.trusted_proxies
        self.proxies = Proxies(trusted) if trusted else None

    def turn_day(self) -> None:
        """Leave out the keys that have expired; heads seen before are checked again."""
        today = self._today()
        if today != self.keys.today:
            self.keys = KeyRing(self._key_configs, today)
            self.era = object()

    # --- server.Handler

    def precheck(self, request: HttpRequest) -> None:
        """Route, name and authenticate a request by its head."""
        if request.era is self.era:  # the head was seen before
            if not request.named:
                request.request_id = self._ids.new()
            return
        request.key = None
        own_id = client_request_id(request.picked)
        request.named = own_id is not None
        request.request_id = own_id or self._ids.new()
        route = request.route = routes.find(request.method, request.path)
        if request.method == "OPTIONS":
            if not self.cors.on:
                allowed = ", ".join(route.methods)
                raise MethodNotAllowed(f"Use {allowed}.", headers=(("allow", allowed),))
        elif not route.open:
            picked = request.picked
            request.key = self.keys.check(picked.get(b"authorization"), picked.get(b"x-api-key"))
            key = request.key
            may_choose = key.choose_class if key is not None else self.keys.open
            request.plan = Plan(
                coding=request.text(b"content-encoding"),
                forced_class=request.text(b"x-gateway-class") if may_choose else None,
                patience_s=patience_of(request.picked),
            )
            request.era = self.era

    def start(self, connection: ClientConnection, request: HttpRequest) -> Exchange | None:
        """Answer a local route, or begin an exchange."""
        route = request.route
        assert route is not None
        if request.method == "OPTIONS":
            lines = b"x-request-id: %b\r\n" % request.request_id + self.cors.preflight(request)
            connection.respond(request, 204, lines, b"")
            return None
        if route.local is not None:
            self._answer_locally(connection, request, route.local)
            return None
        exchange = self.exchange(self, connection, request, route)
        self.live.add(exchange)
        exchange.begin()
        return None if exchange.ended else exchange

    def error_answer(
        self,
        request: HttpRequest | None,
        error: GatewayError,
        target: bytes = b"",
        *,
        peer: str = "",
    ) -> tuple[bytes, bytes]:
        """Count and render the answer to a request that did not become an exchange."""
        lines, body = self.render_error(request, error, target)
        self.telemetry.refused(None, error.code)
        route = request.route if request is not None else None
        self.telemetry.finished(
            RequestRecord(
                request_id=request.request_id.decode() if request is not None else "",
                api=route.shown if route is not None else "other",
                received_at=request.received_at if request is not None else self.clock(),
                status=error.status,
                outcome=error.outcome,
                client=peer if request is None else self.client_of(request, peer),
            )
        )
        return lines, body

    def render_error(
        self, request: HttpRequest | None, error: GatewayError, target: bytes = b""
    ) -> tuple[bytes, bytes]:
        """Return (header lines, body) of an error answer."""
        if request is not None and not request.request_id:
            request.request_id = self._ids.new()
        request_id = request.request_id if request is not None else self._ids.new()
        path = request.path if request is not None else path_of(target)
        anthropic = routes.canonical_path(path).startswith("/v1/messages")
        lines = error_lines(error, request_id, self._rng) + self.cors.lines(request)
        return lines, error.body(anthropic=anthropic)

    # --- what exchanges use

    def client_of(self, request: HttpRequest, peer: str) -> str:
        """Return the address of who asks: its peer's, or what a trusted proxy says."""
        if self.proxies is None:
            return peer
        return self.proxies.client(request.picked.get(b"x-forwarded-for"), peer)

    def at_capacity(self) -> GatewayError:
        """Return why no further request may begin."""
        if self.draining:
            return Draining("The gateway is shutting down.")
        return Overloaded(
            f"The gateway serves {self.max_streams} requests at once (limits.streams)."
        )

    def prompter(self, model: str) -> Prompter:
        """Return how this model's prompts are counted and hashed."""
        return self.prompters.get(model, self._default_prompter)

    def heard(self, backend: str, since: float) -> bool:
        """Return whether any of an answer came from a backend after `since`."""
        return any(
            exchange.heard_at > since and exchange.record.backend == backend
            for exchange in self.live
        )

    def leave(self) -> None:
        """Be ready no more; what comes all the same is served."""
        self.leaving = True

    def drain(self) -> None:
        """Begin nothing new."""
        self.leaving = self.draining = True
        if not self.live:
            self.quiet.set()

    def fill_plan(self, request: HttpRequest, peer: str) -> Plan:
        """Note the header lines that backends get with this head."""
        picked, plan = request.picked, request.plan
        chain = peer.encode()
        claimed = picked.get(b"x-forwarded-for")
        proxies = self.proxies
        if claimed is not None and proxies is not None and proxies.trusts(peer):
            chain = b"%b, %b" % (claimed, chain)
        lines = request.forward + (b"x-forwarded-for: %b\r\n" % chain if chain else b"")
        accepts = picked.get(b"accept-encoding")
        plan.lines = lines if accepts is None else b"%baccept-encoding: %b\r\n" % (lines, accepts)
        plan.plain = lines + b"accept-encoding: identity\r\n"
        return plan

    def answer_lines(self, exchange: Endings) -> bytes:
        """Return the header lines of ours that a relayed answer gets."""
        request = exchange.request
        lines = b"x-request-id: %b\r\n%b%b" % (
            request.request_id,
            self.debug_lines(exchange),
            self.limit_lines(request.key),
        )
        return lines + self.cors.lines(request) if self.cors.on else lines

    def limit_lines(self, key: KeyConfig | None) -> bytes:
        """Return the `x-ratelimit-*` lines of a key that has limits."""
        if key is None:
            return b""
        standing = self.dispatcher.standing(key.name, self.clock())
        return b"" if standing is None else limit_lines(standing)

    def debug_lines(self, exchange: Endings) -> bytes:
        """Return the `x-gateway-*` lines (contract, section 3)."""
        if not self._debug:
            return b""
        record, ticket = exchange.record, exchange.ticket
        if ticket is None or record.backend is None:  # refused, or still waiting for one
            lines = f"x-gateway-class: {record.cls}\r\n" if record.cls is not None else ""
            return lines.encode("latin-1", "replace")
        names = (record.backend, record.cls, ticket.policy)
        text = "x-gateway-backend: {}\r\nx-gateway-class: {}\r\nx-gateway-policy: {}\r\n"
        shown = text.format(*names).encode("latin-1", "replace")
        shown += b"x-gateway-attempts: %d\r\nx-gateway-prefix: " % record.attempts
        if record.attempts == 1 and not self.cors.on and len(self.shown) < _SHOWN_MAX:
            self.shown[names] = shown
        prefix = (ticket.hit_tokens, ticket.query.chain.tokens)
        waited_ms = round((record.queue_s or 0.0) * 1000)
        return shown + b"%d/%d\r\nx-gateway-queue-ms: %d\r\n" % (*prefix, waited_ms)

    async def explain(self, body: bytes, path: str, key: str | None = None) -> Explanation:
        """Return what would happen to this body on this path now; nothing is sent or counted.

        `key` is the name of the key that it would come with: it may decide the class and the hits.

        Raises:
            GatewayError: the request would be refused for its shape or its model.
        """
        route = routes.find("POST", path)
        if route.api is None:
            raise NotFound("Only API routes can be explained.")
        asker = None if key is None else self._key_named(key)
        parsed = parse_body(route, body, "application/json")
        model = resolve_model(self.dispatcher, parsed.model)
        isolation = asker.name if asker is not None and self.isolate_keys else ""
        chain = start_chain(self.prompter(model), parsed, model, isolation)
        if not isinstance(chain, Chain):
            chain = await chain.wait()
        query = build_query(self.dispatcher, chain, parsed, model, path=route.path, key=asker)
        return self.dispatcher.explain(query, self.clock())

    def _key_named(self, name: str) -> KeyConfig:
        found = next((key for key in self._key_configs if key.name == name), None)
        if found is None:
            raise NotFound("no such key", param="key")
        return found

    def ready(self) -> bool:
        """Return whether requests can be served: not leaving, and a backend is up."""
        return not self.leaving and any(
            b.up and not b.draining for b in self.dispatcher.backends(self.clock())
        )

    # --- local answers

    def _answer_locally(
        self, connection: ClientConnection, request: HttpRequest, local: Local
    ) -> None:
        try:
            status, body = self._local(request, local)
        except GatewayError as error:
            connection.respond_error(request, error)
            return
        except Exception:  # noqa: BLE001 - a fault of ours costs one request, never the process
            _log.exception("local route %s failed", local.value)
            connection.respond_error(request, InternalError("Internal error of the gateway."))
            return
        lines = b"x-request-id: %b\r\n" % request.request_id + JSON + self.cors.lines(request)
        connection.respond(request, status, lines, body)

    def _local(self, request: HttpRequest, local: Local) -> tuple[int, bytes]:
        if local is Local.HEALTHZ:
            return 200, b'{"status":"ok"}'
        if local is Local.READYZ:
            return (
                (200, b'{"status":"ready"}') if self.ready() else (503, b'{"status":"not ready"}')
            )
        allowed = _patterns(request.key)
        if local is Local.MODELS:
            return 200, self._catalog.body(allowed)
        assert request.route is not None
        wanted = unquote(request.route.id or "")
        entry = self._catalog.one(wanted, allowed)
        if entry is None:
            raise model_not_found(wanted)
        return 200, entry


def _patterns(key: KeyConfig | None) -> tuple[str, ...] | None:
    return None if key is None else tuple(key.models)
