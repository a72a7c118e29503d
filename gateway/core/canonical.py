"""A request's prompt as one byte stream, in the order in which an engine would render it.

Hash this, not the raw JSON: there, key order and fields before `messages` break the prefix. The
streams of a growing conversation are prefixes of each other, so nothing counts or measures the
whole up front and nothing closes the stream; the generation prompt is left out.

Framing: every piece opens with a tag that starts with 0xFF, a byte UTF-8 never contains; digests
and token ids are the only raw binary and have a known length or run to the end. So two different
prompts never share a stream. Never raises on odd content: what it does not know, it dumps.
"""

import marshal
from array import array
from itertools import islice
from typing import Any, Final

import orjson
import xxhash

from gateway.core.request import ParsedRequest
from gateway.core.types import Api

MEDIA_BYTES: Final = 4096
"""What an image or a sound weighs in the stream: about 1,000 tokens, as a 1 Mpixel image has."""

MAX_WEIGHED_MEDIA: Final = 256
"""Further ones count as their digest alone: a 64 MiB body can name a million tiny images."""

MAX_PIECES: Final = 100_000
"""Where a stream is cut off: some 50 ms of work, and ten times the longest conversations seen."""

MAX_ID_LISTS: Final = 10_000
"""Where a batch of token-id prompts is cut off: five times what OpenAI takes, some 15 ms."""

MAX_EXTRAS: Final = 64
"""A message with more fields is dumped whole; chat APIs define about ten."""

_MODEL: Final = b"\xffM"
_SALT: Final = b"\xffS"
_ISOLATION: Final = b"\xffI"
_TOOLS: Final = b"\xffT"
_OPTION: Final = b"\xffO"
_VALUE: Final = b"\xff="
_ROLE: Final = b"\xffr"
_TEXT: Final = b"\xffc"
_EXTRA: Final = b"\xffx"
_MEDIA: Final = b"\xffd"
_BLOCK: Final = b"\xffb"
_BLOCK_END: Final = b"\xffe"
_JSON: Final = b"\xffj"
_FIELD: Final = b"\xffk"
_IDS: Final = b"\xffi"
_ID_LISTS: Final = b"\xffl"

_CHAT_OPTIONS: Final = (
    "chat_template",
    "chat_template_kwargs",
    "conversation",
    "documents",
    "functions",
    "mm_processor_kwargs",
    "previous_response_id",
    "reasoning",
    "reasoning_effort",
)
_CHAT_OPTION_SET: Final = frozenset(_CHAT_OPTIONS)
_TEXT_OPTIONS: Final = ("suffix", "add_special_tokens", "truncate_prompt_tokens", "language")
_TEXT_FIELDS: Final = (
    *("query", "queries", "text_1", "data_1", "text_2", "data_2", "documents"),
    *("tokens", "input", "prompt", "prompt_embeds"),
)
_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text"})
_NESTED_KINDS: Final = {"tool_result": "content", "function_call_output": "output"}
_JSON_KINDS: Final = frozenset(
    {"tool_use", "thinking", "redacted_thinking", "reasoning", "refusal", "function_call"}
)
_HEADS: Final = {
    role: _ROLE + role.encode() + _TEXT
    for role in ("system", "developer", "user", "assistant", "tool")
}
_UNRENDERED: Final = frozenset({"role", "content", "cache_control", "status", "type"})
_BILLING: Final = "x-anthropic-billing-header"
"""Claude Code's first system block differs in every request; vLLM drops it (vllm#36829)."""


class _Stream(list[bytes]):
    """The pieces written so far, and how many of them were media."""

    media = 0


def canonical(request: ParsedRequest, *, isolation: str = "") -> bytes:
    """Return the stream of a request. `isolation` separates tenants that must not share hits."""
    data = request.data
    out = _Stream((_MODEL, (request.model or "").encode()))
    salt = data.get("cache_salt")
    if salt is not None:
        out += (_SALT, _dump(salt))
    if isolation:
        out += (_ISOLATION, isolation.encode())
    if request.written is None:
        _prompt_of(request, out)
    else:
        out.append(request.written)
        request.written = None  # as large as the body, and of no more use
    return b"".join(out)


