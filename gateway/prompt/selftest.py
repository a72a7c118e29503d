"""Whether a fast encoder equals the reference, and how fast an encoder is here.

Equality on a corpus is evidence, not proof: what an encoder takes is decided before (`bpe`), and a
text it fails on goes to the reference (`engines`). Must never pass an encoder that it did not run.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_lowercase
from time import thread_time
from typing import Final

Encode = Callable[[str], "array[int]"]

_ROUNDS: Final = 3  # the best one counts: a neighbour may have had the cache


class Expected:
    """The corpus with the reference's ids, made once for all candidates."""

    def __init__(self, reference: Encode, corpus: Mapping[str, Sequence[str]]) -> None:
        self._cases = [
            (name, text, reference(text)) for name, texts in corpus.items() for text in texts
        ]

    def __len__(self) -> int:
        return len(self._cases)

    def difference(self, candidate: Encode) -> str | None:
        """Return the name of the first texts that come out differently; None if all are equal.

        Everything runs twice: an encoder with a cache answers from it the second time.
        """
        for name, text, ids in self._twice():
            try:
                equal = candidate(text) == ids
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
                return f"{name} ({type(error).__name__})"
            if not equal:
                return name
        return None

    def _twice(self) -> Iterator[tuple[str, str, "array[int]"]]:
        yield from self._cases
        yield from reversed(self._cases)


def chars_per_s(encode: Encode, texts: Sequence[str]) -> float:
    """Return an encoder's speed on text like this that it has never seen, per second of one core.

    Letters are exchanged for others each time: a cache of words would answer for known ones.
    """
    spent = []
    for number in range(_ROUNDS):
        strange = [text.translate(_shift(number + 1)) for text in texts]
        begun = thread_time()
        for text in strange:
            encode(text)
        spent.append(thread_time() - begun)
    return sum(map(len, texts)) / max(min(spent), 1e-9)


def _shift(by: int) -> dict[int, int]:
    letters = ascii_lowercase
    return str.maketrans(letters, letters[by:] + letters[:by])
