"""Hugging Face `tokenizers`: what every other way of encoding is measured against.

Right by definition (engines load the same file with the same library) and slow: 1-3 MB/s. Its
`encode` holds the interpreter's lock for the whole of a text, `encode_batch_fast` lets go of it:
only the latter is used here.
"""

import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

# One text is no batch: threads of its own would only make a later fork unsafe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

_SLICE: Final = 16_384  # ids turned into an array at once: the lock is held for 0.2 ms


class Reference:
    """A loaded `tokenizer.json`. Safe to call from several threads."""

    name = "tokenizers"

    def __init__(self, file: Path) -> None:
        """Load it.

        Raises:
            Exception: whatever the library raises about the file.
        """
        self.json = file.read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(self.json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.before, self.after = self._affixes("a")

    def encode(self, text: str) -> "array[int]":
        """Return the ids of a text that has its special tokens already."""
        return self._encode(text, special=False)

    def encode_special(self, text: str) -> "array[int]":
        """Return the ids with the special tokens that the post-processor adds."""
        return self._encode(text, special=True)

    def definition(self) -> dict[str, Any]:
        """Return the file's content."""
        loaded: dict[str, Any] = orjson.loads(self.json)
        return loaded

    def added_tokens(self) -> list[str]:
        """Return the tokens that are found in text before anything else."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def words(self, most: int) -> list[str]:
        """Return the texts of tokens spread evenly over the vocabulary, those that are whole."""
        size = self._tokenizer.get_vocab_size()
        ids = [[number] for number in range(0, size, max(1, -(-size // most)))]
        texts: list[str] = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        return [text for text in texts if text and "\ufffd" not in text]

    def wraps(self, texts: Iterable[str]) -> bool:
        """Return whether special tokens are only ever added before and after all of a text."""
        return all(
            self.encode_special(text) == self.before + self.encode(text) + self.after
            for text in texts
        )

    def _encode(self, text: str, *, special: bool) -> "array[int]":
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return to_array(encoded[0].ids)

    def _affixes(self, text: str) -> "tuple[array[int], array[int]]":
        plain, whole = self.encode(text), self.encode_special(text)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return array("I"), array("I")  # `wraps` will find out


def to_array(ids: Sequence[int]) -> "array[int]":
    """Return ids as unsigned 32-bit words, made in slices: other threads run in between."""
    if len(ids) <= _SLICE:
        return array("I", ids)
    made, rest = array("I"), iter(ids)
    while part := list(islice(rest, _SLICE)):
        made.extend(array("I", part))
    return made
