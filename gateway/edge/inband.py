"""Errors inside a stream, once its head is out: each API's own form, then its terminal event.

Never creates `id:`, `retry:`, an event without data or an empty `data:`: clients break on those.
"""

import orjson

from gateway.core.types import Api

KEEPALIVE = b": keep-alive\n\n"
_EVENT_END = b"\n\n"


def error_events(api: Api, message: str, code: str) -> bytes:
    """Return the events that tell a stream's reader of a failure and end the stream."""
    if api is Api.MESSAGES:
        error = {"type": "api_error", "message": message}
        data = orjson.dumps({"type": "error", "error": error})
        return b"event: error\ndata: " + data + _EVENT_END
    if api is Api.RESPONSES:
        return _response_failed(message, code)
    error_body = {"message": message, "type": "server_error", "param": None, "code": code}
    data = orjson.dumps({"error": error_body})
    return b"data: " + data + b"\n\ndata: [DONE]\n\n"


def refusal_events(api: Api, status: int, body: bytes) -> bytes:
    """Return the events that tell an engine's own error answer, which came too late for a status.

    Its error object is kept whole where the API's events have a place for it.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and api is Api.MESSAGES:
        data = orjson.dumps({"type": "error", "error": error})
        return b"event: error\ndata: " + data + _EVENT_END
    if isinstance(error, dict) and api is not Api.RESPONSES:
        return b"data: " + orjson.dumps(answer) + b"\n\ndata: [DONE]\n\n"
    message = error.get("message") if isinstance(error, dict) else None
    return error_events(api, str(message or f"The backend answered {status}."), "upstream_error")


def _response_failed(message: str, code: str) -> bytes:
    response = {
        "object": "response",
        "status": "failed",
        "error": {"code": "server_error", "message": f"{code}: {message}"},
        "output": [],
    }
    data = orjson.dumps({"type": "response.failed", "response": response})
    return b"event: response.failed\ndata: " + data + _EVENT_END
