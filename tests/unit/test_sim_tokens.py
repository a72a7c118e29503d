"""The toy tokeniser: equal prefixes, reversible ids, answers that come back as they were made."""

from gateway.sim import tokens


def test_equal_text_prefixes_give_equal_ids() -> None:
    a, b = (
        tokens.unpack(tokens.encode("same start, one")),
        tokens.unpack(tokens.encode("same star")),
    )

    assert a[:2] == b[:2]
    assert tokens.count(tokens.encode("123456789")) == 3


def test_ids_decode_to_the_text_they_came_from() -> None:
    text = "grüß Gott, 世界\n"

    assert tokens.decode(tokens.pack(tokens.unpack(tokens.encode(text)))) == text


def test_any_integer_is_a_token() -> None:
    assert tokens.unpack(tokens.pack([0, 40, 2**32 + 1, -1])) == [0, 40, 1, 2**32 - 1]


def test_a_conversation_grows_from_its_prompt_and_answer() -> None:
    voice = tokens.Voice(3)
    first = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    prompt = tokens.render(first)
    answer = voice.answer(prompt, 9)
    second = [*first, {"role": "assistant", "content": answer.decode()}]

    assert tokens.render([*second, {"role": "user", "content": "and"}]).startswith(prompt + answer)


def test_tools_and_odd_content_reach_the_prompt() -> None:
    plain = tokens.render([{"role": "user", "content": "x"}])
    variants = [
        tokens.render([{"role": "user", "content": "x"}], tools=[{"name": "f"}]),
        tokens.render([{"role": "user", "content": [{"type": "text", "text": "x"}, {"a": 1}]}]),
        tokens.render([{"role": "user", "content": {"odd": 1}}]),
        tokens.render([{"role": "user", "content": None}]),
        tokens.render([{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]),
        tokens.render(["x"], system="s"),
    ]

    assert len({plain, *variants}) == len(variants) + 1
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert tokens.render(parts) == plain


def test_the_chain_covers_full_blocks_and_depends_on_all_before() -> None:
    a, b = tokens.encode("a" * 256), tokens.encode("b" + "a" * 255)

    assert len(tokens.chain(a + b"tail", 16)) == 4
    assert not set(tokens.chain(a, 16)) & set(tokens.chain(b, 16))
    assert not set(tokens.chain(a, 16)) & set(tokens.chain(a, 16, salt="tenant"))


def test_voices_are_deterministic_and_whole_tokens() -> None:
    prompt = tokens.encode("why?")
    one, same, other = tokens.Voice(1), tokens.Voice(1), tokens.Voice(2)

    assert one.answer(prompt, 2000) == same.answer(prompt, 2000) != other.answer(prompt, 2000)
    assert len(one.answer(prompt, 5000)) == 20_000
    assert one.answer(prompt, 10) == one.answer(prompt, 2000)[:40]
    assert 16 <= one.length(prompt) <= 527
    assert one.answer(prompt, 7).isascii()
