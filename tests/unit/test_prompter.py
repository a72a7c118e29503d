"""Chains from requests, and token counts learnt from what engines report."""

from array import array

import msgspec
import orjson
import pytest

from gateway.core.prompter import MAX_CONVERSATIONS, MAX_MODELS, BytePrompter, Prompter
from gateway.core.request import ParsedRequest, parse_json
from gateway.core.saved import Piece, Ratios
from gateway.core.token_fit import DEFAULT_RATIO
from gateway.core.types import Api, Chain


def completion(prompt: object, model: str = "m") -> ParsedRequest:
    return parse_json(Api.COMPLETIONS, orjson.dumps({"model": model, "prompt": prompt}))


def relative_error(chain: Chain, tokens: int) -> float:
    return abs(chain.tokens - tokens) / tokens


def test_it_is_a_prompter() -> None:
    prompter: Prompter = BytePrompter(1)
    assert prompter.chain(completion("x" * 1000)).hashes


def test_another_block_size_makes_the_chains_of_a_prompter_born_with_it() -> None:
    prompter, other = BytePrompter(1, 256), BytePrompter(1, 64)
    request = completion("some text " * 5_000)
    before = prompter.chain(request)
    prompter.learn("m", "", before, 20_000)

    assert not prompter.use_block_bytes(256)
    assert prompter.use_block_bytes(64)
    after, expected = prompter.chain(request), other.chain(request)
    assert (after.hashes, after.tail, after.block_bytes) == (
        *(expected.hashes, expected.tail),
        64,
    )
    assert before.hashes != after.hashes
    assert relative_error(after, 20_000) < 0.01  # what was learnt of the model stays


def test_unknown_model_counts_four_bytes_a_token() -> None:
    chain = BytePrompter(1).chain(completion("x" * 10_000))
    assert chain.tokens == round(chain.text_bytes / DEFAULT_RATIO)
    assert chain.tokens_per_block == 64.0
    assert not chain.exact


def test_salt_and_isolation_give_other_chains() -> None:
    request = completion("x" * 1000)
    plain = BytePrompter(1).chain(request)
    assert BytePrompter(2).chain(request).hashes != plain.hashes
    assert BytePrompter(1).chain(request, isolation="team").hashes != plain.hashes


def test_any_salt_is_taken_as_64_bits() -> None:
    assert BytePrompter(-1).chain(completion("x" * 300)).hashes


def test_next_turn_is_counted_by_what_its_conversation_taught() -> None:
    prompter = BytePrompter(1)
    talk = "Ein langes deutsches Gespräch. " * 300
    first = prompter.chain(completion(talk))
    prompter.learn("m", "chat", first, round(first.text_bytes / 2.6))
    longer = prompter.chain(completion(talk + "Und mehr davon. " * 20))
    assert relative_error(longer, round(longer.text_bytes / 2.6)) < 0.01


def test_conversations_that_part_late_keep_their_own_ratio() -> None:
    prompter = BytePrompter(1)
    shared = "system prompt " * 200
    one = prompter.chain(completion(shared + "a" * 10_000))
    two = prompter.chain(completion(shared + "b" * 10_000))
    for _ in range(5):
        prompter.learn("m", "chat", one, round(one.text_bytes / 5))
        prompter.learn("m", "chat", two, round(two.text_bytes / 2))
    again_one = prompter.chain(completion(shared + "a" * 10_000 + "more"))
    again_two = prompter.chain(completion(shared + "b" * 10_000 + "more"))
    assert relative_error(again_one, round(again_one.text_bytes / 5)) < 0.01
    assert relative_error(again_two, round(again_two.text_bytes / 2)) < 0.01


def test_new_conversation_uses_the_model_and_class() -> None:
    prompter = BytePrompter(1)
    for turn in range(40):
        coding = prompter.chain(completion(f"{turn} def x" * 1000))
        prompter.learn("m", "coding", coding, round(coding.text_bytes / 3))
        chat = prompter.chain(completion(f"{turn} hello " * 1000))
        prompter.learn("m", "chat", chat, round(chat.text_bytes / 5))
    fresh = completion("something new " * 1000)
    size = prompter.chain(fresh).text_bytes
    assert relative_error(prompter.chain(fresh, cls="coding"), round(size / 3)) < 0.01
    assert relative_error(prompter.chain(fresh, cls="chat"), round(size / 5)) < 0.01
    assert size / 5 < prompter.chain(fresh).tokens < size / 3
    assert prompter.chain(completion("something new " * 100, model="n")).tokens_per_block == 64.0


