"""A toy tokeniser for simulated replicas: four bytes of UTF-8 are a token, its id is their value.

Cheap (no vocabulary, no merging), deterministic, exactly reversible, and equal text prefixes give
equal ids. Every message starts at a token border, so that an answer re-sent in the next turn has
the ids it was generated with. Not a real tokeniser: counts are bytes / 4. Never waits.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
_MASK = 2**32 - 1
_START = b"\x01\x00\x00\x00"  # <|im_start|>
_END = b"\x02\x00\x00\x00"  # <|im_end|>
_WORDS = 1024


def encode(text: str) -> bytes:
    """Return a text's tokens as packed ids (little endian), the last one padded with NULs."""
    data = text.encode("utf-8", "surrogatepass")
    return data + b"\0" * (-len(data) % TOKEN_BYTES)


def pack(ids: Iterable[int]) -> bytes:
    """Return token ids in the packed form; an id is taken modulo 2**32."""
    return array("I", [i & _MASK for i in ids]).tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the ids of packed tokens."""
    return array("I", packed).tolist()


def decode(packed: bytes) -> str:
    """Return the text of packed tokens; what is not UTF-8 is replaced."""
    return packed.replace(b"\0", b"").decode("utf-8", "replace")


def count(packed: bytes) -> int:
    """Return the number of packed tokens."""
    return len(packed) // TOKEN_BYTES


def chain(packed: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Return the chained hash of every full block of `block_tokens` tokens."""
    size = block_tokens * TOKEN_BYTES
    previous = xxh3_64_intdigest(salt.encode()) if salt else 0
    hashes = []
    view = memoryview(packed)
    for end in range(size, len(packed) + 1, size):
        previous = xxh3_64_intdigest(view[end - size : end], previous)
        hashes.append(previous)
    return hashes


def render(messages: Sequence[Any], *, tools: Any = None, system: Any = None) -> bytes:
    """Return a conversation as packed tokens, ChatML-like, ready for the assistant's answer."""
    parts: list[bytes] = []
    if tools:
        parts += _segment("tools", encode(orjson.dumps(tools).decode()))
    if system:
        parts += _segment("system", _content(system))
    for message in messages:
        if not isinstance(message, Mapping):
            parts += _segment("user", _content(message))
            continue
        body = _content(message.get("content"))
        if calls := message.get("tool_calls"):
            body += encode(orjson.dumps(calls).decode())
        parts += _segment(str(message.get("role", "user")), body)
    parts += [_START, encode("assistant")]
    return b"".join(parts)


def _segment(role: str, body: bytes) -> list[bytes]:
    return [_START, encode(role), body, _END]


def _content(content: Any) -> bytes:
    """Return a message's content as packed tokens; parts that are no text enter as their JSON."""
    if content is None:
        return b""
    if isinstance(content, str):
        return encode(content)
    if not isinstance(content, list):
        return encode(orjson.dumps(content).decode())
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        texts.append(text if isinstance(text, str) else orjson.dumps(part).decode())
    return encode("".join(texts))


class Voice:
    """What replicas say: an endless text of four-byte words, entered at a place per prompt."""

    def __init__(self, seed: int = 0) -> None:
        rng = Random(seed)  # noqa: S311 - words, not secrets
        letters = "bcdfghlmnprst", "aeiou", "bdgklmnprstx"
        words = [" " + "".join(rng.choice(group) for group in letters) for _ in range(_WORDS)]
        self._text = "".join(words).encode()
        self._seed = seed

    def answer(self, prompt: bytes, tokens: int, choice: int = 0) -> bytes:
        """Return the answer to a packed prompt, packed: ASCII, `tokens` tokens long."""
        at = (self._digest(prompt, choice) % _WORDS) * TOKEN_BYTES
        need = tokens * TOKEN_BYTES
        repeats = -(-(at + need) // len(self._text))
        return (self._text * repeats)[at : at + need]

    def length(self, prompt: bytes, choice: int = 0) -> int:
        """Return the tokens of an answer nobody limited: 16..527, by the prompt."""
        return 16 + (self._digest(prompt, choice) >> 16) % 512

    def _digest(self, prompt: bytes, choice: int) -> int:
        return xxh3_64_intdigest(prompt, (self._seed * 131 + choice) & (2**64 - 1))
