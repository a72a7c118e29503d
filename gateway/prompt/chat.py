"""A request as a conversation to render: what vLLM makes of its body before any template runs.

Each API's way there is vLLM 0.32's; `/v1/messages` and `/v1/responses` become chat messages in
modules of their own. Must never guess: what is not covered raises `Unrenderable`.
"""

from dataclasses import dataclass
from typing import Any, Final

from gateway.core.request import ParsedRequest
from gateway.core.types import Api
from gateway.prompt import anthropic, responses
from gateway.prompt.messages import Unrenderable

_FUNCTION_FIELDS: Final = ("name", "description", "parameters")
_OPTIONAL_FUNCTION_FIELDS: Final = ("strict", "defer_loading")
# Arguments of the call that renders, not variables of the template; vLLM refuses or misreads them.
_RESERVED: Final = frozenset(
    {
        *("chat_template", "tokenize", "conversation", "messages", "tools", "padding", "self"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    }
)
_CUTS: Final = ("truncate_prompt_tokens", "prompt_embeds")
_CHAT_APIS: Final = frozenset({Api.CHAT, Api.TOKENIZE})
_MESSAGES_APIS: Final = frozenset({Api.MESSAGES, Api.COUNT_TOKENS})
_UNSET: Final = (None, "auto")


@dataclass(slots=True)
class Conversation:
    """What is rendered: messages of the chat API, dumped tools, and the template's variables.

    `ordered` = the messages pass the chat API's validation (see `messages.shown`).
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continued: bool = False
    ordered: bool = True


def conversation(
    request: ParsedRequest, *, merges_system: bool = False, disabled_effort: str = "none"
) -> Conversation:
    """Return the conversation of a request of a chat API.

    `merges_system` and `disabled_effort` are what the model's template makes vLLM do with
    `/v1/messages` (see `ChatTemplate`).

    Raises:
        Unrenderable: media, a template of the client's own, or what vLLM would do is not known.
    """
    try:
        return _conversation(request, merges_system, disabled_effort)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # A client may put anything anywhere; it is for the engine to refuse it.
        raise Unrenderable(f"a body of an odd shape: {type(error).__name__}") from None


def _conversation(
    request: ParsedRequest, merges_system: bool, disabled_effort: str
) -> Conversation:
    data = request.data
    if any(data.get(field) is not None for field in _CUTS) or data.get("chat_template"):
        raise Unrenderable("the client cuts the prompt or brings its own template")
    if request.api in _CHAT_APIS:
        return _chat(data, data.get("messages"), data.get("tools"))
    if request.api in _MESSAGES_APIS:
        chat = anthropic.as_chat(data, merges_system=merges_system, disabled_effort=disabled_effort)
        return _chat(chat, chat["messages"], chat.get("tools"))
    if request.api is Api.RESPONSES:
        chat = responses.as_chat(data)
        found = _chat(chat, chat["messages"], chat.get("tools"))
        found.ordered = False
        return found
    raise Unrenderable("no conversation")


def _chat(data: dict[str, Any], messages: object, tools: object) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise Unrenderable("no messages")
    if tools is not None and not isinstance(tools, list):
        raise Unrenderable("tools that are no list")
    continued = bool(data.get("continue_final_message", False))
    generation = data.get("add_generation_prompt", True)
    if continued and generation:
        raise Unrenderable("an open last message and a generation prompt")
    return Conversation(
        messages,
        [_tool(tool) for tool in tools] if tools else None,
        _variables(data, generation=generation),
        continued,
    )


def _variables(data: dict[str, Any], *, generation: object) -> dict[str, Any]:
    given = data.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not _RESERVED.isdisjoint(given):
        raise Unrenderable("odd template options")
    own: dict[str, Any] = {"add_generation_prompt": generation, "documents": data.get("documents")}
    effort = data.get("reasoning_effort")
    if effort is not None:
        own["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            own["enable_thinking"] = effort != "none"
    found = {key: value for key, value in given.items() if value not in _UNSET}
    return found | {key: value for key, value in own.items() if value not in _UNSET}


def _tool(tool: object) -> dict[str, Any]:
    """Return a tool as vLLM's model of it dumps: its own fields in order, and no other."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise Unrenderable("a tool of an unknown kind")
    shown = {field: function.get(field) for field in _FUNCTION_FIELDS}
    deferred = tool.get("defer_loading")
    for field in _OPTIONAL_FUNCTION_FIELDS:
        value = function.get(field)
        if value is None and field == "defer_loading":
            value = deferred
        if value is not None:
            shown[field] = value
    result: dict[str, Any] = {"type": tool.get("type", "function"), "function": shown}
    if deferred is not None:
        result["defer_loading"] = deferred
    return result