def write_ahead(request: ParsedRequest) -> None:
    """Write what needs no name of a model or tenant; `canonical` takes it then. For any thread."""
    out = _Stream()
    _prompt_of(request, out)
    request.written = b"".join(out)


def _prompt_of(request: ParsedRequest, out: _Stream) -> None:
    data = request.data
    if request.api is Api.RESPONSES:
        _preamble(data, data.get("instructions"), out)
        _items(data.get("input"), out)
    elif isinstance(data.get("messages"), list):
        _preamble(data, data.get("system"), out)
        _messages(data["messages"], out)
    else:
        _texts(data, out)


def continued(items: list[Any]) -> bytes:
    """Return how a stream goes on when these messages (or other items) are sent after it."""
    out = _Stream()
    _items(items, out)
    return b"".join(out)


def _preamble(data: dict[str, Any], system: object, out: _Stream) -> None:
    """Write what precedes the conversation: tools, template options, the system prompt."""
    tools = data.get("tools")
    if tools:
        out += (_TOOLS, _dump(_uncached(tools)))
    if not _CHAT_OPTION_SET.isdisjoint(data):
        _options(data, _CHAT_OPTIONS, out)
    if system:
        if isinstance(system, list):
            system = [part for part in system if not _is_billing(part)]
        _message({"role": "system", "content": system}, out)


def _options(data: dict[str, Any], names: tuple[str, ...], out: _Stream) -> None:
    for name in names:
        value = data.get(name)
        if value is not None:
            out += (_OPTION, name.encode(), _VALUE, _dump(value))


def _messages(messages: list[Any], out: _Stream) -> None:
    append = out.append
    for message in messages:
        if isinstance(message, dict) and len(message) == 2:  # nearly all: text, and whose it is
            role = message.get("role")
            content = message.get("content")
            if isinstance(content, str) and isinstance(role, str):
                append(_HEADS.get(role) or _ROLE + role.encode() + _TEXT)
                append(content.encode())
                if len(out) <= MAX_PIECES:
                    continue
                break
        _message(message, out)
        if len(out) > MAX_PIECES:
            break


def _message(message: object, out: _Stream) -> None:
    if not isinstance(message, dict):
        out += (_JSON, _dump(message))
        return
    role = message.get("role")
    content = message.get("content")
    out += (_ROLE, role.encode() if isinstance(role, str) else _JSON + _dump(role))
    if isinstance(content, str):
        out += (_TEXT, content.encode())
    elif content is not None:
        _content(content, out)
    if len(message) != (role is not None) + (content is not None):
        _extras(message, out)


def _extras(message: dict[str, Any], out: _Stream) -> None:
    """Write tool calls, names, reasoning and whatever else a template may read."""
    keys = message.keys() - _UNRENDERED
    if len(keys) > MAX_EXTRAS:
        out += (_JSON, _dump({key: value for key, value in message.items() if key in keys}))
        return
    for key in sorted(keys):
        value = message[key]
        if value or value is False or value == 0:
            out += (_EXTRA, key.encode(), _VALUE, _dump(value))


def _content(content: object, out: _Stream) -> None:
    if isinstance(content, list):
        for part in content:
            _part(part, out)
            if len(out) > MAX_PIECES:
                break
    elif isinstance(content, str):
        out += (_TEXT, content.encode())
    else:
        out += (_JSON, _dump(content))


def _part(part: object, out: _Stream) -> None:
    """Write one part of a message: text as it is, known structure as JSON, the rest by digest."""
    if isinstance(part, str):
        out += (_TEXT, part.encode())
        return
    if not isinstance(part, dict):
        out += (_JSON, _dump(part))
        return
    kind = part.get("type")
    text = part.get("text")
    if isinstance(text, str) and (kind is None or kind in _TEXT_KINDS):
        out += (_TEXT, text.encode())
    elif isinstance(kind, str) and kind in _NESTED_KINDS:
        _nested(part, _NESTED_KINDS[kind], out)
    elif isinstance(kind, str) and kind in _JSON_KINDS:
        out += (_JSON, _dump(_without_cache_control(part)))
    else:
        _media(part, out)


