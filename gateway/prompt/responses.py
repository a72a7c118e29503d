"""`/v1/responses` as a chat request: the conversion of vLLM 0.32 (`entrypoints/openai/responses`).

Only requests that bring their whole history: what the engine remembers of earlier ones is not
known here. Must never guess: everything but text, function calls and their outputs raises
`Unrenderable`.
"""

from typing import Any, Final

from gateway.prompt.messages import Unrenderable

_REMEMBERED: Final = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
_OPEN: Final = ("in_progress", "incomplete")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")


def as_chat(data: dict[str, Any]) -> dict[str, Any]:
    """Return the chat request that vLLM makes of the body.

    Raises:
        Unrenderable: it holds what is not covered.
    """
    if any(data.get(field) is not None for field in _REMEMBERED):
        raise Unrenderable("a request that builds on what the engine remembers")
    if data.get("truncation") not in (None, "disabled"):
        raise Unrenderable("a prompt that the engine may cut")
    messages: list[dict[str, Any]] = []
    if instructions := data.get("instructions"):
        messages.append({"role": "system", "content": _string(instructions)})
    given = data.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        for item in given:
            _item(item, messages)
    else:
        raise Unrenderable("no input")
    chat: dict[str, Any] = {
        "messages": messages,
        "chat_template_kwargs": data.get("chat_template_kwargs"),
    }
    reasoning = data.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if data.get("tools"):
        chat["tools"] = [_tool(tool) for tool in data["tools"]]
    return chat


def _item(item: object, out: list[dict[str, Any]]) -> None:
    if not isinstance(item, dict) or item.get("status") in _OPEN:
        raise Unrenderable("an item that is no object, or not finished")
    kind = item.get("type", "message")
    if kind == "message":
        _message(item, out)
    elif kind == "function_call":
        _call(item, out)
    elif kind == "reasoning":
        _extend(out, "reasoning", _thought(item))
    elif kind == "function_call_output":
        out.append(
            {
                "role": "tool",
                "content": item.get("output"),
                "tool_call_id": item.get("call_id"),
            }
        )
    else:
        raise Unrenderable("an item of an unknown kind")


def _message(item: dict[str, Any], out: list[dict[str, Any]]) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = content[0].get("text")
        _extend(out, "content", _string(content))
    elif role in ("user", "system", "developer"):
        out.append({"role": role, "content": content})
    else:
        raise Unrenderable("a role that the API does not have")


def _extend(out: list[dict[str, Any]], field: str, text: str) -> None:
    """Give the assistant's message a field it lacks yet, or begin another one."""
    last = out[-1] if out else None
    if last is not None and last["role"] == "assistant" and last.get(field) is None:
        last[field] = text
    else:
        out.append({"role": "assistant", field: text})


def _call(item: dict[str, Any], out: list[dict[str, Any]]) -> None:
    if item.get("namespace"):
        raise Unrenderable("a function of a namespace")
    function = {"name": _string(item.get("name")), "arguments": _string(item.get("arguments"))}
    call = {"id": item.get("call_id"), "function": function, "type": "function"}
    last = out[-1] if out else None
    if last is not None and last["role"] == "assistant":
        last.setdefault("tool_calls", []).append(call)
    else:
        out.append({"role": "assistant", "tool_calls": [call]})


def _thought(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Unrenderable("encrypted reasoning")
    parts = item.get("content") or item.get("summary") or [{"text": ""}]
    if not isinstance(parts, list) or not isinstance(parts[0], dict):
        raise Unrenderable("reasoning of an unknown kind")
    return _string(parts[0].get("text"))


def _string(text: object) -> str:
    if not isinstance(text, str):
        raise Unrenderable("a text that is none")
    return text


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Unrenderable("a tool that is no function")
    return {
        "type": "function",
        "function": {field: tool.get(field) for field in _FUNCTION_FIELDS},
    }
