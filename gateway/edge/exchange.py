"""One request's life, in named phases with one exit: here those up to the first attempt.

decode -> parse -> resolve -> permit -> chain, classify -> admit -> attempt (-> attempt) -> relay
-> `_finish`. No task runs except while a new connection is opened, a large body is read or a long
new text is encoded.
"""

import asyncio
from functools import partial
from time import perf_counter

from gateway.config.schema import KeyConfig
from gateway.core.answer import is_followed
from gateway.core.canonical import write_ahead
from gateway.core.dispatcher import Dispatcher
from gateway.core.prompter import PendingChain
from gateway.core.request import ParsedRequest, UsageOption
from gateway.core.scan import NO_USAGE
from gateway.core.splice import replace_model, replace_priority, request_usage, set_priority
from gateway.core.types import Api, Chain, Query, Refusal, RefusalKind, Ticket
from gateway.edge import keys
from gateway.edge.attempts import Attempts
from gateway.edge.decode import decode_body
from gateway.edge.large import LARGE, apart, has_many, is_large
from gateway.edge.parking import error_of
from gateway.edge.query import (
    build_query,
    model_not_found,
    parse_body,
    resolve_model,
    start_chain,
)
from gateway.errors import (
    GatewayError,
    InsufficientQuota,
    NoBackend,
    NotFound,
    RateLimited,
)
from gateway.tasks import spawn
from gateway.telemetry.record import AdmissionResult

_ADMITTED = AdmissionResult.ADMITTED  # a member costs a look-up in its class each time
_USAGE_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})
# Those whose bodies vLLM reads a priority from.
_PRIORITY_APIS = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES})


