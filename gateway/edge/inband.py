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


def _response_failed(message: str, code: str) -> bytes:
    response = {
        "object": "response",
        "status": "failed",
        "error": {"code": "server_error", "message": f"{code}: {message}"},
        "output": [],
    }
    data = orjson.dumps({"type": "response.failed", "response": response})
    return b"event: response.failed\ndata: " + data + _EVENT_END
