"""Answers: how long, how they end, and what their counts say."""

from typing import Any

import pytest

from gateway.sim import tokens
from gateway.sim.answer import Answer, compose
from gateway.sim.asked import CHAT, COMPLETIONS, Limits, parse

LIMITS = Limits("m", 1000)
VOICE = tokens.Voice(0)
HI = [{"role": "user", "content": "hi"}]


def answer(api: str = CHAT, **fields: Any) -> Answer:
    given = {"messages": HI} if api == CHAT else {}
    asked = parse(api, given | fields, LIMITS)
    return compose(asked, LIMITS, VOICE, 16, answer_id="id", now=1)


def test_max_tokens_is_the_length() -> None:
    choice = answer(max_tokens=7).choices[0]

    assert (choice.job.output_tokens, choice.finish, len(choice.text)) == (7, "length", 28)


def test_without_a_limit_the_prompt_decides_and_the_end_is_a_stop() -> None:
    one, same = answer().choices[0], answer().choices[0]

    assert one.job.output_tokens == same.job.output_tokens >= 16
    assert one.finish == "stop"


def test_the_models_length_ends_what_nothing_else_does() -> None:
    tight = Limits("m", 20)
    asked = parse(CHAT, {"messages": HI}, tight)
    choice = compose(asked, tight, VOICE, 16, answer_id="id", now=1).choices[0]

    assert choice.job.output_tokens == 20 - choice.job.prompt_tokens
    assert choice.finish == "length"


def test_a_stop_string_cuts_text_and_tokens() -> None:
    text = answer(max_tokens=50).choices[0].text
    stop = text[10:13]
    choice = answer(max_tokens=50, stop=stop).choices[0]
    at = text.index(stop)

    assert choice.full_text == text[:at]
    assert (choice.finish, choice.stop_reason) == ("stop", stop)
    assert choice.job.output_tokens == (at + 2) // 4 + 1


def test_unsent_gives_each_token_once() -> None:
    choice = answer(max_tokens=6).choices[0]
    parts = []
    for produced in (1, 1, 4, 6):
        choice.produced = produced
        parts.append(choice.unsent())

    assert "".join(parts) == choice.text
    assert parts[1] == ""


@pytest.mark.parametrize("n", [1, 2])
def test_every_prompt_gets_n_choices(n: int) -> None:
    made = answer(COMPLETIONS, prompt=["a", "b"], n=n, echo=True)

    assert [choice.index for choice in made.choices] == list(range(2 * n))
    assert [made.echo(choice) for choice in made.choices] == ["a"] * n + ["b"] * n
    assert made.prompt_tokens == 2


def test_hashes_cover_prompt_and_answer() -> None:
    choice = answer(max_tokens=100).choices[0]

    assert len(choice.job.hashes) == (choice.job.prompt_tokens + 100) // 16


def test_created_cache_tokens_are_full_blocks_not_cached_before() -> None:
    made = answer(COMPLETIONS, prompt="x" * 4 * 40)
    made.choices[0].job.cached_tokens = 16

    assert (made.cached_tokens, made.created_cache_tokens) == (16, 16)
