"""A model's chat template, rendered as vLLM (through transformers) renders it.

Templates are programs from the model's publisher: they run in jinja2's immutable sandbox. What
cannot be rendered raises `Unrenderable`; the caller then falls back to byte blocks. Must never
guess: a prompt that differs from the engine's by one token has no exact prefix.
"""

import json  # noqa: TID251 - `tojson` must write Python's separators, as transformers does
from datetime import UTC, datetime
from typing import Any, Final

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARK: Final = "radixgate-content-probe"
_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text"})
_FUNCTION_FIELDS: Final = ("name", "description", "parameters")


class Unrenderable(Exception):
    """The template, or what we know of the engine's way with it, does not cover this request."""


class _Generation(Extension):
    """`{% generation %}`: marks training targets; when serving, its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `specials` are `bos_token` and its kin, as templates name them."""

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise Unrenderable(f"the chat template does not compile: {error}") from None
        self._specials = specials
        self._reads_parts = self._probe()

    def render(self, data: dict[str, Any]) -> str:
        """Return the prompt text of a chat request's body.

        Raises:
            Unrenderable: media, a template of the client's own, or a template that fails.
        """
        if data.get("chat_template") or data.get("continue_final_message"):
            raise Unrenderable("the client brings its own template or an open last message")
        messages = _list(data.get("messages"))
        tools = _list(data.get("tools"))
        options = data.get("chat_template_kwargs") or {}
        if not messages or not isinstance(options, dict):
            raise Unrenderable("no messages, or odd template options")
        values: dict[str, Any] = {
            "messages": [_message(message, parts=self._reads_parts) for message in messages],
            "tools": [_tool(tool) for tool in tools] or None,
            "documents": data.get("documents"),
            "add_generation_prompt": data.get("add_generation_prompt", True),
        }
        if data.get("reasoning_effort") is not None:
            values["reasoning_effort"] = data["reasoning_effort"]
        return self._run({**self._specials, **values, **options})

    def _run(self, values: dict[str, Any]) -> str:
        try:
            return self._template.render(**values)
        except Exception as error:  # noqa: BLE001 - a template is somebody's program
            raise Unrenderable(f"the chat template failed: {type(error).__name__}") from None

    def _probe(self) -> bool:
        """Return whether the template reads content parts (vLLM then passes them on as parts)."""
        message = {"role": "user", "content": [{"type": "text", "text": _MARK}]}
        values = {**self._specials, "messages": [message], "add_generation_prompt": False}
        try:
            text = self._run(values)
        except Unrenderable:
            return False
        return _MARK in text and "'text'" not in text and '"text"' not in text


def _list(value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Unrenderable("a field that should be a list is none")
    return value


def _message(message: object, *, parts: bool) -> dict[str, Any]:
    """Return a message with the fields and the forms that vLLM hands to templates."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unrenderable("a message is no object with a role")
    role = message["role"]
    texts = _texts(message.get("content"))
    content = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    shown: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if role == "assistant":
        calls = [_tool_call(call) for call in _list(message.get("tool_calls"))]
        if calls:
            shown["tool_calls"] = calls
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            shown["reasoning"] = shown["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    return shown


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Unrenderable("content of an unknown kind")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (
            isinstance(part, dict) and part.get("type", "text") not in _TEXT_KINDS
        ):
            raise Unrenderable("content that is no text")
        texts.append(text)
    return texts


def _tool_call(call: object) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates print them as JSON."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Unrenderable("a tool call of an unknown kind")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = orjson.loads(arguments) if arguments else {}
        except orjson.JSONDecodeError:
            raise Unrenderable("tool arguments are no JSON") from None
    return {**call, "function": function}


def _tool(tool: object) -> dict[str, Any]:
    """Return a tool as vLLM's own model of it prints: its fields in order, then the rest."""
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise Unrenderable("a tool of an unknown kind")
    function = tool["function"]
    ordered = {field: function.get(field) for field in _FUNCTION_FIELDS}
    shown: dict[str, Any] = {"type": "function", "function": None, **tool}
    shown["function"] = {**ordered, **function}
    return shown


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).astimezone().strftime(pattern)
