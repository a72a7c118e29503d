"""What a chat template is tried with: synthetic conversations, texts, and its own words.

The same at every start, so that what is proven is, too. Must never be taken for all there can be:
`separate.py` says what follows from it.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from jinja2 import nodes

from gateway.prompt.frames import assistant, calling, system, tool, user

_WORDS: Final = ("alpha", "beta ", " gamma", "\n", "{x}", "<b>", "é", "日本", "  ", "1.", "`", "##")
PLAIN_TEXTS: Final = (
    *("A", " a ", "\n\nb\n\n", "\tc\r\n", "{{ d }} {% e %} {# f #}", "<g>&amp;\"'</g>", "é日本🙂"),
    *("", "\\n", "\u00a0h\u2003", "1. i\n\n```\nj\n```\n", "</s> <|k|> [L]", "m" * 300),
)
_MIN_TRIGGER: Final = 2
_SEARCHES: Final = frozenset({"startswith", "endswith", "find", "rfind", "index", "count"})


def conversations(count: int, *, tools: bool) -> list[list[dict[str, Any]]]:
    """Return synthetic conversations; the first ones have every kind of message."""
    rng = random.Random(7)  # noqa: S311 - the same ones at every start
    return [_conversation(rng, full=number < 4, tools=tools) for number in range(count)]


def _conversation(rng: random.Random, *, full: bool, tools: bool) -> list[dict[str, Any]]:
    messages = [system(_text(rng))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(2, 4)):
        messages.append(user(_text(rng)))
        for _ in range(rng.randint(0, 2) if tools or full else 0):
            names = ("f", "probe")[: rng.randint(1, 2)]
            call = calling(*names, text=rng.choice(("", _text(rng))))
            if rng.random() < 0.3:
                call["reasoning"] = _text(rng)
            messages += [call, *(tool(_text(rng), number) for number in range(len(names)))]
        answer = assistant(_text(rng))
        if rng.random() < 0.3:
            answer["reasoning"] = _text(rng)
        messages.append(answer)
    return _ended(rng, messages)


def _ended(rng: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages up to where a request would end: with a question or a result."""
    if rng.random() < 0.5:
        return [*messages, user(_text(rng))]
    while messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def _text(rng: random.Random) -> str:
    text = "".join(rng.choice(_WORDS) + rng.choice((" ", "")) for _ in range(rng.randint(1, 8)))
    return text if text.strip() else "word" + text


def triggers(tree: nodes.Template) -> tuple[set[str], set[str], set[str]]:
    """Return the words a template's source looks for in texts; those at their start; at their end."""
    found: dict[str, set[str]] = {"": set(), "startswith": set(), "endswith": set()}
    for compare in tree.find_all(nodes.Compare):
        _collect(_searched(compare), found[""])
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            _collect(call.args, found[""])
            _collect(call.args, found.get(call.node.attr, set()))
    return found[""], found["startswith"], found["endswith"]


def _collect(places: Sequence[nodes.Expr], words: set[str]) -> None:
    for place in places:
        for constant in (place, *place.find_all(nodes.Const)):
            value = constant.value if isinstance(constant, nodes.Const) else None
            if isinstance(value, str) and len(value.strip()) >= _MIN_TRIGGER:
                words.add(value)


def _searched(node: nodes.Compare) -> list[nodes.Expr]:
    """Return what is looked for: `word in text`, or `content == word`."""
    places: list[nodes.Expr] = []
    for operand in node.ops:
        if operand.op in ("in", "notin"):
            places.append(node.expr)
        elif _about_content(node.expr) or _about_content(operand.expr):
            places += [node.expr, operand.expr]
    return places


def _about_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return "content" in node.name
    if isinstance(node, nodes.Getattr):
        return "content" in node.attr
    return isinstance(node, nodes.Getitem) and (
        isinstance(node.arg, nodes.Const) and "content" in str(node.arg.value)
    )


def with_text(text: str) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with a text in every place it can have."""
    yield [system(text), user("q"), assistant("a"), user(text), assistant("c"), user("d")]
    yield [user("q"), assistant(text, reasoning="why"), user(text)]
    thought = {**calling("f"), "reasoning": "why"}
    yield [user("q"), thought, tool("r"), assistant("a"), user(text), calling("f"), tool("r")]
    yield [user("q"), calling("f", text=text), tool(text), assistant(text), user("b")]
    yield [user("q"), calling("f", text=text), tool(text), calling("f"), tool("r")]
