"""Encoders: text to token ids, exactly as the engine's tokenizer does, as fast as that allows.

Candidates, fastest first, each used only after it gave the reference's ids on a built-in corpus:
- `fastokens`: 18 MB/s on new code, 380 on prose, no lock held, its cache of words stays under 300 MB.
- `tiktoken`, by conversion (`bpe`): 12-20 MB/s, no lock held, no cache.
Tried and left out: `kitoken` ends the process on a megabyte of spaces (its regex overflows the
stack), `gigatoken`'s cache grew by 8 MB per megabyte of new words. Must never return ids that the
reference would not.
"""

import logging
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gateway.prompt.corpus import CODE, PROSE, samples
from gateway.prompt.reference import Reference
from gateway.prompt.selftest import Encode, Expected, chars_per_s

_log = logging.getLogger("radixgate.prompt")

INLINE_S: Final = 0.001
"""Encoding that takes no longer happens where it is asked for: a thread costs 0.1 ms itself."""

INLINE_MAX_CHARS: Final = 8_192
_VOCABULARY_WORDS: Final = 6_000
_MISSING: Final = "not installed"


class CannotEncode(ValueError):
    """The text has no encoding (half a surrogate pair), or the library failed on it."""


class NotUsable(Exception):
    """A candidate cannot take this tokenizer. The message says why."""


class Encoder:
    """How a model's text becomes ids. Safe to call from several threads."""

    __slots__ = ("_encode", "_reference", "chars_per_s", "inline_chars", "name", "wraps")

    def __init__(self, name: str, encode: Encode, reference: Reference, rate: float) -> None:
        self.name = name
        """The library that encodes."""
        self.chars_per_s = rate
        """Its speed, as measured when it was loaded."""
        self.inline_chars = min(INLINE_MAX_CHARS, int(rate * INLINE_S))
        """Texts up to this, together, may be encoded on the event loop."""
        self._encode = encode
        self._reference = reference
        self.wraps = reference.wraps((PROSE, CODE, ""))
        """Whether special tokens are only added around a text, never inside."""

    def encode(self, text: str) -> "array[int]":
        """Return the ids of a text whose special tokens are written out (a rendered template).

        Raises:
            CannotEncode: there are none.
        """
        try:
            return self._encode(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - a panic in Rust is no Exception
            return self._by_reference(text)

    def wrap(self, ids: "array[int]") -> "array[int]":
        """Return ids with the special tokens that completions get (`add_special_tokens`).

        Raises:
            CannotEncode: this tokenizer adds them elsewhere than around the text.
        """
        if not self.wraps:
            raise CannotEncode("special tokens are not added around the text")
        return self._reference.before + ids + self._reference.after

    def _by_reference(self, text: str) -> "array[int]":
        """A fast library may give up where the reference does not (megabytes of one letter)."""
        try:
            return self._reference.encode(text)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise CannotEncode(type(error).__name__) from None


Candidate = Callable[[Reference], Encode]


def _fastokens(reference: Reference) -> Encode:
    from fastokens import Tokenizer  # noqa: PLC0415 - an optional extra

    tokenizer = Tokenizer.from_json_str(reference.json)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> "array[int]":
        ids = array("I")
        ids.frombytes(tokenizer.encode_batch_flat([text])[0])
        return ids

    return encode


def _tiktoken(reference: Reference) -> Encode:
    from gateway.prompt.bpe import Unconvertible, convert  # noqa: PLC0415 - an optional extra

    try:
        return convert(reference.definition(), reference.encode)
    except Unconvertible as reason:
        raise NotUsable(str(reason)) from None


CANDIDATES: Final[Mapping[str, Candidate]] = {"fastokens": _fastokens, "tiktoken": _tiktoken}
"""Name -> how to make it, in the order of preference."""


def load_encoder(file: Path, candidates: Mapping[str, Candidate] = CANDIDATES) -> Encoder:
    """Return the fastest exact encoder for a `tokenizer.json`; logs which, and why no faster one.

    Takes a second for a large vocabulary.

    Raises:
        Exception: whatever the reference raises about the file.
    """
    reference = Reference(file)
    judge = _Judge(reference)
    passed_over: list[str] = []
    for name, make in candidates.items():
        try:
            encode = _made(make, reference)
            judge.accept(encode)
        except NotUsable as reason:
            passed_over.append(f"{name}: {reason}")
            continue
        return _taken(name, encode, reference, file, passed_over)
    return _taken(reference.name, reference.encode, reference, file, passed_over)


class _Judge:
    """The self-test of one tokenizer's candidates."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._expected: Expected | None = None

    def accept(self, encode: Encode) -> None:
        """Return if the candidate gives the reference's ids.

        Raises:
            NotUsable: it does not; the message names the texts.
        """
        reference = self._reference
        if self._expected is None:  # only now: it takes 0.1 s
            words = reference.words(_VOCABULARY_WORDS)
            self._expected = Expected(reference.encode, samples(reference.added_tokens(), words))
        where = self._expected.difference(encode)
        if where is not None:
            raise NotUsable(f"differs on {where}")


def _made(make: Candidate, reference: Reference) -> Encode:
    try:
        return make(reference)
    except (NotUsable, KeyboardInterrupt, SystemExit):
        raise
    except ImportError:
        raise NotUsable(_MISSING) from None
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        raise NotUsable(f"does not load it ({type(error).__name__}: {error})") from None


def _taken(
    name: str, encode: Encode, reference: Reference, file: Path, passed_over: list[str]
) -> Encoder:
    reference.json = ""  # ten megabytes that nobody reads again
    rate = chars_per_s(encode, (PROSE, CODE))
    encoder = Encoder(name, encode, reference, rate)
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    refused = [reason for reason in passed_over if not reason.endswith(_MISSING)]
    level = logging.WARNING if refused and name == reference.name else logging.INFO
    _log.log(level, "%s: encoded by %s at %.1f MB/s%s", file, name, rate / 1e6, why)
    return encoder
