"""`/v1/messages` as a chat request: the conversion of vLLM 0.32 (`entrypoints/anthropic`).

Must never guess: images, tools that change within the conversation and what vLLM fills in at random
raise `Unrenderable`.
"""

from typing import Any

from gateway.prompt.messages import BILLING_HEADER, Unrenderable

_LEFT_OUT = frozenset({"redacted_thinking", "tool_reference"})


def as_chat(data: dict[str, Any], *, merges_system: bool, disabled_effort: str) -> dict[str, Any]:
    """Return the chat request that vLLM makes of the body.

    `merges_system` = the template takes a system message at the start only: all are moved there.

    Raises:
        Unrenderable: it holds what is not covered.
    """
    given = data.get("messages")
    if not isinstance(given, list):
        raise Unrenderable("no messages")
    messages: list[dict[str, Any]] = []
    system = _system(data.get("system"), given if merges_system else [])
    if system:
        messages.append({"role": "system", "content": system})
    for message in given:
        _message(message, messages, merges_system=merges_system)
    chat: dict[str, Any] = {
        "messages": messages,
        "chat_template_kwargs": data.get("chat_template_kwargs"),
    }
    effort = _effort(data, disabled_effort)
    if effort is not None:
        chat["reasoning_effort"] = effort
    if data.get("tools"):
        chat["tools"] = [_tool(tool) for tool in data["tools"]]
    return chat


def _system(system: object, inline: list[Any]) -> str:
    texts = [system] if isinstance(system, str) else _system_texts(system or [])
    for message in inline:
        if isinstance(message, dict) and message.get("role") == "system":
            texts += _inline_texts(message.get("content"))
    return "".join(texts)


def _inline_texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [] if content.startswith(BILLING_HEADER) else [content]
    return _system_texts(content)


def _system_texts(blocks: object) -> list[str]:
    if not isinstance(blocks, list):
        raise Unrenderable("a system prompt of an unknown kind")
    texts = []
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") in ("tool_addition", "tool_removal"):
            raise Unrenderable("a system block that changes the tools")
        text = block.get("text")
        if block.get("type") == "text" and text:
            if not isinstance(text, str):
                raise Unrenderable("a text block without text")
            if not text.startswith(BILLING_HEADER):
                texts.append(text)
    return texts


def _message(message: object, out: list[dict[str, Any]], *, merges_system: bool) -> None:
    if not isinstance(message, dict):
        raise Unrenderable("a message is no object")
    role, content = message.get("role"), message.get("content")
    if role == "system":
        if not merges_system and (text := "".join(_inline_texts(content))):
            out.append({"role": "system", "content": text})
        return
    if role not in ("user", "assistant"):
        raise Unrenderable("a role that /v1/messages does not have")
    if isinstance(content, str):
        out.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise Unrenderable("content of an unknown kind")
    made = _made(role, content, out)
    if role == "assistant" or "content" in made:
        out.append(made)


def _made(role: str, blocks: list[Any], out: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a list of blocks; tool results in it go out before it."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        _block(block, role, (texts, calls, thoughts), out)
    made: dict[str, Any] = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if len(texts) == 1:
        made["content"] = texts[0]
    elif texts:
        made["content"] = [{"type": "text", "text": text} for text in texts]
    return made


def _block(
    block: object,
    role: str,
    made: tuple[list[str], list[dict[str, Any]], list[str]],
    out: list[dict[str, Any]],
) -> None:
    if not isinstance(block, dict):
        raise Unrenderable("a block is no object")
    texts, calls, thoughts = made
    kind = block.get("type")
    if kind == "text":
        if text := _string(block.get("text") or ""):
            texts.append(text)
    elif kind == "thinking":
        if block.get("thinking") is not None:
            thoughts.append(_string(block["thinking"]))
    elif kind == "tool_use":
        calls.append(_tool_call(block))
    elif kind == "tool_result" and role == "user":
        out.append(
            {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id") or "",
                "content": _result_text(block.get("content")),
            }
        )
    elif kind not in _LEFT_OUT:
        raise Unrenderable("a block that is no text")


def _string(text: object) -> str:
    if not isinstance(text, str):
        raise Unrenderable("a text that is none")
    return text


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input") or {}
    if not block.get("id") or not isinstance(given, dict):
        raise Unrenderable("a tool call without id: the engine makes one up")
    function = {"name": block.get("name") or "", "arguments": given}
    return {"id": block["id"], "type": "function", "function": function}


def _result_text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Unrenderable("a tool result of an unknown kind")
    texts = []
    for item in content:
        if not isinstance(item, dict):
            continue
        if item.get("type") in ("image", "tool_reference"):
            raise Unrenderable("a tool result that is no text")
        if item.get("type") == "text":
            texts.append(_string(item.get("text", "")))
    return "\n".join(texts)


def _effort(data: dict[str, Any], disabled_effort: str) -> object:
    thinking, config = data.get("thinking"), data.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return disabled_effort
    return config.get("effort") if isinstance(config, dict) else None


def _tool(tool: object) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(schema, dict):
        raise Unrenderable("a tool of an unknown kind")
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema,
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
