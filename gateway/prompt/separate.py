"""Which templates treat a conversation part by part: found out, then proven on synthetic ones.

At load, each kind of cut is tried with every kind of option: the whole conversation is rendered and
encoded, and so are its parts by themselves; only where both ways always give the same text and the
same token ids is a cut used. Words that templates look for in content (`</think>`) are taken from
the template's source and tried in content too. Whatever was not proven is rendered whole. Must
never be trusted with options that were not tried.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import compress, product
from typing import Any, Final

import orjson
from jinja2.defaults import DEFAULT_NAMESPACE

from gateway.prompt.chat import Conversation
from gateway.prompt.frames import (
    OTHER_TOOLS,
    Frame,
    Kind,
    Run,
    Shape,
    Tools,
    assistant,
    calling,
    tool,
    user,
)
from gateway.prompt.messages import Unrenderable, shown
from gateway.prompt.probes import PLAIN_TEXTS, conversations, triggers, with_text
from gateway.prompt.template import ChatTemplate, One

Encode = Callable[[str], "array[int]"]
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high")
_OWN_VARIABLES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)
_OWN_NAMES: Final = (_OWN_VARIABLES | DEFAULT_NAMESPACE.keys()) - {"add_generation_prompt"}
_MAX_OPTIONS: Final = 14
_CLOCK: Final = tuple("%" + letter for letter in "HIMSpfcXTRsrDZz")
"""Formats that change within a day."""

_MAX_TRIGGERS: Final = 24
_MAX_PAIRED: Final = 4


class Separation:
    """A template's proven ways of being rendered part by part."""

    def __init__(self, template: ChatTemplate, cut_tokens: Sequence[str], encode: Encode) -> None:
        """Find and prove them; takes a fraction of a second.

        `cut_tokens` are added tokens before which text may be cut without changing its ids.
        """
        self._template = template
        self._cut_tokens = cut_tokens
        self._encode = encode
        self._frames: dict[bytes, Frame] = {}
        self._made_on = _today() if template.tells_time else ""
        self.unsafe: frozenset[str] = frozenset()
        """Words that change, in content, how other messages are rendered."""
        self.looked_for: frozenset[str] = frozenset()
        """Every word that the template looks for in texts."""
        self.words: frozenset[str] = frozenset()
        """Words of an answer for which it depends on the phase (see `frames`)."""
        self._fixed = _OWN_NAMES.union(template.specials)
        """Names that proofs take for what they always are; a client may set them all the same."""
        self._keys = {tools: self._variables(tools=tools) for tools in (False, True)}
        if cut_tokens and not _tells_hours(template):
            self._prove()

    @property
    def proven(self) -> bool:
        """Whether anything may be rendered in parts."""
        return any(frame.proven for frame in self._frames.values())

    def frame(self, chat: Conversation) -> "tuple[bytes, Frame] | None":
        """Return the key and frame of a conversation's options; None = render it whole."""
        if self._made_on and self._made_on != _today():
            self._made_on = _today()
            for known in self._frames.values():
                known.anew()
        if not self._fixed.isdisjoint(chat.variables):
            return None
        key = self._key(chat.tools is not None, chat.variables)
        frame = self._frames.get(key)
        if frame is None or not frame.proven or chat.continued:
            return None
        return key + self._made_on.encode(), frame

    def _key(self, tools: bool, variables: Mapping[str, Any]) -> bytes:
        known = self._keys[tools]
        read = {name: value for name, value in variables.items() if name in known}
        return orjson.dumps((tools, read), option=orjson.OPT_SORT_KEYS)

    def _variables(self, *, tools: bool) -> frozenset[str]:
        one = self._template.of([] if tools else None)
        names = frozenset() if one is None else frozenset(one.variables)
        return (names - _OWN_VARIABLES - self._template.specials.keys()) | {"add_generation_prompt"}

    # -- making and proving frames ------------------------------------------------------------

    def _prove(self) -> None:
        for tools in (False, True):
            one = self._template.of([] if tools else None)
            if one is None:
                continue
            plain: Frame | None = None
            for options in _options(self._keys[tools]):
                key = self._key(tools, options)
                if key in self._frames:
                    continue
                first = plain is None
                proof = self._proof(one, options, tools=tools, like=plain)
                proof.run(conversations(12 if first else 3, tools=tools), plain)
                self._frames[key] = frame = proof.frame
                if first and not frame.proven:
                    break
                plain = plain or frame
                if frame.proven and (first or "thinking" in "".join(options)):
                    self._find_words(proof, one)

    def _proof(
        self, one: One, options: Mapping[str, Any], *, tools: bool, like: Frame | None
    ) -> "_Proof":
        variables = {**self._template.specials, **options}

        def run(messages: list[dict[str, Any]], given: Tools) -> str:
            return one.run(messages, given, variables)

        frame = Frame(run, parts=one.parts, tools=tools)
        frame.cuts = frame.find_cuts(self._cut_tokens) if like is None else like.cuts
        return _Proof(frame, run, self._encode, one.parts, OTHER_TOOLS if tools else None)

    def _find_words(self, proof: "_Proof", one: One) -> None:
        """Try in content every word that the template's source looks for."""
        unsafe, sensitive = set(self.unsafe), set(self.words)
        looked_for, starts, ends = triggers(one.tree)
        self.looked_for |= {word.strip() for word in looked_for}
        pairs = [(word, "") for word in sorted(looked_for)[:_MAX_TRIGGERS]]
        pairs += product(sorted(starts)[:_MAX_PAIRED], sorted(ends)[:_MAX_PAIRED])
        for first, last in pairs:
            if not unsafe.isdisjoint((first.strip(), last.strip())):
                continue
            texts = (first, f"a {first}\nb") if not last else (f"{first}x{last}",)
            if not all(proof.holds(m, proof.frame.proven) for t in texts for m in proof.tried(t)):
                unsafe |= {first.strip(), last.strip()} - {""}
            elif any(proof.changes(assistant(text)) for text in texts):
                sensitive |= {first.strip(), last.strip()} - {""}
        self.unsafe, self.words = frozenset(unsafe), frozenset(sensitive)


