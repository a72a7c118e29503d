"""A fast encoder gives the reference's ids on any text at all."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.engines import CANDIDATES, Encoder, load_encoder
from gateway.prompt.reference import Reference
from tests.tokenizer_kit import SPECIALS, write_tokenizer

PAIRS = [
    ("qwen", "fastokens"),
    ("qwen", "tiktoken"),
    ("llama3", "fastokens"),
    ("llama3", "tiktoken"),
    ("gpt2", "fastokens"),
    ("gpt2", "tiktoken"),
    ("metaspace", "fastokens"),
]
PIECES = (
    *SPECIALS,
    *("<think>", "</think>", "<|im_", "_end|>", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t"),
    *("\u0301", "\u0338", "\u3099", "\u200d", "\u00a0", "\u3000", "\ufeff", "\u0000", "1234567"),
    *("日本", "한국어", "\u1112\u1161", "🙂", "🏽", "é", "ﬁ", "\u2126", "def f(self):\n    return"),
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.text(st.characters(max_codepoint=0x7F), max_size=20),
    ),
    max_size=30,
).map("".join)


@cache
def encoders(kind: str, name: str) -> tuple[Encoder, Reference]:
    with tempfile.TemporaryDirectory() as directory:
        file = write_tokenizer(kind, Path(directory))
        encoder = load_encoder(file, {name: CANDIDATES[name]})
        assert encoder.name == name
        return encoder, Reference(file)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@settings(deadline=None)
@given(text=TEXTS)
def test_fast_ids_are_the_references(kind: str, name: str, text: str) -> None:
    encoder, reference = encoders(kind, name)

    assert encoder.encode(text) == reference.encode(text)
    assert encoder.wrap(encoder.encode(text)) == reference.encode_special(text)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@settings(deadline=None, max_examples=20)
@given(unit=st.sampled_from(PIECES), times=st.integers(1, 3_000), tail=TEXTS)
def test_fast_ids_of_long_runs_are_the_references(
    kind: str, name: str, unit: str, times: int, tail: str
) -> None:
    encoder, reference = encoders(kind, name)

    assert encoder.encode(unit * times + tail) == reference.encode(unit * times + tail)
