"""Errors a simulated replica answers with, in vLLM 0.32's words and shapes.

Only what vLLM itself refuses: never stricter, so that a gateway in front meets the real thing.
"""

from typing import Any

import orjson


class Fault(Exception):
    """An error answer: `status`, and what its JSON body says."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self, *, anthropic: bool = False) -> bytes:
        """Return the JSON body, in OpenAI's shape or, on `/v1/messages`, Anthropic's."""
        if anthropic:
            error = {"type": self.kind, "message": self.message}
            return orjson.dumps({"type": "error", "error": error})
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def bad_value(message: str, param: str | None = None, value: Any = None) -> Fault:
    """Return vLLM's own 400; with a parameter, its name and value are in the message."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return Fault(400, message, "BadRequestError", param)


def invalid(kind: str, where: str, text: str, given: str, ctx: str = "") -> Fault:
    """Return a 400 of the body's validation, in pydantic's terms."""
    detail = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{text}', 'input': '{given}'{ctx}}}"
    return Fault(400, f"1 validation error:\n  {detail}", "Bad Request", where)


def media_type() -> Fault:
    """Return the answer to a content type that is not JSON."""
    text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return Fault(400, text, "Bad Request")


def missing(name: str, fields: int) -> Fault:
    """Return the answer to an absent required field of a body with `fields` fields."""
    return invalid("missing", f"body.{name}", "Field required", f"<dict of {fields} items>")


def no_model(model: str, served: str) -> Fault:
    """Return the answer to a model that is not served."""
    text = f"The model `{model}` does not exist. Valid aliases: {served}."
    return Fault(404, text, "NotFoundError", "model")


def too_long(limit: int) -> Fault:
    """Return the answer to a prompt over the model's length."""
    return bad_value(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at "
        f"least {limit + 1} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        limit + 1,
    )


def too_long_with_output(limit: int, prompt: int, output: int) -> Fault:
    """Return the answer to a prompt that leaves no room for the asked output."""
    return bad_value(
        f"This model's maximum context length is {limit} tokens. However, you requested {output} "
        f"output tokens and your prompt contains at least {prompt} input tokens, for a total of at "
        f"least {prompt + output} tokens. Please reduce the length of the input prompt or the "
        "number of requested output tokens.",
        "input_tokens",
        prompt,
    )


def full() -> Fault:
    """Return the answer to a request over the waiting queue's cap."""
    return Fault(503, "The request queue is full.", "ServiceUnavailableError")
