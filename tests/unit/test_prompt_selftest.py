"""The self-test catches encoders that differ where encoders have been seen to differ."""

import unicodedata
from array import array
from collections.abc import Callable

import pytest

from gateway.prompt.corpus import samples
from gateway.prompt.reference import Reference
from gateway.prompt.selftest import Encode, Expected, chars_per_s
from tests.tokenizer_kit import write_tokenizer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(write_tokenizer("qwen", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Expected:
    words = reference.words(500)
    return Expected(reference.encode, samples(reference.added_tokens(), words))


def on_changed(change: Callable[[str], str]) -> Callable[[Reference], Encode]:
    return lambda reference: lambda text: reference.encode(change(text))


def _one_id_off(reference: Reference) -> Encode:
    def encode(text: str) -> "array[int]":
        ids = reference.encode(text)
        if len(ids) > 1_500:
            ids[-1] ^= 1
        return ids

    return encode


def _slips_from_its_cache(reference: Reference) -> Encode:
    seen: set[str] = set()

    def encode(text: str) -> "array[int]":
        ids = reference.encode(text)
        if text in seen and len(text) == 7:
            ids.append(0)
        seen.add(text)
        return ids

    return encode


def test_the_reference_equals_itself(reference: Reference, expected: Expected) -> None:
    assert len(expected) > 500
    assert expected.difference(reference.encode) is None


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (on_changed(str.lower), "prose"),
        (on_changed(lambda text: text.replace("\r\n", "\n")), "code"),
        (on_changed(lambda text: text.replace("\u0e2a", "s")), "scripts"),
        (on_changed(lambda text: text.replace("\ufe0f", "")), "emoji"),
        (on_changed(lambda text: unicodedata.normalize("NFKC", text)), "prose"),
        (on_changed(lambda text: text.replace("\u2adc", "?")), "combining marks"),
        (on_changed(lambda text: text.replace("\u180e", " ")), "white space"),
        (on_changed(lambda text: text.replace("\u1c89", "x")), "recent letters"),
        (on_changed(lambda text: text.replace("<|im_start|>", "<| im_start|>")), "special tokens"),
        (on_changed(lambda text: text.replace("aaaaaaaaaa", "aaaaaaaaa a")), "runs"),
        (_one_id_off, "every low character"),
        (_slips_from_its_cache, ""),
    ],
)
def test_a_wrong_encoder_is_found_out_by_the_texts_made_for_it(
    reference: Reference,
    expected: Expected,
    wrong: Callable[[Reference], Encode],
    where: str,
) -> None:
    found = expected.difference(wrong(reference))

    assert found is not None
    assert found.startswith(where)


def test_an_encoder_that_fails_is_a_difference_with_its_error(expected: Expected) -> None:
    class Panic(BaseException):
        """As Rust's through pyo3: no `Exception`."""

    def panic(text: str) -> "array[int]":
        raise Panic(text)

    assert expected.difference(panic) == "prose (Panic)"


def test_an_interrupt_is_not_taken_for_a_failure(expected: Expected) -> None:
    def interrupted(_: str) -> "array[int]":
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        expected.difference(interrupted)


def test_speed_is_never_that_of_a_text_seen_before() -> None:
    seen: list[str] = []

    def encode(text: str) -> "array[int]":
        seen.append(text)
        return array("I")

    chars_per_s(encode, ["known words", "more of them"])

    assert len(set(seen)) == len(seen) > 2
    assert not {"known words", "more of them"} & set(seen)
    assert {len(text) for text in seen} == {11, 12}


def test_speed_is_positive_even_of_nothing() -> None:
    assert chars_per_s(lambda text: array("I", map(ord, text)), ["abc" * 100]) > 0
    assert chars_per_s(lambda _: array("I"), [""]) == 0
