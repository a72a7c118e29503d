"""One request's life, in named phases with one exit: here those up to the first attempt.

decode -> parse -> resolve -> permit -> chain, classify -> admit -> attempt (-> attempt) -> relay
-> `_finish`. No task runs except while a new connection is being opened.
"""

import logging

from gateway.core.request import ParsedRequest, UsageOption
from gateway.core.splice import replace_model, replace_priority, request_usage
from gateway.core.types import Api, Refusal, RefusalKind, Ticket
from gateway.edge import keys
from gateway.edge.attempts import Attempts
from gateway.edge.decode import decode_body
from gateway.edge.query import build_query, model_not_found, parse_body, resolve_model
from gateway.errors import GatewayError, InternalError, NoBackend, NotFound, RateLimited
from gateway.telemetry.record import AdmissionResult

_log = logging.getLogger("radixgate.exchange")
_USAGE_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})


class Exchange(Attempts):
    """A request from its first byte understood to its last byte answered."""

    __slots__ = ()

    def begin(self) -> None:
        """Run the phases up to the first attempt; any error is answered."""
        try:
            self._handler.check_capacity()
            if self.request.route is not None and self.request.route.id is not None:
                self._begin_by_id(self.request.route.id)
            else:
                self._begin_routed()
        except GatewayError as error:
            self.refuse(error)
        except Exception:  # noqa: BLE001 - a fault of ours costs one request, never the process
            _log.exception("request %s failed", self.record.request_id)
            self.refuse(InternalError("Internal error of the gateway; its log has the cause."))

    def _begin_routed(self) -> None:
        self._decode()
        parsed = self._parse()
        model = self.record.model = resolve_model(self._handler.dispatcher, parsed.model)
        keys.require(self.request.key, model)
        self._ticket = self._admit(parsed, model)
        self._edit_body(parsed, model)
        self._attempt()

    def _begin_by_id(self, response_id: str) -> None:
        """`/v1/responses/{id}`: only the backend that made a response knows it."""
        made_by = self._handler.responses.get(response_id)
        self._upstream = self._handler.upstreams.get(made_by) if made_by is not None else None
        if self._upstream is None:
            raise NotFound("No response with this id was made through this gateway.", param="id")
        self.record.backend = self._upstream.name
        self.record.attempts = 1
        self._send_or_connect(self._upstream)

    def _decode(self) -> None:
        encoding = self.request.picked.get(b"content-encoding")
        if encoding is not None:
            limit = self._handler.body_limit
            self._body = decode_body(self._body, encoding.decode("latin-1"), limit)

    def _parse(self) -> ParsedRequest:
        route = self.request.route
        assert route is not None
        kind = (self.request.text(b"content-type") or "") if route.multipart else ""
        self._parsed = parsed = parse_body(route, self._body, kind)
        self.record.stream = parsed.stream
        return parsed

    def _admit(self, parsed: ParsedRequest, model: str) -> Ticket:
        handler, request, record = self._handler, self.request, self.record
        may_choose = request.key.choose_class if request.key is not None else handler.keys.open
        query = build_query(
            handler.dispatcher,
            handler.prompter(model),
            parsed,
            model,
            path=record.api,
            user_agent=request.user_agent,
            key=request.key,
            forced_class=request.text(b"x-gateway-class") if may_choose else None,
            session=request.session,
        )
        cls = record.cls = query.cls
        answer = handler.dispatcher.admit(query, handler.clock())
        if isinstance(answer, Refusal):
            raise self._refusal(answer, cls, model)
        handler.telemetry.admission(cls, AdmissionResult.ADMITTED)
        record.prompt_tokens = query.chain.tokens
        record.queue_s = 0.0
        return answer

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
        if parsed.model is not None and parsed.model != model and not self._multipart:
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

    @property
    def _multipart(self) -> bool:
        return self.request.route is not None and self.request.route.multipart
