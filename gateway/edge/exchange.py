"""One request's life, in named phases with one exit: here those up to the first attempt.

decode -> parse -> resolve -> permit -> chain, classify -> admit -> attempt (-> attempt) -> relay
-> `_finish`. No task runs except while a new connection is being opened.
"""

import logging

from gateway.core.request import ParsedRequest, UsageOption
from gateway.core.splice import replace_model, replace_priority, request_usage
from gateway.core.types import Api, Refusal, RefusalKind
from gateway.edge import keys
from gateway.edge.attempts import Attempts
from gateway.edge.decode import decode_body
from gateway.edge.query import build_query, model_not_found, parse_body, resolve_model
from gateway.errors import GatewayError, InternalError, NoBackend, NotFound, RateLimited
from gateway.telemetry.record import AdmissionResult

_log = logging.getLogger("radixgate.exchange")
_ADMITTED = AdmissionResult.ADMITTED  # a member costs a look-up in its class each time
_USAGE_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})


class Exchange(Attempts):
    """A request from its first byte understood to its last byte answered."""

    __slots__ = ()

    def begin(self) -> None:
        """Run the phases up to the first attempt; any error is answered."""
        handler = self._handler
        try:
            if handler.draining or len(handler.live) > handler.max_streams:
                raise handler.at_capacity()  # noqa: TRY301 - all errors are answered below
            if self._route.id is None:
                self._begin_routed()
            else:
                self._begin_by_id(self._route.id)
        except GatewayError as error:
            self.refuse(error)
        except Exception:  # noqa: BLE001 - a fault of ours costs one request, never the process
            _log.exception("request %s failed", self.record.request_id)
            self.refuse(InternalError("Internal error of the gateway; its log has the cause."))

    def _begin_routed(self) -> None:
        handler, request, record, route = self._handler, self.request, self.record, self._route
        key, plan = request.key, request.plan
        if plan.coding is not None:
            self._body = decode_body(self._body, plan.coding, handler.body_limit)
        kind = (request.text(b"content-type") or "") if route.multipart else ""
        self._parsed = parsed = parse_body(route, self._body, kind)
        record.stream = parsed.stream
        record.model = model = resolve_model(
            handler.dispatcher, parsed.model, awaiting=handler.awaiting_models
        )
        if key is not None:
            keys.require(key, model)
        self._prompter = prompter = handler.prompter(model)
        query = build_query(
            handler.dispatcher,
            prompter,
            parsed,
            model,
            path=route.path,
            user_agent=request.user_agent,
            key=key,
            forced_class=plan.forced_class,
            session=request.session,
        )
        record.cls = cls = query.cls
        now = handler.clock()
        ticket = handler.dispatcher.admit(query, now)
        if isinstance(ticket, Refusal):
            raise self._refusal(ticket, cls, model)
        self.ticket = ticket
        handler.telemetry.admission(cls, _ADMITTED)
        record.prompt_tokens = query.chain.tokens
        record.queue_s = 0.0
        if parsed.stream or parsed.model != model or key is not None:
            self._edit_body(parsed, model)
        self._attempt(ticket, now)

    def _begin_by_id(self, response_id: str) -> None:
        """`/v1/responses/{id}`: only the backend that made a response knows it."""
        made_by = self._handler.responses.get(response_id)
        self._upstream = self._handler.upstreams.get(made_by) if made_by is not None else None
        if self._upstream is None:
            raise NotFound("No response with this id was made through this gateway.", param="id")
        self.record.backend = self._upstream.name
        self.record.attempts = 1
        self._go(self._upstream, self._handler.clock())

    def _refusal(self, refusal: Refusal, cls: str, model: str) -> GatewayError:
        telemetry = self._handler.telemetry
        if refusal.kind is RefusalKind.RATE:
            telemetry.admission(cls, AdmissionResult.REJECTED_RATE)
            message = f"The token bucket of class `{cls}` is empty; see retry-after."
            return RateLimited(message, retry_after_s=refusal.retry_after_s)
        if refusal.kind is RefusalKind.UNKNOWN_MODEL:
            return model_not_found(model)
        telemetry.admission(cls, AdmissionResult.NO_BACKEND)
        message = f"No backend of `{model[:100]}` is up."
        return NoBackend(message, retry_after_s=refusal.retry_after_s)

    def _edit_body(self, parsed: ParsedRequest, model: str) -> None:
        """Splice in the values a rule changes; every other byte stays the client's."""
        if parsed.model is not None and parsed.model != model and not self._route.multipart:
            self._body = replace_model(self._body, model)
        key = self.request.key
        if key is not None and not key.choose_priority and parsed.data.get("priority"):
            self._body = replace_priority(self._body, 0)
        if (
            self._handler.inject_usage
            and parsed.stream
            and parsed.api in _USAGE_APIS
            and parsed.usage_option is not UsageOption.EXPLICIT
        ):
            self._body = request_usage(self._body, parsed.usage_option)
            self._inject_usage = True
