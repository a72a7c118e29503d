"""How each API writes a tool call that begins, a whole answer, and the message the next turn sends.

Shapes only. What is none raises LookupError, TypeError or AttributeError: core/answer.py knows what
that means. Must never look at bytes or hash anything.
"""

from typing import Any, Final

import orjson

from gateway.core.types import Api

THINK: Final = "<think>"
OPENING: Final = 64
"""Reasoning that is part of the text shows within so many characters."""


def begun_calls(api: Api, event: dict[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
    """Return the tool calls that begin in an event, each with the start of its arguments as JSON."""
    if api is Api.MESSAGES:
        block = event.get("content_block")
        if not isinstance(block, dict) or block.get("type") != "tool_use":
            return []
        return [({"id": block["id"], "name": block["name"]}, b"")]
    begun = []
    for choice in event["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                head = {"id": call.get("id"), "name": function["name"]}
                start = orjson.dumps(function.get("arguments") or "")[1:-1]
                begun.append((head, start))
    return begun


def tool_call(api: Api, head: dict[str, Any], arguments: str) -> dict[str, Any] | None:
    """Return a finished call as the next turn sends it; None where its arguments are no JSON."""
    if api is Api.CHAT:
        function = {"name": head["name"], "arguments": arguments}
        return {"id": head["id"], "type": "function", "function": function}
    try:
        given = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return None
    return {"type": "tool_use", "id": head["id"], "name": head["name"], "input": given}


def as_messages(api: Api, text: str, calls: list[Any]) -> list[Any]:
    """Return the message that repeats an answer."""
    if api is Api.CHAT:
        message = {"role": "assistant", "content": text or None}
        return [message | {"tool_calls": calls} if calls else message]
    parts: list[Any] = [{"type": "text", "text": text}] if text else []
    return [{"role": "assistant", "content": parts + calls}]


def whole_items(api: Api, answer: dict[str, Any]) -> "list[Any] | str | None":
    """Return what the next turn sends of a whole answer; None where it reasons."""
    if api is Api.COMPLETIONS:
        text = answer["choices"][0]["text"]
        return text if isinstance(text, str) and text else None
    if api is Api.MESSAGES:
        parts = answer["content"]
        plain = all(part["type"] in ("text", "tool_use") for part in parts)
        return [{"role": "assistant", "content": parts}] if parts and plain else None
    if api is Api.RESPONSES:
        items: list[Any] = answer["output"]
        return items if all(item["type"] != "reasoning" for item in items) else None
    message = answer["choices"][0]["message"]
    if message.get("reasoning") or message.get("reasoning_content"):
        return None
    content = message.get("content")
    if isinstance(content, str) and THINK in content[:OPENING]:
        return None
    return as_messages(api, content or "", message.get("tool_calls") or [])
