"""What an answer's bytes say on the side: first content, last usage, terminal event.

The scanner sees payload bytes (framing removed) in any split and must never delay, change or
iterate lines of them. Its state is bounded: between two calls of `settle`, which its owner makes
every few dozen pieces, it keeps them; after it, the newest `TAIL_CHUNKS` and what was cut out of the
others for the next turn (core/answer.py).
"""

import re
from collections import deque
from typing import Any

import orjson

from gateway.core.answer import Said
from gateway.core.types import Api, Usage

TAIL_CHUNKS = 16
MAX_PIECES = 96
"""Pieces kept before the scanner settles by itself; the owner does so earlier."""
_BULKY = 4096  # so large a piece is settled at once
_MERGE_BELOW = 128  # smaller pieces are joined, so that 16 of them still span the last event
_MERGE_UP_TO = 4096
OPENING_MAX = 1024
_CARRY = 64
_FIRST_LIMIT = 8  # events without recognisable content before the next one counts as first

# A non-empty text, reasoning or argument fragment in any of the four stream dialects.
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json|delta|refusal)"'
    rb':\s*"(?!")|"tool_calls":\s*\[\s*\{'
)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_USAGE_MAX = 8192
# vLLM's and llama.cpp's chat usage as they write it: a third of the cost of parsing the object.
_USUAL = re.compile(
    rb'"usage":\{(?:"prompt_tokens":(\d{1,9}),"total_tokens":\d{1,9},"completion_tokens":(\d{1,9}))'
    rb'(?:,"prompt_tokens_details":(?:null|\{"cached_tokens":(\d{1,9})[,}]))?'
)
_STREAM_ERROR = re.compile(rb'(?:^|\n)(?:event: ?error|data: ?\{\s*"error"\s*:)')
_TERMINAL: dict[Api, re.Pattern[bytes]] = {
    Api.CHAT: re.compile(rb"(?:^|\n)data: ?\[DONE\]"),
    Api.COMPLETIONS: re.compile(rb"(?:^|\n)data: ?\[DONE\]"),
    Api.MESSAGES: re.compile(rb'(?:^|\n)event: ?message_stop|"type":\s*"message_stop"'),
    Api.RESPONSES: re.compile(
        rb'(?:^|\n)event: ?response\.(?:completed|incomplete|failed)|"type":\s*"response\.'
        rb'(?:completed|incomplete|failed)"'
    ),
}

# A word of every terminal event: found from the end at a hundredth of the pattern's cost.
_MARKS = {
    Api.CHAT: b"[DONE]",
    Api.COMPLETIONS: b"[DONE]",
    Api.MESSAGES: b"message_stop",
    Api.RESPONSES: b"response.",
}
_MARK_REACH = 64  # a terminal event begins at most this far before its mark, whatever its spaces

NO_USAGE = Usage()


