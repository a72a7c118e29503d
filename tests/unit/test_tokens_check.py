"""The comparison with an engine: what it calls a difference, without an engine."""

from array import array
from pathlib import Path

import pytest

from gateway.core.prompter import BytePrompter
from gateway.prompt.load import load_prompter
from gateway.prompt.reference import Reference
from loadtest import tokens_check
from loadtest.tokens_check import Case, EngineRefused, compare, difference, load_cases
from tests.tokenizer_kit import write_tokenizer

PROMPT = "def parse(self, line):\n    return line.split()\n"
CASE = Case("one", {"prompt": PROMPT})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tokenizer("gpt2", tmp_path)


def ours(file: Path) -> "array[int]":

    return Reference(file).encode(PROMPT)


@pytest.mark.parametrize("at", [0, 7, -1])
def test_one_other_id_is_a_difference_and_its_place_is_told(file: Path, at: int) -> None:
    prompter = load_prompter(file, 1, BytePrompter(1), block_tokens=1)
    ids = ours(file)
    assert difference(prompter, CASE, ids) is None

    ids[at] += 1
    found = difference(prompter, CASE, ids)

    assert found is not None
    assert f"token {at % len(ids)} differs" in found


@pytest.mark.parametrize("change", [1, -1])
def test_an_id_more_or_less_is_a_difference(file: Path, change: int) -> None:
    prompter = load_prompter(file, 1, BytePrompter(1), block_tokens=1)
    ids = ours(file)
    more = ids + ids[:1] if change > 0 else ids[:-1]

    assert difference(prompter, CASE, more) is not None


def test_a_prompt_that_goes_by_bytes_is_a_difference(file: Path) -> None:
    prompter = load_prompter(file, 1, BytePrompter(1), block_tokens=1)
    case = Case("chat without a template", {"messages": [{"role": "user", "content": "x"}]})

    assert difference(prompter, case, array("I", [1])) == "was routed by bytes"


def test_what_the_engine_refuses_is_a_difference(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> "array[int]":
        raise EngineRefused("400 no")

    monkeypatch.setattr(tokens_check, "engine_ids", refuse)
    found = list(compare("vllm", "http://x", file, [CASE, Case("other", {}, ("llamacpp",))]))

    assert found == ["one: the engine refused it: 400 no"]


def test_the_golden_set_covers_what_chat_requests_carry() -> None:
    cases = load_cases()
    fields = {name for case in cases for name in case.body}
    roles = {message["role"] for case in cases for message in case.body.get("messages", [])}

    assert fields >= {"messages", "prompt", "tools", "chat_template_kwargs"}
    assert fields >= {"add_generation_prompt", "continue_final_message"}
    assert roles == {"system", "developer", "user", "assistant", "tool"}
    assert len({case.name for case in cases}) == len(cases)
