"""In token mode, too, the next turn begins with this prompt and its answer."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.answer import Said
from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.types import Api, Chain
from gateway.prompt.load import load_prompter
from gateway.prompt.tokens import TokenPrompter
from tests.unit.test_prompt_tokens import TEMPLATE, make_tokenizer

BLOCK = 16
USER = {"role": "user", "content": "say hello to the world " * 10}
NEXT = {"role": "user", "content": "and again, def add(a, b) " * 10}
ANSWER = "hello, the quick brown fox says:\n\n    return a + b\n" * 12


@pytest.fixture
def prompter(tmp_path: Path) -> TokenPrompter:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps({"chat_template": TEMPLATE}))
    loaded = load_prompter(tmp_path, 7, BytePrompter(1))
    assert isinstance(loaded, TokenPrompter)
    return loaded


def chain_of(prompter: TokenPrompter, *messages: dict[str, Any]) -> Chain:
    body = orjson.dumps({"model": "m", "messages": messages})
    return prompter.chain(parse_json(Api.CHAT, body))


def said(text: str) -> Said:
    answer = Said(Api.CHAT)
    answer.read(orjson.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))
    return answer


@pytest.mark.parametrize("known", [False, True], ids=["in parts", "as a whole"])
def test_the_next_turn_begins_with_the_prompt_and_its_answer(
    prompter: TokenPrompter, known: bool
) -> None:
    if known:
        prompter.render_whole()
    history = [USER]
    for _ in range(3):
        first = chain_of(prompter, *history)
        assert first.exact
        grown = prompter.grow(first, said(ANSWER), None)
        assert grown is not None
        history += [{"role": "assistant", "content": ANSWER}, NEXT]
        second = chain_of(prompter, *history)
        assert grown == second.hashes[: len(grown)]
        # all of the answer but its last, open block
        ids = prompter._encoder.encode(ANSWER)
        assert len(grown) == (first.tokens + len(ids)) // BLOCK


def test_of_a_long_answer_no_more_is_encoded_than_the_loop_can_wait_for(
    prompter: TokenPrompter, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = prompter._encoder
    monkeypatch.setattr(encoder, "inline_chars", 200)
    first = chain_of(prompter, USER)
    grown = prompter.grow(first, said(ANSWER), None)
    second = chain_of(prompter, USER, {"role": "assistant", "content": ANSWER}, NEXT)
    assert grown is not None
    assert grown == second.hashes[: len(grown)]
    assert len(grown) < (first.tokens + 200) // BLOCK


@pytest.mark.parametrize("text", ["\nhello " * 60, " hello" * 60])
def test_a_text_that_may_melt_into_what_is_before_it_is_not_guessed(
    prompter: TokenPrompter, text: str
) -> None:
    assert prompter.grow(chain_of(prompter, USER), said(text), None) is None


def test_a_prompt_chained_by_bytes_grows_by_bytes(prompter: TokenPrompter) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "what is it? " * 40}]}
    first = chain_of(prompter, asked)
    assert not first.exact
    grown = prompter.grow(first, said(ANSWER), None)
    assert grown is not None
    second = chain_of(prompter, asked, {"role": "assistant", "content": ANSWER}, NEXT)
    assert grown == second.hashes[: len(grown)]


@pytest.mark.parametrize("ended", ["by length", "by the end token"])
def test_a_block_that_the_last_sampled_token_ends_is_not_in_the_cache(
    prompter: TokenPrompter, ended: str
) -> None:
    first = chain_of(prompter, USER)
    full = BLOCK - len(first.tail) // 4 + BLOCK
    cuts = (ANSWER[:length] for length in range(1, len(ANSWER)))
    text = next(cut for cut in cuts if len(prompter._encoder.encode(cut)) == full)
    ids = prompter._encoder.encode(text)
    assert (first.tokens + len(ids)) % BLOCK == 0
    sampled = len(ids) + (ended == "by the end token")  # which is not in the text
    grown = prompter.grow(first, said(text), sampled)
    assert grown is not None
    assert len(grown) == (first.tokens + sampled - 1) // BLOCK
