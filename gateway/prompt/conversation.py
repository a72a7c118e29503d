"""What is known of conversations: a digest chain over messages, and per part what it adds to a chain.

Turn n+1 of a conversation repeats turn n: its new messages alone are rendered, encoded and chained.
An entry holds the block hashes its part adds and the tokens after the last full block: no text, no
ids of the whole. Gives exactly what rendering and encoding the whole prompt gives (that is the
oracle it is tested against), or says that it cannot (`Unrenderable`). Bounded by bytes; what was
used longest ago goes first, the end of a conversation before its beginning.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson
from xxhash import xxh3_64_intdigest as _hashed

from gateway.core.chain import ID_BYTES, chain_tokens
from gateway.core.types import Chain
from gateway.prompt.amount import MAX_MESSAGES, check_amount
from gateway.prompt.chat import Conversation
from gateway.prompt.frames import Frame
from gateway.prompt.messages import Unrenderable
from gateway.prompt.separate import Separation, cuts
from gateway.prompt.table import CACHE_BYTES, Known, Table
from gateway.prompt.template import ChatTemplate

_64_BITS: Final = 0xFFFF_FFFF_FFFF_FFFF
# Odd constants (the golden ratio and primes of xxHash's) that keep apart what is mixed into a key.
_ROLES: Final = {
    "user": 0x9E37_79B9_7F4A_7C15,
    "assistant": 0xC2B2_AE3D_27D4_EB4F,
    "tool": 0x1656_67B1_9E37_79F9,
    "system": 0x85EB_CA77_C2B2_AE63,
    "developer": 0x27D4_EB2F_1656_67C5,
}
_OTHER: Final = 0xA076_1D64_78BD_642F
_FROM: Final = 0xE703_7ED1_A0B4_28DB
_CLOSED: Final = 0x8EBC_6AF0_9C88_C6E3
_JUMP: Final = 0x5896_95F2_3B1A_9E77
_TIP: Final = 0x1D8E_4E27_C47D_124F
_TIP_LOOKS: Final = 64
"""How many messages back a conversation's last request is looked for."""

_LEADING: Final = frozenset({"system", "developer"})
_FOLLOWING: Final = frozenset({"user", "assistant", "tool"})


class Chained(msgspec.Struct, frozen=True, gc=False):
    """What a chain is made with: its seed (`core.chain.token_seed`) and the size of a block."""

    seed: int
    block_tokens: int


class Conversations(Table):
    """The table of runs, by digests of all that precedes and is in them."""

    def __init__(
        self, template: ChatTemplate, separation: Separation, max_bytes: int = CACHE_BYTES
    ) -> None:
        super().__init__(max_bytes)
        self.template = template
        self.separation = separation

    def route(self, chat: Conversation, chained: Chained) -> "Route":
        """Return the way to a conversation's chain: what is known of it, and what to encode.

        Raises:
            Unrenderable: it has to be rendered whole.
        """
        if len(chat.messages) > MAX_MESSAGES:
            raise Unrenderable("too many messages to look each up")
        found = self.separation.frame(chat)
        if found is None:
            raise Unrenderable("these options were not proven")
        key, frame = found
        return Route(self, chat, frame, _base(chat, key, chained), chained)


