"""The reference: Hugging Face `tokenizers`, by the call that lets go of the interpreter's lock."""

from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.prompt.reference import Reference, to_array
from tests.tokenizer_kit import KINDS, SPECIALS, tokenizer_json, write_tokenizer

TEXT = "<|im_start|>user\nIt's 12345 日本 <think>e\u0301<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_the_librarys_encode(kind: str, special: bool, tmp_path: Path) -> None:
    reference = Reference(write_tokenizer(kind, tmp_path))
    expected = Tokenizer.from_str(tokenizer_json(kind)).encode(TEXT, add_special_tokens=special)
    encode = reference.encode_special if special else reference.encode

    assert encode(TEXT).tolist() == expected.ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json("qwen"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    plain = Tokenizer.from_str(tokenizer_json("qwen")).encode(TEXT, add_special_tokens=False).ids

    assert Reference(file).encode(TEXT).tolist() == plain


def test_special_tokens_of_the_post_processor_are_known_as_affixes(tmp_path: Path) -> None:
    reference = Reference(write_tokenizer("llama3", tmp_path))
    begin = Tokenizer.from_str(tokenizer_json("llama3")).token_to_id(SPECIALS[0])

    assert (reference.before.tolist(), reference.after.tolist()) == ([begin], [])
    assert reference.wraps(["", "a", TEXT])


def test_special_tokens_inside_are_no_affixes(tmp_path: Path) -> None:
    reference = Reference(write_tokenizer("llama3", tmp_path))
    reference.before = array("I")

    assert not reference.wraps(["a"])


def test_words_are_whole_texts_from_all_over_the_vocabulary(tmp_path: Path) -> None:
    reference = Reference(write_tokenizer("qwen", tmp_path))
    words = reference.words(200)

    assert 50 < len(words) <= 200
    assert all(word and "\ufffd" not in word for word in words)


def test_long_lists_of_ids_become_the_same_array() -> None:
    ids = list(range(100_000))

    assert to_array(ids) == array("I", ids)
    assert to_array([]) == array("I")
