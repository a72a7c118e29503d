"""Chat messages in the form in which vLLM's renderer hands them to a template.

vLLM validates a message, keeps the fields it knows in its own order, flattens or wraps content and
reads tool arguments as objects; a template may print any of it, so all of it is followed to the
letter (vLLM 0.32, `renderers/chat_utils.py`). What is not text raises `Unrenderable`. Must never
change the message it is given.
"""

import json  # noqa: TID251 - Python's reading of tool arguments: NaN, Infinity, long integers
from typing import Any, Final


class Unrenderable(Exception):
    """The template, or what we know of the engine's way with it, does not cover this request."""


BILLING_HEADER: Final = "x-anthropic-billing-header"
"""Claude Code's first line differs in every request; vLLM drops it from system prompts."""

_TEXT_FIELD: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MAY_BE_NULL: Final = frozenset({"text", "refusal"})
# Fields of content parts that vLLM knows; any other one of a text part stays on it.
_PART_FIELDS: Final = frozenset(
    (
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil"),
        *("image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text"),
        *("thinking", "type", "uuid", "video_embeds", "video_url"),
    )
)
_CALL_FIELDS: Final = ("id", "function", "type")
_FUNCTION_FIELDS: Final = ("arguments", "name")


def shown(message: object, *, parts: bool, ordered: bool = True) -> dict[str, Any]:
    """Return a message as templates see it.

    `parts` = content stays a list of parts (vLLM's format "openai"), else it is one string.
    `ordered` = the request went through the chat API's validation, which orders tool calls' fields.

    Raises:
        Unrenderable: it is no message, or holds more than text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unrenderable("a message is no object with a role")
    role = message["role"]
    content = _content(role, message.get("content"), parts=parts)
    result: dict[str, Any] = {"role": role, "content": content}
    if len(message) == 2 and "content" in message and role not in ("tool", "developer"):
        return result
    if role == "assistant":
        _assistant(message, result, ordered=ordered)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            result["content"] = "\n".join(part["text"] for part in content)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _content(role: str, content: object, *, parts: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str) and not (role == "system" and content.startswith(BILLING_HEADER)):
        return [{"type": "text", "text": content}] if parts else content
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Unrenderable("content of an unknown kind")
    if role == "system":
        content = _without_billing(content)
    found = [shown for part in content if (shown := _part(part)) is not None]
    if parts:
        return found
    return "\n".join(text for part in found if (text := part.get("text", part.get("name"))))


def _part(part: object) -> dict[str, Any] | None:
    """Return a part of the content as templates see it; None = it is left out."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or part.get("uuid") is not None:
        raise Unrenderable("a content part without type, or with an id of its own")
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    field = _TEXT_FIELD.get(kind)
    text = None if field is None else part.get(field)
    if text is None and kind in _MAY_BE_NULL:
        return None
    if not isinstance(text, str):
        raise Unrenderable("content that is no text")
    if len(part) == 2:
        return {"type": "text", "text": text}
    extras = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    return {"type": "text", "text": text, **extras}


def _without_billing(content: list[Any]) -> list[Any]:
    """Drop the first line of system texts that open with the billing header."""
    kept: list[Any] = []
    for part in content:
        text = part
        if isinstance(part, dict):
            text = part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _assistant(message: dict[str, Any], result: dict[str, Any], *, ordered: bool) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Unrenderable("tool calls that are no list")
        result["tool_calls"] = [_tool_call(call, ordered=ordered) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None and ordered:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: object, *, ordered: bool) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates print them as JSON."""
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise Unrenderable("a tool call of an unknown kind")
    function = call.get("function")
    if not isinstance(function, dict):
        raise Unrenderable("a tool call without function")
    function = {**function, "arguments": _arguments(function.get("arguments"))}
    call = {**call, "function": function}
    if not ordered:
        return call
    call["function"] = _in_order(function, _FUNCTION_FIELDS)
    return _in_order(call, _CALL_FIELDS)


def _arguments(given: object) -> dict[str, Any]:
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return {}
        except RecursionError:
            raise Unrenderable("tool arguments nested too deeply") from None
    return given if isinstance(given, dict) else {}


def _in_order(value: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    known = {field: value[field] for field in fields if field in value}
    return known | value
