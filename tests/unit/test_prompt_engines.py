"""Which encoder is taken, what is said about it, and what it does where it fails."""

import logging
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.prompt.engines import (
    CANDIDATES,
    INLINE_MAX_CHARS,
    CannotEncode,
    Encoder,
    NotUsable,
    load_encoder,
)
from gateway.prompt.reference import Reference
from gateway.prompt.selftest import Encode
from tests.tokenizer_kit import write_tokenizer

TEXT = "<|im_start|>user\nIt's 12345 日本 e\u0301 <|im_end|>\n"
TIKTOKEN = {"tiktoken": CANDIDATES["tiktoken"]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer("llama3", tmp_path_factory.mktemp("model"))


def _off_by_one(reference: Reference) -> Encode:
    return lambda text: array("I", (number + 1 for number in reference.encode(text)))


def _missing(_: Reference) -> Encode:
    raise ImportError


def _unloadable(_: Reference) -> Encode:
    raise RuntimeError("no such version")


def _refusing(_: Reference) -> Encode:
    raise NotUsable("two split patterns")


@pytest.mark.parametrize("name", list(CANDIDATES))
@pytest.mark.parametrize("kind", ["qwen", "llama3", "gpt2"])
def test_byte_level_models_get_a_fast_encoder(kind: str, name: str, tmp_path: Path) -> None:
    written = write_tokenizer(kind, tmp_path)
    encoder = load_encoder(written, {name: CANDIDATES[name]})

    assert encoder.name == name
    assert encoder.encode(TEXT) == Reference(written).encode(TEXT)
    assert 0 < encoder.inline_chars <= INLINE_MAX_CHARS


def test_the_first_candidate_that_is_exact_is_taken(file: Path) -> None:
    encoder = load_encoder(file, {"wrong": _off_by_one, **TIKTOKEN, "never": _unloadable})

    assert encoder.name == "tiktoken"


def test_a_wrong_converter_is_never_taken_and_one_line_says_so(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "radixgate.prompt"):
        encoder = load_encoder(file, {"ours": _off_by_one})

    assert encoder.name == "tokenizers"
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "encoded by tokenizers at" in line.message
    assert "(ours: differs on prose)" in line.message
    assert str(file) in line.message


def test_every_reason_is_in_the_one_line(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    candidates = {"a": _missing, "b": _unloadable, "c": _refusing}
    with caplog.at_level(logging.INFO, "radixgate.prompt"):
        load_encoder(file, candidates)

    (line,) = caplog.records
    assert line.message.endswith(
        "(a: not installed; b: does not load it (RuntimeError: no such version); "
        "c: two split patterns)"
    )


def test_what_is_only_not_installed_is_no_warning(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "radixgate.prompt"):
        load_encoder(file, {"a": _missing})

    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_sentencepiece_falls_back_from_tiktoken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_tokenizer("metaspace", tmp_path)
    encoder = load_encoder(written, TIKTOKEN)

    assert encoder.name == "tokenizers"
    assert "tiktoken: the normalizer Sequence" in caplog.text


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")

    with pytest.raises(Exception, match="Model missing"):
        load_encoder(broken)


class Panic(BaseException):
    """As Rust's through pyo3: no `Exception`."""


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_text_that_a_fast_encoder_fails_on_is_the_references(
    file: Path, error: type[BaseException]
) -> None:
    reference = Reference(file)

    def fails(text: str) -> "array[int]":
        raise error(text)

    encoder = Encoder("fast", fails, reference, 1e6)

    assert encoder.encode(TEXT) == reference.encode(TEXT)


def test_a_megabyte_of_one_letter_is_encoded_whatever_regexes_do(file: Path) -> None:
    text = " " * 1_000_000
    ids = load_encoder(file, TIKTOKEN).encode(text)

    assert ids == Reference(file).encode(text)


@pytest.mark.parametrize("name", [*CANDIDATES, "tokenizers"])
def test_half_a_surrogate_pair_cannot_be_encoded(file: Path, name: str) -> None:
    encoder = load_encoder(file, {key: CANDIDATES[key] for key in CANDIDATES if key == name})
    assert encoder.name == name

    with pytest.raises(CannotEncode):
        encoder.encode("x\ud800")


def test_an_interrupt_goes_through(file: Path) -> None:
    def interrupted(_: str) -> "array[int]":
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Encoder("fast", interrupted, Reference(file), 1e6).encode("x")


@pytest.mark.parametrize("name", [*CANDIDATES, "tokenizers"])
def test_threads_that_encode_at_once_get_the_references_ids(file: Path, name: str) -> None:
    encoder = load_encoder(file, {key: CANDIDATES[key] for key in CANDIDATES if key == name})
    reference = Reference(file)
    texts = [f"{TEXT} {number} word{number} {'x' * number}\n" * 20 for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(encoder.encode, texts * 3))

    assert found == [reference.encode(text) for text in texts] * 3


def test_wrapped_ids_are_those_of_a_completion(file: Path) -> None:
    encoder, reference = load_encoder(file), Reference(file)

    assert encoder.wrap(encoder.encode(TEXT)) == reference.encode_special(TEXT)
    assert encoder.wrap(array("I")) == reference.encode_special("")


def test_special_tokens_inside_cannot_be_wrapped(file: Path) -> None:
    reference = Reference(file)
    reference.after = array("I", [7])
    encoder = Encoder("x", reference.encode, reference, 1e6)

    with pytest.raises(CannotEncode):
        encoder.wrap(array("I", [1]))


def test_slow_encoders_encode_less_in_place(file: Path) -> None:
    reference = Reference(file)

    assert Encoder("x", reference.encode, reference, 1e6).inline_chars == 1_000
    assert Encoder("x", reference.encode, reference, 1e9).inline_chars == INLINE_MAX_CHARS
