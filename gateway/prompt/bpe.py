"""A `tokenizer.json` converted to `tiktoken`: byte-level BPE behind one split regex.

Qwen's, Llama 3's, GLM-4's and their kin are of this form. Whatever is not certain to mean the
same in tiktoken is refused here with its reason; the self-test then judges what was converted.
Must never approximate.
"""

import unicodedata
from array import array
from itertools import pairwise
from typing import Any, Final

import tiktoken

from gateway.prompt.reference import to_array
from gateway.prompt.selftest import Encode

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the ByteLevel pre-tokenizer splits by when it splits (`use_regex`)."""


class Unconvertible(ValueError):
    """The tokenizer is of another kind. The message says which part."""


def convert(definition: dict[str, Any], reference: Encode) -> Encode:
    """Return the function that encodes as this `tokenizer.json` does.

    `reference` gets what must be normalized first: its Unicode tables are older than Python's, and
    a mark after a special token must not compose with the token's last letter.

    Raises:
        Unconvertible: it has a part that tiktoken has nothing for.
    """
    added = _added(definition)
    composes = _composes(definition, added)
    specials = {token["content"]: int(token["id"]) for token in added}
    encoding = tiktoken.Encoding(
        "converted",
        pat_str=_pattern(definition.get("pre_tokenizer")),
        mergeable_ranks=_ranks(definition["model"], specials),
        special_tokens=specials,
    )

    def encode(text: str) -> "array[int]":
        if not text.isascii():
            text.encode()  # tiktoken would replace half a surrogate pair, the reference refuses it
            if composes and not unicodedata.is_normalized("NFC", text):
                return reference(text)
        return to_array(encoding.encode(text, allowed_special="all"))

    return encode


def _added(definition: dict[str, Any]) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = definition.get("added_tokens") or []
    for token in added:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise Unconvertible(f"the added token {token['content']!r} has `{flag}`")
    contents = sorted(str(token["content"]) for token in added)
    for first, second in pairwise(contents):
        if second.startswith(first):  # which of them is found first differs
            raise Unconvertible(f"the added token {first!r} begins another one")
    return added


def _composes(definition: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Return whether text is put into Unicode's composed form first."""
    normalizer = definition.get("normalizer")
    if normalizer is None:
        return False
    if normalizer.get("type") != "NFC":
        raise Unconvertible(f"the normalizer {normalizer.get('type')}")
    if any(token.get("normalized") for token in added):
        raise Unconvertible("an added token is sought in normalized text")
    return True


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    steps = [pre_tokenizer] if pre_tokenizer is not None else []
    if pre_tokenizer is not None and pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise Unconvertible("the pre-tokenizer does not end in plain bytes")
    regexes = [_split(step) for step in steps[:-1]]
    if steps[-1].get("use_regex", True):
        regexes.append(_GPT2)
    if len(regexes) != 1:
        raise Unconvertible(f"{len(regexes)} split patterns")
    return regexes[0]


def _split(step: dict[str, Any]) -> str:
    regex = (step.get("pattern") or {}).get("Regex")
    if (
        step.get("type") != "Split"
        or step.get("behavior") != "Isolated"
        or step.get("invert")
        or not isinstance(regex, str)
    ):
        raise Unconvertible("a pre-tokenizer that is no plain split by a regex")
    return regex


def _ranks(model: dict[str, Any], specials: dict[str, int]) -> dict[bytes, int]:
    """Return token bytes -> id. tiktoken merges by the lowest number: ids must be in merge order."""
    if model.get("type") != "BPE":
        raise Unconvertible(f"the model {model.get('type')}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise Unconvertible(f"the model's `{option}`")
    vocab: dict[str, int] = model["vocab"]
    letters = _byte_letters()
    ranks: dict[bytes, int] = {}
    for letter, byte in letters.items():
        if letter not in vocab:
            raise Unconvertible("not every byte has a token")
        ranks[bytes([byte])] = vocab[letter]
    last = max(ranks.values())
    for merge in model["merges"]:
        token = "".join(merge if isinstance(merge, list) else merge.split(" "))
        data = bytes(letters[letter] for letter in token)
        if data in ranks:
            raise Unconvertible("two merges make one token")
        if vocab[token] <= last:
            raise Unconvertible("ids are not in the order of merges")
        last = ranks[data] = vocab[token]
    if len(ranks) + len(vocab.keys() & specials.keys()) != len(vocab):
        raise Unconvertible("a token that no merge makes")
    return ranks


def _byte_letters() -> dict[str, int]:
    """Return the letters that stand for bytes in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