class _Proof:
    """Compares the parts with the whole, in text and in token ids."""

    def __init__(
        self, frame: Frame, render: Run, encode: Encode, parts: bool, tools: Tools
    ) -> None:
        self.frame = frame
        self._render = render
        self._encode = encode
        self._parts = parts
        self._tools = tools

    def run(self, tried: Sequence[list[dict[str, Any]]], like: Frame | None = None) -> None:
        """Set what of the frame's cuts is proven: where it is `like` another, all of that's or none."""
        frame = self.frame
        kinds = self._kinds(tried) if like is None else like.proven
        if like is None and not kinds:  # perhaps it only treats calls and results oddly
            frame.calls = False
            kinds = self._kinds(_without_calls(tried))
        elif like is not None:
            frame.calls = like.calls
            tried = tried if frame.calls else _without_calls(tried)
            kinds = kinds if self._stand(tried, kinds) else frozenset()
        if not kinds or not self._ends_alike(kinds):
            return
        frame.proven = kinds
        found = {kind: self._shape(kind) for kind in kinds}
        frame.shapes = {kind: shape for kind, shape in found.items() if shape is not None}
        frame.sensitive = (
            self.changes(assistant("An answer."))
            or self.changes(user("A question."))
            or self.changes(calling("f", text="text"), tool("result"))
        )

    def _shape(self, kind: Kind) -> Shape | None:
        """Return how this kind's messages of plain text are always rendered, if there is a way."""
        before, role = kind
        opening = self.frame.cuts[kind]
        shapes = [Shape(opening, strips=False), Shape(opening, strips=True)]
        ways: list[tuple[str | None, bool]] = [("assistant", False), ("assistant", True)]
        if role == "assistant":
            ways = [("user", True)]
        for text in PLAIN_TEXTS:
            seen = self._shown([{"role": role, "content": text}])
            for following, closed in ways:
                try:
                    part = self.frame.part(seen, before, following, closed=closed)
                except Unrenderable:
                    return None
                shapes = [shape for shape in shapes if shape.text(text) == part]
        return shapes[0] if shapes else None

    def _kinds(self, tried: Sequence[list[dict[str, Any]]]) -> frozenset[Kind]:
        """Return the cuts at which the whole is always the sum of its parts."""
        kinds = frozenset(kind for kind in self.frame.cuts if self._met(tried, kind))
        if not self._stand(tried, kinds):
            kinds = frozenset(kind for kind in kinds if self._stand(tried, frozenset({kind})))
        return kinds if self._stand(tried, kinds) else frozenset()

    def tried(self, text: str) -> list[list[dict[str, Any]]]:
        """Return conversations with a text in them, of the kind that the frame takes."""
        found = list(with_text(text))
        return found if self.frame.calls else _without_calls(found)

    def holds(self, messages: list[dict[str, Any]], kinds: frozenset[Kind]) -> bool:
        """Return whether parts cut at all these kinds give what the whole gives.

        True also for a conversation that the template refuses: engines refuse it as well.
        """
        seen = self._shown(messages)
        whole = self._whole(seen)
        if whole is None:
            return True
        try:
            texts = [*parts_of(self.frame, seen, kinds, self._tools)]
        except Unrenderable:
            return False
        if "".join(texts) != whole:
            return False
        ids = array("I")
        for text in texts:
            ids += self._encode(text)
        return ids == self._encode(whole)

    def changes(self, *messages: dict[str, Any]) -> bool:
        """Return whether these are rendered differently once another user message follows."""
        seen = self._shown(messages)
        if seen[-1]["role"] == "assistant":  # an answer within a turn is followed by its calls
            seen = [{**self._shown([calling("f")])[0], **seen[-1]}, *self._shown([tool("r")])]
        role = seen[0]["role"]
        before = "assistant" if role == "user" else "user"
        if {(before, role), (seen[-1]["role"], "assistant")} - self.frame.proven:
            return False
        try:
            opened = self.frame.part(seen, before, "assistant", closed=False)
            closed = self.frame.part(seen, before, "assistant", closed=True)
        except Unrenderable:
            return True
        return opened != closed

    def _ends_alike(self, kinds: frozenset[Kind]) -> bool:
        """Return whether a part's text does not depend on who speaks next, or whether anybody does."""
        question = ("assistant", self._shown([user("A question.")]))
        result = ("user", self._shown([calling("f", text="text"), tool("result")]))
        for before, seen in (question, result):
            last = seen[-1]["role"]
            if (before, seen[0]["role"]) not in kinds or (last, "assistant") not in kinds:
                continue
            nexts: list[tuple[str | None, bool]] = [("assistant", False), (None, False)]
            if not self._alike(seen, before, nexts):
                return False
            after_user = [("assistant", True), ("user", True)]
            if (last, "user") in kinds and not self._alike(seen, before, after_user):
                return False
        return True

    def _alike(
        self,
        seen: list[dict[str, Any]],
        before: str,
        nexts: Sequence[tuple[str | None, bool]],
    ) -> bool:
        try:
            texts = {
                self.frame.part(seen, before, following, closed=closed)
                for following, closed in nexts
            }
        except Unrenderable:
            return False
        return len(texts) == 1

    def _stand(self, tried: Sequence[list[dict[str, Any]]], kinds: frozenset[Kind]) -> bool:
        return all(self.holds(messages, kinds) for messages in tried)

    def _met(self, tried: Sequence[list[dict[str, Any]]], kind: Kind) -> bool:
        """Return whether a conversation that the template takes has such a cut."""
        return any(
            cuts([m["role"] for m in messages], frozenset({kind}))
            and self._whole(self._shown(messages)) is not None
            for messages in tried
        )

    def _whole(self, seen: list[dict[str, Any]]) -> str | None:
        try:
            return self._render(seen, self._tools)
        except Unrenderable:
            return None

    def _shown(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [shown(message, parts=self._parts) for message in messages]


def parts_of(
    frame: Frame, messages: list[dict[str, Any]], kinds: frozenset[Kind], tools: Tools
) -> Iterator[str]:
    """Yield the texts of a conversation's parts, and what follows the last one."""
    roles = [message["role"] for message in messages]
    starts = [0, *cuts(roles, kinds)]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    for start, stop in zip(starts, [*starts[1:], len(messages)], strict=True):
        yield frame.part(
            messages[start:stop],
            roles[start - 1] if start else None,
            roles[stop] if stop < len(roles) else None,
            closed=last_user >= stop,
            tools=tools,
        )
    yield frame.end(roles[-1])


def _without_calls(tried: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [
        [m for m in messages if m["role"] != "tool" and "tool_calls" not in m] for messages in tried
    ]


def cuts(roles: Sequence[str], kinds: frozenset[Kind]) -> list[int]:
    """Return where a conversation of these roles is cut."""
    found = map(kinds.__contains__, zip(roles, roles[1:], strict=False))  # noqa: RUF007 - twice as fast
    return list(compress(range(1, len(roles)), found))


def _options(names: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield the options that are tried: what clients can set, one at a time, likely ones first."""
    plain: dict[str, Any] = {"add_generation_prompt": True}
    tried = [plain, {"add_generation_prompt": False}]
    if "reasoning_effort" in names:
        for effort in _EFFORTS:
            thinking = {"enable_thinking": effort != "none"}
            tried.append({**plain, "reasoning_effort": effort, **thinking})
    rest = names - {"add_generation_prompt", "reasoning_effort"}
    for name in sorted(rest, key=lambda name: ("thinking" not in name, name)):
        tried += [{**plain, name: True}, {**plain, name: False}]
    yield from tried[:_MAX_OPTIONS]


def _tells_hours(template: ChatTemplate) -> bool:
    sources = [one.source for one in (template.of(None), template.of([])) if one is not None]
    return template.tells_time and any(mark in source for source in sources for mark in _CLOCK)


def _today() -> str:
    return datetime.now().date().isoformat()  # noqa: DTZ005 - as templates tell it
