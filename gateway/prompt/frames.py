"""Parts of a conversation rendered by themselves, between stand-ins for what is around them.

A template is a program over all messages; rendering a long conversation takes milliseconds. Where
it treats messages one by one, a part's text can be had from a few messages: stand-ins before (the context), the part, stand-ins after (the tail). What the stand-ins add is constant; it is
checked at both ends of every rendering and taken off. Whether the rest is what the whole conversation
would have there is proven per template (`separate.py`), never assumed. A part begins at a special
token, so that its token ids do not depend on what precedes it.

A `Frame` is the template under one set of options. The *phase* of a part is open as long as no user
message follows it: templates drop the reasoning of earlier turns.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from gateway.prompt.messages import Unrenderable, shown

Kind = tuple[str, str]
"""A cut: the role of the message before it and of the one after it."""

KINDS: Final[tuple[Kind, ...]] = (
    ("system", "user"),
    ("user", "assistant"),
    ("tool", "assistant"),
    ("assistant", "user"),
    ("tool", "user"),
)
FINAL: Final = ""
"""The tail of a part that ends the conversation: nothing, or the generation prompt."""

Tools = list[dict[str, Any]] | None
Run = Callable[[list[dict[str, Any]], Tools], str]
"""Renders messages (as templates see them) with tools, under a frame's options."""


def user(text: str) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    """Return an answer."""
    return {"role": "assistant", "content": text, **fields}


def calling(*names: str, text: str = "") -> dict[str, Any]:
    """Return an answer that calls functions; ids have the nine characters Mistral's need."""
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": '{"a": "b"}'},
        }
        for number, name in enumerate(names)
    ]
    return assistant(text, tool_calls=calls)


def tool(text: str, number: int = 0) -> dict[str, Any]:
    """Return a function's result."""
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


def system(text: str) -> dict[str, Any]:
    """Return a system prompt."""
    return {"role": "system", "content": text}


def function(name: str, description: str) -> dict[str, Any]:
    """Return a tool."""
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS: Final = [function("probe", "A stand-in.")]
"""Stands in for a request's tools wherever its real ones have been rendered already."""

OTHER_TOOLS: Final = [function("f", "Does it."), function("g", "Does\nmore")]
"""Tools that have nothing in common with those."""

_CONTEXT: Final = {
    "system": [system("S0.")],
    "user": [user("U0.")],
    "assistant": [user("U0."), assistant("A0.")],
    "tool": [user("U0."), calling("probe"), tool("T0.")],
}
_MARK: Final = "Zq."
_TAIL: Final = {
    FINAL: [],
    "assistant": [assistant(_MARK)],
    "assistant closed": [assistant(_MARK), user("U1.")],
    "user closed": [user(_MARK)],
}


def tail_name(following: str | None, *, closed: bool) -> str:
    """Return the tail for a part that a message of this role follows (None: nothing does)."""
    if following is None:
        return FINAL
    return f"{following} closed" if closed else following


class Shape(NamedTuple):
    """A part that is always an opening and the message's text, stripped or as it is."""

    opening: str
    strips: bool

    def text(self, content: str) -> str:
        """Return the part of a message with this content."""
        return self.opening + (content.strip() if self.strips else content)


