"""What an answer said, and the chain that the next turn will begin with: its prompt and the answer.

Engines keep the blocks of what they generated. The next turn sends the answer back as a message, so
its canonical stream goes on where this prompt's ended. Only what comes back as it was said counts:
reasoning is dropped by chat templates, so an answer with any is not followed. A wrong guess is
harmless: the next prompt's hashes then differ, and nothing is believed of it.

Text is cut out of a stream in batches by C-speed splits and kept in its JSON form; an event is
parsed only where a tool call begins. Must never hold more than `MAX_BYTES` of one answer, raise on
odd bytes, or be asked for a chain that nobody could use.
"""

import re
from array import array
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.core.answer_shapes import (
    OPENING,
    THINK,
    as_messages,
    begun_calls,
    tool_call,
    whole_items,
)
from gateway.core.canonical import continued
from gateway.core.chain import chain_blocks
from gateway.core.request import ParsedRequest
from gateway.core.types import Api, Chain

MAX_BYTES: Final = 64 * 1024
"""What is followed of one answer: a longer one's beginning is as good a prefix."""

MAX_WHOLE: Final = 512 * 1024
"""A whole answer larger than this is not parsed: half a millisecond of the loop."""

# A shorter answer is not followed: to find it again saves the engine 2 ms, and costs us 15 us.
_LEAST_TOKENS: Final = 64
_LEAST_BYTES: Final = 4 * _LEAST_TOKENS
_MAX_EVENT: Final = 16 * 1024
_MAX_CALLS: Final = 64
_TWO_DIGITS: Final = 0x100 + len("ff\r\n\r\n")  # a shorter chunk's size has two hex digits

# How each API's stream writes a piece of text, up to the text: vLLM's way first, then others'.
_MARKS: Final[dict[Api, tuple[bytes, ...]]] = {
    Api.CHAT: (b'"content":"', b'"content": "'),
    Api.COMPLETIONS: (b'"text":"', b'"text": "'),
    Api.MESSAGES: (
        b'"text_delta","text":"',
        b'"text_delta", "text": "',
        b'"delta":{"text":"',
    ),
    Api.RESPONSES: (b'"delta":"', b'"delta": "'),
}
_ARGUMENTS: Final[dict[Api, tuple[bytes, ...]]] = {
    Api.CHAT: (b'"arguments":"', b'"arguments": "'),
    Api.MESSAGES: (b'"partial_json":"', b'"partial_json": "'),
}
_CALLS: Final = {Api.CHAT: b'"tool_calls":', Api.MESSAGES: b'"tool_use"'}
_BEGINS: Final = {Api.CHAT: b'"name"', Api.MESSAGES: b'"tool_use"'}
_REASONS: Final = re.compile(
    rb'"reasoning(?:_content)?": ?"(?!")|"thinking(?:_delta)?"|response\.reasoning|</think>'
)
_REASON_WORDS: Final = (b"reasoning", b"think")
_CHAT_TEXT: Final = b'"message":{"role":"assistant","content":"'
_BACKSLASH: Final = 0x5C
_ASSISTANT: Final = continued([{"role": "assistant", "content": ""}])
_STRING: Final = re.compile(rb'(?:[^"\\]|\\.)*')


def is_followed(request: ParsedRequest) -> bool:
    """Return whether the next turn of this request can be foreseen from its answer."""
    data = request.data
    if request.api not in _MARKS or (request.n or 1) > 1:
        return False
    if request.api is Api.COMPLETIONS:
        prompt = data.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        return isinstance(prompt, str) and not data.get("echo") and not data.get("suffix")
    return not (
        data.get("continue_final_message")
        or data.get("previous_response_id")
        or data.get("conversation")
    )


def whole_answer(api: Api | None, data: bytes, tokens: int | None) -> "Said | None":
    """Return what a whole answer (its head may come first) said; None where it adds no block."""
    if api is None or (tokens or _LEAST_TOKENS) < _LEAST_TOKENS:
        return None
    said = Said(api)
    said.read(data)
    return said


