"""How much a template would have to do: rendering holds the interpreter, so there is a bound on it.

Must cost next to nothing beside the rendering that it may save.
"""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.prompt.messages import Unrenderable

MAX_TEXT_CHARS: Final = 1024 * 1024
"""Longer prompts are chained by bytes: encoding one would hold the caller up for half a second."""

MAX_WEIGHT: Final = 2_000
"""In messages of some 20 us each: a request holds the loop up for 40 ms at most, 0.1 s with odd templates."""

MAX_MESSAGES: Final = 10_000
"""Of a conversation that is known but for its end: looking each up takes some 2 us."""

_CALL: Final = 2  # a call is taken apart and printed as JSON
_PARTS: Final = 8  # content parts that cost what a message does
_FIELDS: Final = 8  # fields of tools and arguments, printed as JSON, indented at worst


def check_amount(messages: Sequence[Any], tools: object = None) -> None:
    """Pass what can be rendered within bounds; `tools` where they are to be rendered as well.

    Raises:
        Unrenderable: it is too much.
    """
    weight, chars = len(messages), 0
    if weight <= MAX_WEIGHT:
        for message in messages:
            if not isinstance(message, dict):
                continue
            content = message.get("content")
            if isinstance(content, str):
                chars += len(content)
            elif isinstance(content, list):
                weight += len(content) // _PARTS
            if calls := message.get("tool_calls"):
                weight += _calls(calls)
        if tools:
            weight += _fields(tools)
    if weight > MAX_WEIGHT or chars > MAX_TEXT_CHARS:
        raise Unrenderable("too much to render here")


def _calls(calls: object) -> int:
    if not isinstance(calls, list):
        return 0
    fields = 0
    for call in calls[:MAX_WEIGHT]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (arguments := function.get("arguments")):
            fields += _fields(arguments)
    return _CALL * len(calls) + fields


def _fields(given: object) -> int:
    """Return the weight of what is printed as JSON, by its colons and commas."""
    try:
        text = orjson.dumps(given)
    except TypeError:
        raise Unrenderable("nested too deeply") from None
    return (text.count(b":") + text.count(b",")) // _FIELDS // 2