@pytest.mark.parametrize("prompt", [[*range(5000)], [[*range(5000)]]])
def test_token_ids_are_counted_as_they_are(prompt: object) -> None:
    prompter = BytePrompter(1)
    text = prompter.chain(completion("x" * 4000))
    prompter.learn("m", "chat", text, round(text.text_bytes / 2))
    assert relative_error(prompter.chain(completion(prompt)), 5000) < 0.01


@pytest.mark.parametrize("tokens", [0, -5])
def test_nonsense_reports_teach_nothing(tokens: int) -> None:
    prompter = BytePrompter(1)
    chain = prompter.chain(completion("x" * 1000))
    prompter.learn("m", "chat", chain, tokens)
    assert prompter.chain(completion("x" * 1000)).tokens == chain.tokens


def test_absurd_reports_are_held_to_what_text_can_be() -> None:
    prompter = BytePrompter(1)
    chain = prompter.chain(completion("x" * 1000))
    prompter.learn("m", "chat", chain, 10**9)
    assert prompter.chain(completion("x" * 1000)).tokens <= 4 * chain.text_bytes
    prompter.learn("m", "chat", Chain(chain.hashes, 1.0, 0, text_bytes=0), 10)


@pytest.mark.parametrize("shared", ["", "the same first block in every prompt " * 8])
def test_what_a_template_adds_to_short_prompts_is_not_laid_on_long_ones(shared: str) -> None:
    prompter = BytePrompter(1)
    for _ in range(20):
        hi = prompter.chain(completion(shared + "hi"))
        prompter.learn("m", "chat", hi, 36 + hi.text_bytes // 4)
    long = prompter.chain(completion(shared + "x" * 3500))
    assert relative_error(long, 36 + long.text_bytes // 4) < 0.01
    hi = prompter.chain(completion(shared + "hi"))
    assert hi.tokens == pytest.approx(36 + hi.text_bytes / 4, abs=1)


def test_a_long_conversation_keeps_its_ratio_however_many_short_prompts_share_its_start() -> None:
    prompter = BytePrompter(1)
    start = "the same first block in every prompt " * 8
    talk = completion(start + "y" * 9000)
    prompter.learn("m", "chat", prompter.chain(talk), 3000)
    for _ in range(200):
        prompter.learn("m", "chat", prompter.chain(completion(start + "hi")), 190)
    assert prompter.chain(talk).tokens == 3000


def test_shortest_prompt_has_one_token() -> None:
    assert BytePrompter(1).chain(completion("")).tokens >= 1


def test_tables_never_outgrow_their_caps() -> None:
    prompter = BytePrompter(1)
    chain = prompter.chain(completion("x" * 300))
    for number in range(max(MAX_CONVERSATIONS, MAX_MODELS) + 100):
        prompter.learn(
            f"m{number}",
            "chat",
            Chain(chain.hashes.__class__("Q", [number]), 1.0, 1250, text_bytes=5000),
            1250,
        )
    assert len(prompter._conversations) == MAX_CONVERSATIONS
    assert len(prompter._models) == MAX_MODELS


def test_models_no_longer_asked_for_make_room_oldest_first() -> None:
    prompter = BytePrompter(1)
    chain = Chain(array("Q", [1]), 1.0, 5, text_bytes=20)
    for number in range(MAX_MODELS):
        prompter.learn(f"m{number}", "chat", chain, 5)
    assert ("m0", "chat") not in prompter._models
    assert (f"m{MAX_MODELS - 1}", "chat") in prompter._models


def test_what_was_learnt_comes_back_from_what_was_written() -> None:
    old, new = BytePrompter(7), BytePrompter(7)
    talk = "Ein langes Gespräch. " * 400
    for text, ratio in (("short", 1.5), ("middling " * 100, 3.0), (talk, 2.6)):
        chain = old.chain(completion(text))
        old.learn("m", "chat", chain, round(chain.text_bytes / ratio))
    learnt = [msgspec.msgpack.decode(piece, type=Piece) for piece in old.export()]
    new.restore([piece for piece in learnt if isinstance(piece, Ratios)])
    for text in ("short", "other " * 200, talk, talk + "more", "unlike it " * 2000):
        asked = completion(text)
        assert new.chain(asked, cls="chat").tokens == old.chain(asked, cls="chat").tokens