class Route:
    """One request's way through the table. `texts` are to be encoded, then `finish` may be called."""

    def __init__(
        self, table: Conversations, chat: Conversation, frame: Frame, base: int, chained: Chained
    ) -> None:
        self._table = table
        self._chat = chat
        self._frame = frame
        self._base = base
        self._block_tokens = chained.block_tokens
        messages = chat.messages
        self._roles = roles = _roles(messages, developer=_knows_developer(table.template, chat))
        if not frame.calls and any(_is_call(message) for message in messages):
            raise Unrenderable("calls are not rendered one by one")
        self._last_user = len(roles) - 1 - roles[::-1].index("user")
        self._marks = _marks(messages, base)
        self._phase = 0
        self._fluid = False  # whether another question would change what has been taken
        self._hashes = array("Q")
        self._tail = array("I")
        self._tokens = 0
        self._link = chained.seed
        self._tip = 0
        start = self._from_tip()
        self._starts = [start] if start < len(roles) else []
        self._starts += [start + cut for cut in cuts(roles[start:], frame.proven)]
        self._ends = [*self._starts[1:], len(roles)] if self._starts else []
        self._at = 0 if start else self._walk()
        self._runs = self._left()
        self.texts = [self._text(first, stop) for first, stop in self._runs]
        """The texts of what is not known, and what follows the last message."""
        self.texts.append(frame.end(roles[-1]))

    def finish(self, ids: Sequence["array[int]"]) -> Chain:
        """Take in the ids of `texts`, remember them, and return the chain."""
        for (first, stop), part in zip(self._runs, ids, strict=False):
            self._add(first, stop, part)
        if self._runs:
            self._keep_tip()
        end = self._tail + ids[-1]
        size, link = self._block_tokens, self._link
        last = chain_tokens(end, link, size)
        tokens = self._tokens + len(ids[-1])
        return Chain(
            self._hashes + last,
            size,
            tokens,
            True,
            tokens * ID_BYTES,
            tail=end[len(last) * size :].tobytes(),
            link=last[-1] if last else link,
            block_bytes=size * ID_BYTES,
        )

    # -- what is known ----------------------------------------------------------------------

    def _from_tip(self) -> int:
        """Go to where an earlier request of the conversation ended; return how many messages it had.

        A conversation's tip has all its hashes at once: the next turn needs no walk.
        """
        roles, marks, table = self._roles, self._marks, self._table
        count = len(roles)
        for end in range(count, max(0, count - _TIP_LOOKS), -1):
            key = marks[end - 1] ^ _TIP
            tip = table.get(key)
            if tip is None or tip.tail is None:
                continue
            cut = end == count or (roles[end - 1], roles[end]) in self._frame.proven
            if cut and not (tip.sensitive and self._last_user >= end):
                self._take(tip)
                self._phase, self._fluid, self._tip = tip.phase, tip.sensitive, key
                table.touch((key,))
                return end
        return 0

    def _keep_tip(self) -> None:
        """Remember all up to the last message, in place of the tip that this request came from."""
        table = self._table
        if self._tip:
            table.drop(self._tip)
        tip = Known(self._hashes, self._tail, self._tokens, self._fluid, phase=self._phase)
        table.put(self._marks[-1] ^ _TIP, tip)

    def _walk(self) -> int:
        """Follow what is known from the start; return the number of parts behind us."""
        table, marks, ends = self._table, self._marks, self._ends
        at, used = 0, []
        before = self._base
        while at < len(ends):
            stop = at + 1
            found = self._find(before, stop)
            if found is None:
                jump = table.get(self._phase ^ before ^ _JUMP)
                if jump is None or at + jump.parts > len(ends):
                    break
                stop = at + jump.parts
                found = self._find(before, stop)
                if found is None:
                    break
            key, known = found
            used.append(key)
            self._take(known)
            at, before = stop, marks[ends[stop - 1] - 1]
        table.touch(used)
        return at

    def _find(self, before: int, stop: int) -> tuple[int, Known] | None:
        """Return the run of parts up to `stop`, with its key; the phase goes on if it is found."""
        end = self._ends[stop - 1]
        mark = self._marks[end - 1]
        phase = self._phase
        key = _key(before, mark, phase)
        known = self._table.get(key)
        fluid = False
        if known is not None and known.sensitive:
            fluid = self._last_user < end
            if not fluid:
                phase = _closed(phase, mark)
                key = _key(before, mark, phase)
                known = self._table.get(key)
        if known is None or known.tail is None:
            return None
        self._phase = phase
        self._fluid = self._fluid or fluid
        return key, known

    def _take(self, known: Known) -> None:
        assert known.tail is not None
        if known.hashes:
            self._hashes += known.hashes
            self._link = known.hashes[-1]
        self._tail = known.tail
        self._tokens = known.tokens

    # -- what is not ------------------------------------------------------------------------

    def _left(self) -> list[tuple[int, int]]:
        """Return the runs of parts to render: one, but for beginnings that others may share."""
        at, stop = self._at, len(self._ends)
        if at == stop:
            return []
        if at or stop == 1 or self._starts[0]:
            return [(at, stop)]
        runs = [(0, 1)]
        if stop > 2:
            runs.append((1, stop - 1))
        return [*runs, (stop - 1, stop)]

    def _text(self, first: int, stop: int) -> str:
        start, end = self._starts[first], self._ends[stop - 1]
        if start and end - start == stop - first and (plain := self._plain(start, end)) is not None:
            return plain
        roles, chat = self._roles, self._chat
        given = chat.messages[start:end]
        check_amount(given, None if start else chat.tools)
        self._check(given)
        one = self._table.template.of(chat.tools)
        assert one is not None
        return self._frame.part(
            self._table.template.seen(given, one, ordered=chat.ordered),
            roles[start - 1] if start else None,
            roles[end] if end < len(roles) else None,
            closed=self._last_user >= end,
            tools=chat.tools,
        )

    def _plain(self, start: int, end: int) -> str | None:
        """Return the text of messages of nothing but text, if the template shows that as it is."""
        roles, messages, shapes = self._roles, self._chat.messages, self._frame.shapes
        words = self._table.separation.looked_for
        texts = []
        for index in range(start, end):
            message = messages[index]
            shape = shapes.get((roles[index - 1], roles[index]))
            content = message.get("content")
            if shape is None or len(message) != 2 or type(content) is not str:
                return None
            if any(word in content for word in words):
                return None
            texts.append(shape.text(content))
        return "".join(texts)

    def _check(self, messages: Sequence[Any]) -> None:
        """Refuse messages with words that change how others are rendered."""
        unsafe = self._table.separation.unsafe
        if unsafe and any(_holds(message, unsafe) for message in messages):
            raise Unrenderable("a message has a word that changes others")

    def _add(self, first: int, stop: int, part: "array[int]") -> None:
        """Chain the ids of a run on, and remember it."""
        ids = self._tail + part
        hashes = chain_tokens(ids, self._link, self._block_tokens)
        tail = ids[len(hashes) * self._block_tokens :]
        start, end = self._starts[first], self._ends[stop - 1]
        before = self._marks[start - 1] if start else self._base
        mark = self._marks[end - 1]
        sensitive = self._sensitive(self._chat.messages[start:end])
        known = Known(hashes, tail, self._tokens + len(part), sensitive)
        table, phase = self._table, self._phase
        if stop - first > 1:
            table.put(phase ^ before ^ _JUMP, Known(_NONE, None, 0, parts=stop - first))
        if sensitive and self._last_user < end:
            self._fluid = True
        elif sensitive:
            if table.get(_key(before, mark, phase)) is None:
                table.put(_key(before, mark, phase), Known(_NONE, None, 0, sensitive=True))
            phase = self._phase = _closed(phase, mark)
        table.put(_key(before, mark, phase), known)
        self._take(known)

    def _sensitive(self, messages: Sequence[Any]) -> bool:
        words = self._table.separation.words
        return self._frame.sensitive or any(
            message["role"] == "assistant"
            and (
                (len(message) > 2 and _thinks(message)) or (bool(words) and _holds(message, words))
            )
            for message in messages
        )