class Exchange(Attempts):
    """A request from its first byte understood to its last byte answered."""

    __slots__ = ()

    def begin(self) -> None:
        """Run the phases up to the first attempt; any error is answered."""
        handler = self._handler
        self._began = perf_counter()
        try:
            if handler.draining or len(handler.live) > handler.max_streams:
                raise handler.at_capacity()  # noqa: TRY301 - all errors are answered below
            if self._route.id is not None:
                self._begin_by_id(self._route.id)
            elif self.request.plan.coding is not None or is_large(self._body):
                self._waiting = spawn(self._begin_large(), name="large body")
            else:
                self._begin_routed()
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request, never the process
            self._fail(error)

    def _begin_routed(self) -> None:
        parsed = self._read_body()
        if has_many(parsed):
            self._waiting = spawn(self._begin_many(parsed), name="many messages")
            return
        model, chain = self._start(parsed)
        if not isinstance(chain, Chain):
            self._waiting = spawn(self._begin_encoded(parsed, model, chain), name="encode")
            return
        ticket, now = self._admit(self._ask(parsed, model, chain))
        changed = parsed.stream or parsed.model != model or self.request.key is not None
        if changed or self._handler.priorities:
            self._edit_body(parsed, model)
        self._go_on(ticket, now)

    def _go_on(self, ticket: Ticket, now: float) -> None:
        if ticket.held:
            self._handler.parking.park(ticket, self)
        else:
            self._attempt(ticket, now)

    async def _begin_large(self) -> None:
        """Do the same, and what takes long in a thread; cancelled when the request ends."""
        try:
            parsed = await apart(self._read_large)
            await self._begin_chained(parsed, *self._start(parsed))
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request, never the process
            self._fail(error)

    async def _begin_many(self, parsed: ParsedRequest) -> None:
        """Do the same with what was parsed and is of very many parts."""
        try:
            await apart(partial(write_ahead, parsed))
            await self._begin_chained(parsed, *self._start(parsed))
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request, never the process
            self._fail(error)

    async def _begin_encoded(
        self, parsed: ParsedRequest, model: str, pending: PendingChain
    ) -> None:
        """Go on when a long new text is encoded; cancelled when the request ends."""
        try:
            await self._begin_chained(parsed, model, pending)
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request, never the process
            self._fail(error)

    async def _begin_chained(
        self, parsed: ParsedRequest, model: str, chain: Chain | PendingChain
    ) -> None:
        if not isinstance(chain, Chain):
            chain = await chain.wait()
        query = self._ask(parsed, model, chain)
        if len(self._body) > LARGE:
            await apart(partial(self._edit_body, parsed, model))
        else:
            self._edit_body(parsed, model)
            await asyncio.sleep(0)  # that hashed the prompt, and the index takes as long again
        self._waiting = None
        self._go_on(*self._admit(query))

    def _read_body(self) -> ParsedRequest:
        """Decode and parse; touches nothing but this request."""
        request, route = self.request, self._route
        coding = request.plan.coding
        if coding is not None:
            self._body = decode_body(self._body, coding, self._handler.body_limit)
        kind = (request.text(b"content-type") or "") if route.multipart else ""
        return parse_body(route, self._body, kind)

    def _read_large(self) -> ParsedRequest:
        """Do the same, and what can be done about its chain before the model is known."""
        parsed = self._read_body()
        if is_large(self._body) or has_many(parsed):
            write_ahead(parsed)
        return parsed

    def _start(self, parsed: ParsedRequest) -> tuple[str, Chain | PendingChain]:
        """Return the model's own name and the prompt's chain, done or begun.

        Raises:
            GatewayError: the model or the key does not allow it.
        """
        handler, record, key = self._handler, self.record, self.request.key
        record.stream = parsed.stream
        record.model = model = resolve_model(
            handler.dispatcher, parsed.model, awaiting=handler.awaiting_models
        )
        isolation = ""
        if key is not None:
            keys.require(key, model, parsed.model)
            if handler.isolate_keys:
                isolation = key.name
            if self._route.api is Api.RESPONSES:
                self._own_previous(parsed.data.get("previous_response_id"), key)
        self._prompter = prompter = handler.prompter(model)
        return model, start_chain(prompter, parsed, model, isolation)

    def _ask(self, parsed: ParsedRequest, model: str, chain: Chain) -> Query:
        """Return what is asked of the dispatcher."""
        request = self.request
        query = build_query(
            self._handler.dispatcher,
            chain,
            parsed,
            model,
            path=self._route.path,
            user_agent=request.user_agent,
            key=request.key,
            forced_class=request.plan.forced_class,
            session=request.session,
            body_bytes=len(self._body),
            patience_s=request.plan.patience_s,
        )
        self._followed = query.prefills and chain.block_bytes > 0 and is_followed(parsed)
        return query

    def _admit(self, query: Query) -> tuple[Ticket, float]:
        """Return the ticket and when it was given.

        Raises:
            GatewayError: refused, whyever.
        """
        handler, record = self._handler, self.record
        record.cls = cls = query.cls
        now = handler.clock()
        ticket = handler.dispatcher.admit(query, now)
        handler.telemetry.decided(perf_counter() - self._began)
        if isinstance(ticket, Refusal):
            error = self._refusal(ticket, cls, query.model)
            if handler.recorder is not None:
                handler.recorder.note(query, NO_USAGE, 0, error.outcome, record.received_at)
            raise error
        self.ticket = ticket
        if not ticket.held:
            handler.telemetry.admission(cls, _ADMITTED)
        if query.prefills:
            record.prompt_tokens = query.chain.tokens
        record.queue_s = 0.0
        return ticket, now

    def released(self, ticket: Ticket, now: float) -> None:
        """Go on: the ticket, held until `now`, has a backend."""
        record = self.record
        record.queue_s = now - ticket.admitted_at
        self._handler.telemetry.admission(ticket.query.cls, _ADMITTED)
        try:
            self._attempt(ticket, now)
        except Exception as error:  # noqa: BLE001 - others were let go with it and must still start
            self._fail(error)

    def expired(self, refusal: Refusal) -> None:
        """Refuse: the ticket was held as long as it may be."""
        ticket, handler = self.ticket, self._handler
        assert ticket is not None
        self.record.queue_s = waited = handler.clock() - ticket.admitted_at
        kind = AdmissionResult.EXPIRED
        if refusal.kind is RefusalKind.NO_BACKEND:
            kind = AdmissionResult.NO_BACKEND
        handler.telemetry.admission(ticket.query.cls, kind)
        self.refuse(error_of(refusal, waited))

    def _begin_by_id(self, response_id: str) -> None:
        """`/v1/responses/{id}`: only the backend that made a response knows it."""
        handler, key, record = self._handler, self.request.key, self.record
        home = handler.responses.get(response_id)
        upstream = handler.upstreams.get(home.backend) if home is not None else None
        if home is None or upstream is None or (key is not None and key.name != home.key):
            raise NotFound("No response with this id was made through this gateway.", param="id")
        if key is not None:
            keys.require(key, home.model, *_aliases(handler.dispatcher, home.model))
        self._upstream = upstream
        record.model, record.backend, record.attempts = home.model, home.backend, 1
        self._uncounted = True
        self._go(upstream, handler.clock())

    def _own_previous(self, response_id: object, key: KeyConfig) -> None:
        """Refuse to continue another key's response: its conversation would be read."""
        home = self._handler.responses.get(response_id) if isinstance(response_id, str) else None
        if home is not None and home.key != key.name:
            message = "No response with this id was made through this gateway."
            raise NotFound(message, param="previous_response_id")

    def _refusal(self, refusal: Refusal, cls: str, model: str) -> GatewayError:
        telemetry = self._handler.telemetry
        if refusal.kind is RefusalKind.RATE:
            telemetry.admission(cls, AdmissionResult.REJECTED_RATE)
            message = f"The rate limit of {refusal.detail} is reached; see retry-after."
            return RateLimited(message, retry_after_s=refusal.retry_after_s)
        if refusal.kind is RefusalKind.QUOTA:
            telemetry.admission(cls, AdmissionResult.REJECTED_RATE)
            message = f"The quota of {refusal.detail} is used up (keys.tokens_per_day)."
            return InsufficientQuota(message, retry_after_s=refusal.retry_after_s)
        if refusal.kind is RefusalKind.UNKNOWN_MODEL:
            return model_not_found(model)
        if refusal.kind is RefusalKind.FULL:
            telemetry.admission(cls, AdmissionResult.REJECTED_FULL)
            return error_of(refusal, 0.0)
        telemetry.admission(cls, AdmissionResult.NO_BACKEND)
        message = f"No backend of `{model[:100]}` is up."
        return NoBackend(message, retry_after_s=refusal.retry_after_s)

    def _edit_priority(self, parsed: ParsedRequest) -> None:
        """See that only who may chooses the engine's priority; others get their class's, or none."""
        key, asked = self.request.key, parsed.data.get("priority")
        if asked and key is not None and key.choose_priority:
            return
        own = self._handler.priorities.get(self.record.cls or "")
        if own is not None and parsed.api in _PRIORITY_APIS:
            self._body = set_priority(self._body, own)
        elif asked and key is not None:
            self._body = replace_priority(self._body, 0)

    def _edit_body(self, parsed: ParsedRequest, model: str) -> None:
        """Splice in the values a rule changes; every other byte stays the client's."""
        if parsed.model is not None and parsed.model != model and not self._route.multipart:
            self._body = replace_model(self._body, model)
        if self._handler.priorities or self.request.key is not None:
            self._edit_priority(parsed)
        if (
            self._handler.inject_usage
            and parsed.stream
            and parsed.api in _USAGE_APIS
            and parsed.usage_option is not UsageOption.EXPLICIT
        ):
            self._body = request_usage(self._body, parsed.usage_option)
            self._inject_usage = True


def _aliases(dispatcher: Dispatcher, model: str) -> tuple[str, ...]:
    """Return the other names under which a model is asked for."""
    return next((spec.aliases for spec in dispatcher.models if spec.name == model), ())