class Frame:
    """A template under one set of options. `cuts` has each possible kind's opening text."""

    def __init__(self, run: Run, *, parts: bool, tools: bool) -> None:
        self._render = run
        self._tools: Tools = TOOLS if tools else None
        self._context = {role: _shown(messages, parts=parts) for role, messages in _CONTEXT.items()}
        self._tail = {name: _shown(messages, parts=parts) for name, messages in _TAIL.items()}
        self._marked = {
            role: _shown([{"role": role, "content": _MARK}], parts=parts)
            for role in ("user", "assistant")
        }
        self._parts = parts
        self._starts: dict[tuple[Kind, str], str] = {}
        self._ends: dict[tuple[str, str], str] = {}
        self.cuts: dict[Kind, str] = {}
        self.proven: frozenset[Kind] = frozenset()
        """The kinds of cuts that may be used."""
        self.calls = True
        """Whether they may be used where functions are called."""
        self.shapes: dict[Kind, Shape] = {}
        """How a message of nothing but text is rendered where it needs no rendering."""
        self.sensitive = True
        """Whether plain messages are rendered differently once another user message follows."""

    def find_cuts(self, tokens: Sequence[str]) -> dict[Kind, str]:
        """Return the kinds of cuts there may be, each with what a message after it opens with.

        `tokens` are those before which text may be cut.
        """
        found = {kind: self._opening(kind, tokens) for kind in KINDS}
        return {kind: opening for kind, opening in found.items() if opening is not None}

    def anew(self) -> None:
        """Forget the stand-ins' text: a template that tells the date has another one now."""
        self._starts.clear()
        self._ends.clear()

    def part(
        self,
        messages: list[dict[str, Any]],
        before: str | None,
        following: str | None,
        *,
        closed: bool,
        tools: Tools = None,
    ) -> str:
        """Return the text of consecutive messages of a conversation, given as templates see them.

        `before` and `following` are the roles of the neighbours; None = there is none. `closed` =
        a user message follows, directly or later. `tools` = the request's, for the first part.

        Raises:
            Unrenderable: the template refuses, or the stand-ins' text is not where it should be.
        """
        tail = tail_name(following, closed=closed)
        context = [] if before is None else self._context[before]
        given = tools if before is None else self._tools
        text = self._render([*context, *messages, *self._tail[tail]], given)
        start = "" if before is None else self._start((before, messages[0]["role"]), tail)
        end = self.end(messages[-1]["role"], tail)
        if not text.startswith(start) or not text.endswith(end) or len(text) < len(start + end):
            raise Unrenderable("a part is not where its stand-ins are")
        return text[len(start) : len(text) - len(end)]

    def end(self, last: str, tail: str = FINAL) -> str:
        """Return what follows a part whose last message has this role: the tail's own text."""
        end = self._ends.get((last, tail))
        if end is None:
            end = self._ends[last, tail] = self._find_end(last, tail)
        return end

    def _start(self, kind: Kind, tail: str) -> str:
        """Return the context's text, up to where a part after it begins."""
        start = self._starts.get((kind, tail))
        if start is None:
            before, role = kind
            messages = [*self._context[before], *self._marked[role], *self._tail[tail]]
            text = self._render(messages, self._tools)
            start = self._starts[kind, tail] = text[: self._place(text, text.find(_MARK), kind)]
        return start

    def _find_end(self, last: str, tail: str) -> str:
        context = self._context[last]
        if tail != FINAL:
            role = tail.split(" ", maxsplit=1)[0]
            text = self._render([*context, *self._tail[tail]], self._tools)
            return text[self._place(text, text.find(_MARK), (last, role)) :]
        if last not in ("user", "tool"):
            raise Unrenderable("an answer that is to be continued")
        begun = self._render([*context, *self._tail["assistant"]], self._tools)
        begun = begun[: self._place(begun, begun.find(_MARK), (last, "assistant"))]
        text = self._render(context, self._tools)
        if not text.startswith(begun):
            raise Unrenderable("the last message is rendered differently")
        return text[len(begun) :]

    def _place(self, text: str, mark: int, kind: Kind) -> int:
        opening = self.cuts.get(kind)
        place = -1 if opening is None else text.rfind(opening, 0, mark)
        if place < 0:
            raise Unrenderable("no cut of this kind")
        return place

    def _opening(self, kind: Kind, tokens: Sequence[str]) -> str | None:
        """Return the longest text, from a special token on, that opens every message of a kind."""
        before, role = kind
        common: list[tuple[str, int]] = []
        lists = (self._tools, OTHER_TOOLS) if self._tools else (None,)
        for (context, mark), given in product(_contexts(before), lists):
            tried = [[*context, *after] for after in _afters(role)]
            texts = [text for messages in tried if (text := self._try(messages, given))]
            if len(texts) >= 2:
                shared = _common(texts)
                common.append((shared, shared.rfind(mark) + len(mark) if mark in shared else 0))
        if not common:
            return None
        shared, least = common[0]
        starts = sorted(_places(shared, least, tokens))
        openings = (shared[start:] for start in starts)
        return next((o for o in openings if all(s.endswith(o) for s, _ in common)), None)

    def _try(self, messages: list[dict[str, Any]], tools: Tools) -> str | None:
        try:
            return self._render(_shown(messages, parts=self._parts), tools)
        except Unrenderable:
            return None


def _shown(messages: Sequence[Any], *, parts: bool) -> list[dict[str, Any]]:
    return [shown(message, parts=parts) for message in messages]


def _contexts(before: str) -> list[tuple[list[dict[str, Any]], str]]:
    """Return conversations that end with a role, each with its last words."""
    if before == "tool":
        two = [user("U0."), calling("f", "g", text="x"), tool("R9.", 0), tool("Q8.", 1)]
        return [(_CONTEXT["tool"], "T0."), (two, "Q8.")]
    if before == "assistant":
        thought = [user("U0."), assistant("B7.", reasoning="why")]
        return [(_CONTEXT["assistant"], "A0."), (thought, "B7.")]
    if before == "user":
        return [(_CONTEXT["user"], "U0."), ([user("W6\nW6.")], "W6.")]
    return [(_CONTEXT["system"], "S0."), ([system("V5\nV5.")], "V5.")]


def _afters(role: str) -> list[list[dict[str, Any]]]:
    """Return openings of what may come next, as different as they can be."""
    if role == "user":
        return [[user("q")], [user("7z")], [user("q"), assistant("a"), user("b")]]
    return [
        [assistant("q")],
        [assistant("7z")],
        [calling("f")],
        [assistant("k", reasoning="why")],
        [assistant("q"), user("b")],
        [calling("f"), tool("r"), assistant("e"), user("b")],
    ]


def _common(texts: list[str]) -> str:
    """Return what all the texts begin with."""
    low, high = min(texts), max(texts)
    size = next(
        (i for i, pair in enumerate(zip(low, high, strict=False)) if len({*pair}) > 1), None
    )
    return low[:size]


def _places(text: str, least: int, tokens: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for token in tokens:
        place = text.find(token, least)
        while place >= 0:
            found.add(place)
            place = text.find(token, place + 1)
    return found