_NONE: Final = array("Q")


def _base(chat: Conversation, key: bytes, chained: Chained) -> int:
    """Return the digest that a conversation's messages are chained on to."""
    base = _hashed(key, chained.seed ^ chained.block_tokens ^ chat.ordered << 32)
    if chat.tools is None:
        return base
    try:
        return _hashed(orjson.dumps(chat.tools), base)
    except TypeError:
        raise Unrenderable("tools nested too deeply") from None


def _marks(messages: Sequence[Any], mark: int) -> list[int]:
    """Return the digest of everything up to and with each message."""
    marks: list[int] = []
    append = marks.append
    roles = _ROLES
    for message in messages:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:
            mark = _hashed(content.encode(), mark ^ roles[message["role"]])
        else:
            mark = _hashed(_dumped(message), mark ^ _OTHER)
        append(mark)
    return marks


def _dumped(message: object) -> bytes:
    try:
        return orjson.dumps(message)
    except TypeError:
        raise Unrenderable("a message nested too deeply") from None


def _roles(messages: Sequence[Any], *, developer: bool) -> list[str]:
    """Return the messages' roles; system prompts only lead, and nothing has a role of its own."""
    try:
        roles: list[str] = [message["role"] for message in messages]
        first = 1 if roles[0] in _LEADING else 0
        if roles[0] == "developer" and not developer:
            roles[0] = "system"
        if roles[first] != "user" or not _FOLLOWING.issuperset(roles[first:]):
            raise Unrenderable("a role that is rendered by its place")
    except (TypeError, LookupError):
        raise Unrenderable("a message without role, or a system prompt alone") from None
    return roles


def _knows_developer(template: ChatTemplate, chat: Conversation) -> bool:
    one = template.of(chat.tools)
    return one is not None and one.knows_developer


def _is_call(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _thinks(message: dict[str, Any]) -> bool:
    return message.get("reasoning") is not None or message.get("reasoning_content") is not None


def _holds(message: dict[str, Any], words: frozenset[str]) -> bool:
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return any(word in content for word in words)
    text = str(message)
    return any(word in text for word in words)


def _key(before: int, mark: int, phase: int) -> int:
    return (before * _FROM & _64_BITS) ^ mark ^ phase


def _closed(phase: int, mark: int) -> int:
    return (phase * _CLOSED + mark) & _64_BITS