def grown(chain: Chain, said: "Said") -> "array[int] | None":
    """Return the hashes of the prompt and the answer after it; None where that adds no block."""
    size = chain.block_bytes
    if not size or chain.exact or said.size_hint < _LEAST_BYTES:
        return None
    text = said.continuation()
    if not text:
        return None
    data = chain.tail + text[:MAX_BYTES]
    before = len(chain.hashes)
    room = (chain.narrow_blocks - before) * size
    if len(data) <= room:
        more = chain_blocks(data, chain.link, size)
    elif room <= 0:
        more = chain_blocks(data, chain.link, 2 * size)
    else:
        more = chain_blocks(data[:room], chain.link, size)
        more += chain_blocks(data[room:], more[-1], 2 * size)
    return chain.hashes + more if more else None


class Said:
    """An answer as it comes: `take` its stream in batches, or `read` a whole one."""

    __slots__ = ("_api", "_calls", "_items", "_lost", "_place", "_rest", "_text", "size_hint")

    def __init__(self, api: Api) -> None:
        self._api = api
        self._text: list[bytes] = []
        self._calls: list[tuple[dict[str, Any], list[bytes]]] = []
        self._rest = b""
        self._place: tuple[int, int, int] | None = None
        self._items: list[Any] | str | None = None
        self._lost = False
        self.size_hint = 0

    def take(self, pieces: Sequence[bytes]) -> None:
        """Take in the next pieces of the stream, framed or not, split anywhere."""
        taken = 0
        while taken < len(pieces) and not self._lost and self.size_hint <= MAX_BYTES:
            if self._place is None or self._rest:
                self._take(pieces[taken])
                taken += 1
            else:
                self._take_alike(pieces[taken:])
                return

    def _take_alike(self, pieces: Sequence[bytes]) -> None:
        """Take in pieces by slices at the place where the last event that was looked at had its text.

        The events of a stream differ in nothing else, and by a digit of their chunk's size. One that
        does shows by a bare quote in its slice, or is too short to have a text; a text cut wrongly all
        the same is a prefix that no prompt will ask for.
        """
        assert self._place is not None
        start, after, end = self._place
        texts = [p[start:end] if len(p) < _TWO_DIGITS else p[after:end] for p in pieces]
        text = b"".join(texts)
        if _is_string(text):
            self._text.append(text)
            self.size_hint += len(text)
            return
        for piece, part in zip(pieces, texts, strict=True):
            if part and not self._rest and _is_string(part):
                self._text.append(part)
                self.size_hint += len(part)
            else:
                self._take(piece)

    def _take(self, data: bytes) -> None:
        """Take in bytes by looking at all of them."""
        if self._lost:
            return
        framed = data.endswith(b"\n\n\r\n")
        if framed and not self._rest and self._place is None:
            self._note_place(data)
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        self._rest = data[end:] if end > 1 else data
        if self._rest == b"\r\n":
            self._rest = b""
        if len(self._rest) > _MAX_EVENT:
            self._lose()
            return
        data = data[:end] if end > 1 else b""
        if any(word in data for word in _REASON_WORDS) and _REASONS.search(data):
            self._lose()
            return
        self._take_text(data)
        mark = _CALLS.get(self._api)
        if mark is not None and (self._calls or mark in data):
            self._take_calls(data)

    def _note_place(self, chunk: bytes) -> None:
        """Note where one chunk, framing and all, has its text: offsets for 2 and 3 digits of size."""
        for mark in _MARKS[self._api]:
            at = chunk.find(mark) + len(mark)
            if at >= len(mark):
                end = chunk.find(b'"', at)
                plain = end > at and b"\\" not in chunk[at:end]
                if plain and chunk.count(b"\n\n") == 1:
                    start = at - (len(chunk) >= _TWO_DIGITS)
                    self._place = start, start + 1, end - len(chunk)
                return

    def read(self, data: bytes) -> None:
        """Take in a whole answer's body."""
        if len(data) > MAX_WHOLE:
            return
        self.size_hint = len(data)
        if self._api is Api.CHAT and (text := _plain_text(data)) is not None:
            self._text.append(text)
            return
        try:
            answer = orjson.loads(data[data.find(b"{") :])
            self._items = whole_items(self._api, answer)
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            self._lose()

    def text(self) -> str | None:
        """Return the text it begins with; None = none, or nothing of it will come back."""
        items = self.items()
        if isinstance(items, str):
            return items
        if not items:
            return None
        first = items[0]
        content = first.get("content") if isinstance(first, dict) else None
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = content[0].get("text")
        return content if isinstance(content, str) else None

    def continuation(self) -> bytes | None:
        """Return how the prompt's canonical stream goes on with this answer."""
        if self._items is None and not self._calls and not self._lost:
            text = b"".join(self._text)
            if b"\\" in text:
                plain = _unescaped(self._text)
                text = b"" if plain is None else plain.encode()
            if not text or THINK.encode() in text[:OPENING]:
                return None
            return text if self._api is Api.COMPLETIONS else _ASSISTANT + text
        items = self.items()
        if items is None:
            return None
        return items.encode() if isinstance(items, str) else continued(items)

    def items(self) -> "list[Any] | str | None":
        """Return what the next turn will send of it: messages, or the text of a completion."""
        if self._items is not None or self._lost:
            return self._items
        text = _unescaped(self._text)
        if text is None or THINK in text[:OPENING]:
            return None
        api = self._api
        if api is Api.COMPLETIONS:
            return text or None
        calls = self._finished_calls(api)
        if not text and not calls:
            return None
        return as_messages(api, text, calls)

    def _finished_calls(self, api: Api) -> list[dict[str, Any]]:
        """Return all tool calls; none where one of them cannot be told."""
        calls = []
        for head, parts in self._calls:
            arguments = _unescaped(parts)
            call = None if arguments is None else tool_call(api, head, arguments)
            if call is None:
                return []
            calls.append(call)
        return calls

    # -- inside -----------------------------------------------------------------------------

    def _lose(self) -> None:
        self._lost = True
        self._text, self._calls, self._rest = [], [], b""

    def _take_text(self, data: bytes) -> None:
        api = self._api
        if api is Api.RESPONSES:
            events = data.split(b"event: response.output_text.delta")[1:]
            data = b"".join(events)
        pieces = self._split(data, _MARKS[api])
        self._text += pieces
        self.size_hint += sum(map(len, pieces))

    def _split(self, data: bytes, marks: tuple[bytes, ...]) -> list[bytes]:
        """Return the JSON strings that follow a mark, still escaped."""
        for mark in marks:
            pieces = data.split(mark)
            if len(pieces) > 1:
                break
        else:
            return []
        del pieces[0]
        if b'\\"' in data:
            return [_string(piece) for piece in pieces]
        return [piece[: piece.find(b'"')] for piece in pieces]

    def _take_calls(self, data: bytes) -> None:
        """Take in a batch with parts of tool calls; event by event only where one begins."""
        begins = _BEGINS[self._api]
        if begins not in data:
            self._go_on(data)
            return
        for event in data.split(b"\n"):
            if not event.startswith(b"data:") or len(self._calls) >= _MAX_CALLS:
                continue
            if begins not in event or not self._begin(event):
                self._go_on(event)

    def _begin(self, event: bytes) -> bool:
        """Take in an event if a call begins in it."""
        try:
            begun = begun_calls(self._api, orjson.loads(event[5:]))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            self._lose()
            return True
        for head, part in begun:
            self._calls.append((head, [part]))
            self.size_hint += len(part)
        return bool(begun)

    def _go_on(self, data: bytes) -> None:
        """Take in further arguments of the last call."""
        if self._calls:
            parts = self._split(data, _ARGUMENTS[self._api])
            self._calls[-1][1].extend(parts)
            self.size_hint += sum(map(len, parts))


def _plain_text(data: bytes) -> bytes | None:
    """Return the text of a whole chat answer as JSON has it; None where there is more than a text."""
    start = data.find(_CHAT_TEXT) + len(_CHAT_TEXT)
    end = data.find(b'"', start)
    if start < len(_CHAT_TEXT) or end < 0 or data[end - 1] == _BACKSLASH:
        return None
    rest = data[end:]
    if b'"tool_calls":[{' in rest or (b"reasoning" in rest and _REASONS.search(rest)):
        return None
    return data[start:end]


def _is_string(text: bytes) -> bool:
    """Return whether every quote in a piece of JSON is an escaped one."""
    if b'"' not in text:
        return True
    plain = text.replace(b"\\\\", b"")
    return plain.count(b'"') == plain.count(b'\\"')


def _string(piece: bytes) -> bytes:
    found = _STRING.match(piece)
    return b"" if found is None else found[0]


def _unescaped(parts: list[bytes]) -> str | None:
    try:
        text = orjson.loads(b'"%b"' % b"".join(parts))
    except orjson.JSONDecodeError:  # half a surrogate pair
        return None
    return text if isinstance(text, str) else None