class Scanner:
    """One answer's side notes: `is_first_content` until it was, `keep` for every payload.

    `followed` = what the answer says is wanted; it is a stream's unless `read` is called.
    """

    __slots__ = ("_carry", "_events", "_said", "_taken", "_trimmed", "opening", "tail")

    def __init__(self, followed: Api | None = None) -> None:
        # the newest pieces; all since the last `settle` where they are wanted
        self.tail: deque[bytes] | list[bytes] = (
            deque(maxlen=TAIL_CHUNKS) if followed is None else []
        )
        self._said = None if followed is None else Said(followed)
        self._taken = 0  # pieces at the start of `tail` that `_said` has had
        self._trimmed = False
        self._events = 0
        self._carry = b""  # end of the last payload: a split may fall into what is looked for
        self.opening = b""

    def is_first_content(self, payload: bytes) -> bool:
        """Return whether `payload` carries the answer's first content (asked until it does)."""
        if len(self.opening) < OPENING_MAX:  # Messages report the prompt's tokens up here
            self.opening += payload[:OPENING_MAX]
        window = self._carry + payload
        if _CONTENT.search(window) is not None:
            return True
        self._carry = window[-_CARRY:]
        self._events += payload.endswith(b"\n\n")
        return self._events > _FIRST_LIMIT

    def keep(self, payload: bytes) -> None:
        """Remember `payload` as the newest part of the answer.

        A chunk may be kept with its framing (append it to `tail`): it holds whole events.
        """
        tail = self.tail
        if len(payload) < _MERGE_BELOW and tail and len(tail[-1]) < _MERGE_UP_TO:
            tail[-1] += payload
        else:
            bulky = len(payload) > _BULKY or (tail and len(tail[-1]) >= _MERGE_UP_TO)
            tail.append(payload)
            if bulky or len(tail) > MAX_PIECES:
                self.settle()

    def settle(self) -> None:
        """Let go of all but the newest pieces."""
        tail = self.tail
        if len(tail) <= TAIL_CHUNKS or isinstance(tail, deque):
            return
        self._trimmed = True
        if self._said is not None:
            self._said.take(tail[self._taken : -1])  # the last may still grow
            self._taken = TAIL_CHUNKS - 1
        del tail[:-TAIL_CHUNKS]

    def said(self, *, stream: bool) -> Said | None:
        """Return what the answer said, when it has ended; None = not wanted, or not all seen."""
        said = self._said
        if said is None or isinstance(self.tail, deque):
            return None
        if stream:
            said.take(self.tail[self._taken :])
        elif not self._trimmed:
            said.read(b"".join(self.tail))
        self._said = None
        return said

    def ends_between_events(self) -> bool:
        """Return whether the stream stands at an event boundary (or has not begun)."""
        if not self.tail:
            return True
        end = self.tail[-1][-4:]
        return end.endswith((b"\n\n", b"\r\n\r\n", b"\n\n\r\n"))  # the last is a framed chunk

    def usage(self) -> Usage:
        """Return the last usage object of the answer; fields are None where it has none."""
        last = find_usage(b"".join(self.tail))
        if last.prompt_tokens is not None:
            return last
        first = find_usage(self.opening)
        return Usage(first.prompt_tokens, last.completion_tokens, first.cached_tokens)

    def terminated(self, api: Api) -> bool:
        """Return whether the API's own terminal event came (True for APIs without one)."""
        pattern = _TERMINAL.get(api)
        if pattern is None:
            return True
        data = b"".join(self.tail)
        at = data.rfind(_MARKS[api])
        if at < 0:
            return False
        near = pattern.search(data, max(0, at - _MARK_REACH))
        return near is not None or pattern.search(data) is not None

    def reported_error(self) -> bool:
        """Return whether the engine reported an error inside the stream."""
        data = b"".join(self.tail)
        return b"error" in data and _STREAM_ERROR.search(data) is not None


NOTHING_SEEN = Scanner()
"""What an answer that has not begun says. Must never be fed."""


def find_usage(data: bytes) -> Usage:
    """Return the last parseable `"usage": {...}` of `data`, in any dialect."""
    end = len(data)
    while (at := data.rfind(b'"usage"', 0, end)) >= 0:
        usual = _USUAL.match(data, at)
        if usual is not None:
            prompt, completion, cached = usual.groups()
            return Usage(int(prompt), int(completion), None if cached is None else int(cached))
        found = _USAGE.match(data, at)
        if found is not None:
            start = found.end() - 1
            usage = _parse_usage(data[start : start + _USAGE_MAX])
            if usage is not None:
                return usage
        end = at
    return NO_USAGE


def _parse_usage(data: bytes) -> Usage | None:
    end = _object_end(data)
    if end is None:
        return None
    try:
        fields = orjson.loads(data[:end])
    except orjson.JSONDecodeError:
        return None
    if "prompt_tokens" in fields:
        return _openai_usage(fields)
    if "input_tokens" in fields or "output_tokens" in fields:
        return _input_usage(fields)
    return None


def _openai_usage(fields: dict[str, Any]) -> Usage:
    details = fields.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=_count(fields.get("prompt_tokens")),
        completion_tokens=_count(fields.get("completion_tokens")),
        cached_tokens=_count(cached),
    )


def _input_usage(fields: dict[str, Any]) -> Usage:
    prompt = _count(fields.get("input_tokens"))
    details = fields.get("input_tokens_details")
    if isinstance(details, dict):  # Responses: input_tokens is the whole prompt
        cached = _count(details.get("cached_tokens"))
    else:  # Messages: what was cached is counted beside input_tokens; what is now, only by some
        cached = _count(fields.get("cache_read_input_tokens"))
        created = _count(fields.get("cache_creation_input_tokens"))
        if prompt is not None:
            prompt += (cached or 0) + (created if created and created > prompt else 0)
    return Usage(prompt, _count(fields.get("output_tokens")), cached)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _object_end(data: bytes) -> int | None:
    """Return the index after the `}` that closes the object `data` starts with.

    Counts braces only: usage objects hold numbers and names without braces.
    """
    end = data.find(b"}") + 1
    while end:
        if data.count(b"{", 0, end) == data.count(b"}", 0, end):
            return end
        end = data.find(b"}", end) + 1
    return None
