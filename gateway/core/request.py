"""Request bodies to the few fields routing reads. Parse once, here, and nowhere else.

Never stricter than the engine: a field is checked only if the gateway acts on it. Never raises
anything but `RequestFault`, whatever the bytes, and never puts a body's text into a message.
"""

import re
from enum import Enum, unique
from typing import Any

import msgspec
import orjson
import xxhash

from gateway.core.types import Api

MAX_SESSION_CHARS = 256
"""Longer session ids are ignored: they are table keys, and no known client comes near."""

MAX_PARTS = 64
"""Form parts read of a multipart body; OpenAI's transcription form has 10 fields."""

MAX_FIELD_BYTES = 64 * 1024
"""A form field above this is no field routing reads; only its digest is kept."""

MAX_WEIGHT = 2_000_000
"""What a body's values may weigh: 1 each, and 4 more per array, object and field.

Parsing costs some 0.1 us per unit, so this bounds it to about 0.2 s. Commas, brackets and colons
inside of strings count too, as telling them apart would cost more than parsing. A prompt of a
million token ids weighs 1 million, one of a million tokens of compact JSON text some 1.3 million.
"""

_LIGHT_BYTES = 1024 * 1024  # no body of this size or less is too heavy
_MODEL_REQUIRED = frozenset(
    {
        Api.CHAT,
        Api.COMPLETIONS,
        Api.RESPONSES,
        Api.MESSAGES,
        Api.COUNT_TOKENS,
        Api.EMBEDDINGS,
        Api.TRANSCRIPTIONS,
        Api.TRANSLATIONS,
    }
)
_MESSAGES_REQUIRED = frozenset({Api.CHAT, Api.MESSAGES, Api.COUNT_TOKENS})
_MAX_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# Every field that `parse_json` reads, `model` and `messages` apart; a body of few fields that has
# none of them needs no look at each.
_READ = frozenset(
    {*("stream", "stream_options", "n", "tools", "functions", "session_id", "prompt_cache_key")}
    | {"metadata", *_MAX_FIELDS}
)
_FEW_FIELDS = 8
_TRUE_WORDS = frozenset({"true", "1", "yes", "on", "t", "y"})  # what pydantic, so vLLM, takes
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^;\s"]{1,200}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition\s*:([^\r\n]*)", re.IGNORECASE)
_NAME = re.compile(rb';\s*name="([^"]{0,200})"')


class RequestFault(Exception):
    """The body cannot be routed. `code` is `invalid_json` or `invalid_request`."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code = code
        self.message = message
        self.param = param


@unique
class UsageOption(Enum):
    """What the client said about `stream_options.include_usage`."""

    ABSENT = "absent"
    EMPTY = "empty"  # stream_options is null, or an object without include_usage
    EXPLICIT = "explicit"


_ABSENT = UsageOption.ABSENT


class ParsedRequest(msgspec.Struct):
    """A request as routing sees it. `data` is the parsed body, or a form's text fields.

    `written` is its canonical stream from the prompt on, where that was made beforehand.

    Set `model` to the resolved name before hashing, so that an alias shares its model's prefixes.
    """

    api: Api
    model: str | None
    stream: bool
    max_tokens: int | None
    n: int
    has_tools: bool
    session: str | None
    usage_option: UsageOption
    data: dict[str, Any]
    body_len: int
    written: bytes | None = None


def parse_json(api: Api, body: bytes) -> ParsedRequest:
    """Read a JSON body.

    Raises:
        RequestFault: not one JSON object, too many values, or `model` or `messages` is missing or
            of a wrong kind.
    """
    if len(body) > _LIGHT_BYTES:  # asked here too: a call costs more
        check_weight(body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        message = f"The body is not valid JSON: {error.msg.split(':')[0]} ({place})."
        raise RequestFault("invalid_json", message) from None
    except RecursionError:
        raise RequestFault("invalid_json", "The body is nested too deeply.") from None
    if not isinstance(data, dict):
        raise RequestFault("invalid_json", "The body must be one JSON object.")
    model = data.get("model")
    if not isinstance(model, str) and (model is not None or api in _MODEL_REQUIRED):
        raise RequestFault("invalid_request", "`model` must be a string.", "model")
    if api in _MESSAGES_REQUIRED and not isinstance(data.get("messages"), list):
        raise RequestFault("invalid_request", "`messages` must be a list.", "messages")
    if len(data) <= _FEW_FIELDS and _READ.isdisjoint(data):  # a plain question: all defaults
        return ParsedRequest(api, model, False, None, 1, False, None, _ABSENT, data, len(body))
    stream = data.get("stream")
    return ParsedRequest(  # positional: half the price of keywords
        api,
        model,
        stream is True or (stream is not None and _is_true(stream)),
        _max_tokens(data),
        1 if "n" not in data else _count(data["n"]) or 1,
        bool(data.get("tools") or data.get("functions")),
        _session(data),
        _usage_option(data) if "stream_options" in data else _ABSENT,
        data,
        len(body),
    )


def check_weight(body: bytes) -> None:
    """Raise RequestFault for a body of so many values that parsing it would stall others."""
    if len(body) <= _LIGHT_BYTES:
        return
    weight = body.count(b",") + 4 * (body.count(b"[") + body.count(b"{") + body.count(b":"))
    if weight > MAX_WEIGHT:
        message = (
            f"The body has too many JSON values, limit {MAX_WEIGHT:,} "
            "(each counts 1, and 4 more per array, object and field)."
        )
        raise RequestFault("invalid_request", message)


def parse_multipart(api: Api, content_type: str, body: bytes) -> ParsedRequest:
    """Read a form body: its text fields, and for each file a digest under `file:<name>`.

    Raises:
        RequestFault: no boundary, no part, or no `model` field.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise RequestFault("invalid_request", "The multipart body has no boundary.", None)
    boundary = (found[1] or found[2]).encode("utf-8", "surrogateescape")
    data = _form_fields(body, b"--" + boundary)
    model = data.get("model")
    if model is None:
        raise RequestFault("invalid_request", "The form field `model` is missing.", "model")
    return ParsedRequest(
        api=api,
        model=model,
        stream=_is_true(data.get("stream")),
        max_tokens=None,
        n=1,
        has_tools=False,
        session=_session(data),
        usage_option=UsageOption.ABSENT,
        data=data,
        body_len=len(body),
    )


