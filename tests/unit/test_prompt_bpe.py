"""What converts to tiktoken, and what must not."""

from array import array
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

from gateway.prompt.bpe import Unconvertible, convert
from tests.tokenizer_kit import tokenizer_json

TEXTS = [
    "It's 1234567 o'clock; THEY'LL run  \n\n\tfor (i=0;;) {}\r\n",
    "<|im_start|>user\n日本語 🙂 naïve é<|im_end|>\n<think>\n</think>x<|im_en",
    "e\u0301 \u2126 <|im_end|>\u0338 \ufb01",
    "",
]


def definition(kind: str) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads(tokenizer_json(kind))
    return loaded


def reference(kind: str) -> Callable[[str], "array[int]"]:
    tokenizer = Tokenizer.from_str(tokenizer_json(kind))
    return lambda text: array("I", tokenizer.encode(text, add_special_tokens=False).ids)


def no_reference(text: str) -> "array[int]":
    raise AssertionError(f"the reference was asked: {text!r}")


@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
def test_byte_level_bpe_converts_exactly(kind: str) -> None:
    encode = convert(definition(kind), no_reference)

    for text in TEXTS:
        assert encode(text) == reference(kind)(text)


def test_text_that_must_be_composed_first_is_the_references() -> None:
    asked: list[str] = []

    def ask(text: str) -> "array[int]":
        asked.append(text)
        return reference("qwen")(text)

    encode = convert(definition("qwen"), ask)
    for text in TEXTS:
        assert encode(text) == reference("qwen")(text)

    assert asked == [TEXTS[2]]


def test_half_a_surrogate_pair_is_an_error_and_not_replaced() -> None:
    with pytest.raises(UnicodeEncodeError):
        convert(definition("llama3"), no_reference)("x\ud800")


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(definition: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = definition
        for name in parents:
            place = place[int(name) if name.isdigit() else name]
        place[int(last) if last.isdigit() else last] = value

    return change


def _two_splits(definition: dict[str, Any]) -> None:
    steps = definition["pre_tokenizer"]["pretokenizers"]
    steps.insert(0, steps[0])


def _unmerged_token(definition: dict[str, Any]) -> None:
    vocab = definition["model"]["vocab"]
    vocab["zqzqzq"] = len(vocab) + 10


def _swapped_ids(definition: dict[str, Any]) -> None:
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    first, second = ("".join(merge) for merge in merges[10:12])
    vocab[first], vocab[second] = vocab[second], vocab[first]


def _missing_byte(definition: dict[str, Any]) -> None:
    del definition["model"]["vocab"]["!"]


def _one_begins_another(definition: dict[str, Any]) -> None:
    definition["added_tokens"][1]["content"] = definition["added_tokens"][2]["content"] + "x"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("model.type", "Unigram"), "the model Unigram"),
        (_set("model.dropout", 0.1), "dropout"),
        (_set("model.byte_fallback", True), "byte_fallback"),
        (_set("model.continuing_subword_prefix", "##"), "continuing_subword_prefix"),
        (_set("normalizer", {"type": "NFKC"}), "the normalizer NFKC"),
        (_set("pre_tokenizer", None), "plain bytes"),
        (_set("pre_tokenizer.pretokenizers.1.add_prefix_space", True), "plain bytes"),
        (_set("pre_tokenizer.pretokenizers.1.use_regex", True), "2 split patterns"),
        (_set("pre_tokenizer.pretokenizers.0.behavior", "Removed"), "plain split"),
        (_set("pre_tokenizer.pretokenizers.0.invert", True), "plain split"),
        (_set("pre_tokenizer.pretokenizers.0.pattern", {"String": " "}), "plain split"),
        (_set("pre_tokenizer.pretokenizers.0.type", "Digits"), "plain split"),
        (_set("added_tokens.0.lstrip", True), "lstrip"),
        (_set("added_tokens.0.normalized", True), "normalized text"),
        (_two_splits, "2 split patterns"),
        (_unmerged_token, "no merge makes"),
        (_swapped_ids, "order of merges"),
        (_missing_byte, "not every byte"),
        (_one_begins_another, "begins another"),
    ],
)
def test_what_tiktoken_has_nothing_for_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    other = definition("qwen")
    change(other)

    with pytest.raises(Unconvertible, match=reason):
        convert(other, no_reference)


def test_sentencepiece_is_refused() -> None:
    with pytest.raises(Unconvertible, match="the normalizer Sequence"):
        convert(definition("metaspace"), no_reference)