def _nested(part: dict[str, Any], field: str, out: _Stream) -> None:
    head = {key: value for key, value in part.items() if key not in (field, "cache_control")}
    out += (_BLOCK, _dump(head))
    content = part.get(field)
    if isinstance(content, list):
        for inner in content:  # a tool's answer: text and images, never a tool's answer again
            if isinstance(inner, dict) and inner.get("type") in _NESTED_KINDS:
                out += (_JSON, _dump(inner))
            else:
                _part(inner, out)
            if len(out) > MAX_PIECES:
                break
    else:
        _content(content, out)
    out.append(_BLOCK_END)


def _media(part: object, out: _Stream) -> None:
    if isinstance(part, dict):
        part = _without_cache_control(part)
    digest = xxhash.xxh3_128_digest(_dump(part))
    out.media += 1
    weighed = out.media <= MAX_WEIGHED_MEDIA
    out += (_MEDIA, digest * (MEDIA_BYTES // len(digest)) if weighed else digest)


def _items(items: object, out: _Stream) -> None:
    """Write the input of the Responses API: a text, or messages and other items."""
    if isinstance(items, str):
        _message({"role": "user", "content": items}, out)
    elif isinstance(items, list):
        for item in items:
            if isinstance(item, dict) and "role" not in item:
                _part(item, out)
            else:
                _message(item, out)
            if len(out) > MAX_PIECES:
                break
    elif items is not None:
        out += (_JSON, _dump(items))


def _texts(data: dict[str, Any], out: _Stream) -> None:
    """Write a request without messages. What grows (`prompt`) comes last and stays open."""
    _options(data, _TEXT_OPTIONS, out)
    for name, value in data.items():
        if name.startswith("file:"):  # a form's upload, already a digest
            _media(value, out)
    for name in _TEXT_FIELDS:
        value = data.get(name)
        if value is not None:
            out += (_FIELD, name.encode())
            _prompt(value, out)


def _prompt(value: object, out: _Stream) -> None:
    if isinstance(value, str):
        out += (_TEXT, value.encode())
    elif isinstance(value, list) and value:
        if all(isinstance(text, str) for text in value):
            for text in islice(value, MAX_PIECES):
                out += (_TEXT, text.encode())
        else:
            out += _token_ids(value) or (_JSON, _dump(value))
    else:
        out += (_JSON, _dump(value))


def _token_ids(value: list[Any]) -> tuple[bytes, ...] | None:
    """Return a list of token ids (or several) as 32-bit words; None if it is no such thing.

    All lists but the last are preceded by their length, so that the last can grow.
    """
    lists = value[:MAX_ID_LISTS] if isinstance(value[0], list) else [value]
    try:
        words = [array("I", ids) for ids in lists]
    except (TypeError, OverflowError):
        return None
    if len(words) == 1:
        return (_IDS, words[0].tobytes())
    sizes = array("I", [len(words)]).tobytes()
    head = b"".join(array("I", [len(ids)]).tobytes() + ids.tobytes() for ids in words[:-1])
    return (_ID_LISTS, sizes, head, words[-1].tobytes())


def _is_billing(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    text = part.get("text")
    return isinstance(text, str) and text.startswith(_BILLING)


def _uncached(tools: object) -> object:
    """Drop cache markers: they move from turn to turn and no template shows them."""
    if isinstance(tools, list) and any("cache_control" in t for t in tools if isinstance(t, dict)):
        return [_without_cache_control(t) if isinstance(t, dict) else t for t in tools]
    return tools


def _without_cache_control(part: dict[str, Any]) -> dict[str, Any]:
    if "cache_control" not in part:
        return part
    return {key: value for key, value in part.items() if key != "cache_control"}


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # nested deeper than orjson writes (it reads 1,024 levels, writes 254)
        return b"deep " + xxhash.xxh3_128_hexdigest(marshal.dumps(value, 2)).encode()