def _form_fields(body: bytes, mark: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    start = body.find(mark)
    for _ in range(MAX_PARTS):
        if start < 0:
            break
        start += len(mark)
        if body.startswith(b"--", start):
            break
        end = body.find(b"\r\n" + mark, start)
        if end < 0:  # no closing mark
            end = len(body) - 2 * body.endswith(b"\r\n")
        _form_part(memoryview(body)[start:end], fields)
        start = body.find(mark, end)
    return fields


def _form_part(part: memoryview, fields: dict[str, Any]) -> None:
    head = bytes(part[:4096])
    split = head.find(b"\r\n\r\n")
    disposition = _DISPOSITION.search(head, 0, max(split, 0))
    name = _NAME.search(disposition[1]) if disposition else None
    if disposition is None or name is None:
        return
    key = name[1].decode("utf-8", "replace")
    value = part[split + 4 :]
    if b"filename" in disposition[1] or len(value) > MAX_FIELD_BYTES:
        fields[f"file:{key}"] = xxhash.xxh3_128_hexdigest(value)
    else:
        fields[key] = bytes(value).decode("utf-8", "replace")


def _is_true(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return value == 1 and isinstance(value, int | float)


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def _max_tokens(data: dict[str, Any]) -> int | None:
    for field in _MAX_FIELDS:
        if field in data:
            value = _count(data[field])
            if value is not None:
                return value
    return None


def _session(data: dict[str, Any]) -> str | None:
    """Return the first id that names a conversation (not a user, where both are sent)."""
    found = _first_id(data, ("session_id", "prompt_cache_key"))  # Codex and the Responses API
    if found is None and "metadata" in data:
        metadata = data["metadata"]
        if isinstance(metadata, dict):  # Claude Code puts its session into user_id
            found = _first_id(metadata, ("session_id", "user_id"))
    return found


def _first_id(data: dict[str, Any], fields: tuple[str, ...]) -> str | None:
    for field in fields:
        if field in data:
            value = data[field]
            if isinstance(value, str) and 0 < len(value) <= MAX_SESSION_CHARS:
                return value
    return None


def _usage_option(data: dict[str, Any]) -> UsageOption:
    options = data["stream_options"]
    if options is None:
        return UsageOption.EMPTY
    if isinstance(options, dict) and "include_usage" not in options:
        return UsageOption.EMPTY
    return UsageOption.EXPLICIT  # or of a wrong kind, which is the engine's to refuse
