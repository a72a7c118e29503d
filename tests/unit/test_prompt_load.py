"""A model's files, read as vLLM reads them."""

import threading
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.types import Api, Chain
from gateway.prompt import amount
from gateway.prompt.engines import Encoder
from gateway.prompt.jobs import EncodeJob
from gateway.prompt.load import TokenizerProblem, cut_tokens, load_prompter
from gateway.prompt.pool import EncoderPool
from gateway.prompt.tokens import TokenPrompter
from tests.prompt_kit import CHATML, SPECIAL_TOKENS, THINKING, encode, make_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {**SPECIAL_TOKENS, "chat_template": CHATML})
    return tmp_path


def write(file: Path, content: object) -> None:
    file.write_bytes(orjson.dumps(content))


def load(model: Path, **how: Any) -> TokenPrompter:
    return load_prompter(model, 7, BytePrompter(1), **how)


def chat(prompter: TokenPrompter, **fields: Any) -> Chain:
    return prompter.chain(parse_json(Api.CHAT, orjson.dumps({"model": "m", **fields})))


def tokens(prompter: TokenPrompter, **fields: Any) -> int:
    return chat(prompter, messages=HI, **fields).tokens


def test_given_template_file_stands_in_for_the_models_own(model: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{{ bos_token }}{{ messages[0].content }}")
    assert tokens(load(model, chat_template=given)) == len(encode("<s>hi"))
    (model / "tokenizer_config.json").unlink()
    assert tokens(load(model, chat_template=given)) == len(encode("hi"))


def test_special_tokens_map_fills_in_what_the_config_lacks(model: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": {"content": "</s>"}}
    write(model / "tokenizer_config.json", config)
    write(model / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    assert tokens(load(model)) == len(encode("<s></s>")) == 2


@pytest.mark.parametrize("form", ["list", "json", "directory"])
def test_requests_with_tools_have_the_template_of_that_name(model: Path, form: str) -> None:
    named = {"default": "<s>", "tool_use": "<s></s><s>", "rag": "{% for %}"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    if form == "list":
        write(model / "tokenizer_config.json", {"chat_template": listed})
    elif form == "json":
        write(model / "chat_template.json", {"chat_template": listed})
    else:
        (model / "chat_template.jinja").write_text("<s>")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    prompter = load(model)
    tool = {"type": "function", "function": {"name": "f"}}
    assert (tokens(prompter), tokens(prompter, tools=[tool])) == (1, 3)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"architectures": ["DeepseekV32ForCausalLM"]}},
        {"config.json": {"model_type": "gpt_oss"}},
        {"tekken.json": {}, "consolidated.safetensors": {}},
    ],
)
def test_models_with_a_renderer_of_their_own_go_by_bytes(
    model: Path, tmp_path: Path, files: dict[str, object]
) -> None:
    for name, content in files.items():
        write(model / name, content)
    given = tmp_path / "given.jinja"
    given.write_text(CHATML)
    assert not chat(load(model), messages=HI).exact
    assert chat(load(model, chat_template=given), messages=HI).exact


def test_broken_given_template_is_named(model: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{% for %}")
    with pytest.raises(TokenizerProblem, match=r"given\.jinja"):
        load(model, chat_template=given)
    with pytest.raises(TokenizerProblem, match=r"missing\.jinja"):
        load(model, chat_template=tmp_path / "missing.jinja")


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "single_word": False, "normalized": False, **flags}


@pytest.mark.parametrize(
    ("added", "normalizer", "expected"),
    [
        ([token("<|a|>"), token("<|b|>")], None, ["<|a|>", "<|b|>"]),
        ([token("<|a|>", lstrip=True), token("<|b|>", single_word=True)], None, []),
        ([token("<|a|>", normalized=True)], None, ["<|a|>"]),
        ([token("<|a|>", normalized=True)], {"type": "NFC"}, []),
        ([token("<|a|>"), token("x<|a|>y")], None, ["x<|a|>y"]),
        ([token("<|a|>"), token("x<|")], None, ["x<|"]),
        ([token("aa")], None, []),
    ],
)
def test_text_is_cut_only_before_tokens_that_nothing_can_reach_into(
    added: list[dict[str, Any]], normalizer: object, expected: list[str]
) -> None:
    assert cut_tokens({"added_tokens": added, "normalizer": normalizer}) == expected


def conversation(turns: int) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[turn % 2], "content": f"hello world {turn} " * 20}
        for turn in range(2 * turns - 1)
    ]


def test_chats_take_the_short_way_and_have_the_same_chain(model: Path) -> None:
    write(model / "tokenizer_config.json", {**SPECIAL_TOKENS, "chat_template": THINKING})
    prompter, whole = load(model), load(model)
    whole.render_whole()
    for turns in (1, 2, 5, 3, 6):
        asked = conversation(turns)
        assert chat(prompter, messages=asked) == chat(whole, messages=asked)
    assert (prompter.in_parts, whole.in_parts) == (5, 0)


def test_engine_that_counts_otherwise_has_the_short_way_checked(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompter = load(model)
    exact = chat(prompter, messages=conversation(2))
    prompter.learn("m", "", exact, exact.tokens + 1)
    assert chat(prompter, messages=conversation(3)).exact
    assert not caplog.records
    assert prompter.in_parts == 2


def test_short_way_that_is_wrong_is_given_up_for_good(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompter, whole = load(model), load(model)
    whole.render_whole()
    first = chat(prompter, messages=conversation(2))
    assert prompter._conversations is not None
    for known in prompter._conversations._table.values():
        known.tokens += 1
    prompter.learn("m", "", first, first.tokens + 1)
    chat(prompter, messages=conversation(3))
    assert "not what was proven" in caplog.text
    assert chat(prompter, messages=conversation(4)) == chat(whole, messages=conversation(4))


async def test_the_check_of_the_short_way_is_encoded_off_the_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[bool, int]] = []
    plain = Encoder.encode

    def noted(encoder: Encoder, text: str) -> "array[int]":
        threads.append((threading.current_thread() is threading.main_thread(), len(text)))
        return plain(encoder, text)

    pool = EncoderPool(threads=1)
    prompter = load(model, pool=pool)
    asked = conversation(60)
    exact = chat(prompter, messages=asked)
    prompter.learn("m", "", exact, exact.tokens + 1)
    monkeypatch.setattr(Encoder, "encode", noted)
    more = [*asked, {"role": "assistant", "content": "yes"}, *HI]
    job = prompter.start(parse_json(Api.CHAT, orjson.dumps({"model": "m", "messages": more})))
    assert isinstance(job, EncodeJob)
    assert (await job.wait()).exact
    here = [chars for main, chars in threads if main]
    assert sum(here) <= prompter._encoder.inline_chars
    assert [chars for main, chars in threads if not main and chars > 20_000]
    pool.close()


def test_a_chat_whose_whole_is_too_much_leaves_the_check_to_the_next(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompter = load(model)
    exact = chat(prompter, messages=conversation(2))
    prompter.learn("m", "", exact, exact.tokens + 1)
    with monkeypatch.context() as patched:
        patched.setattr(amount, "MAX_WEIGHT", 2)
        assert chat(prompter, messages=conversation(2)).exact
        assert prompter._doubted
    assert chat(prompter, messages=conversation(3)).exact
    assert not prompter._doubted


def test_another_block_size_is_another_family_of_chains(model: Path) -> None:
    prompter = load(model)
    messages = conversation(4)
    narrow = chat(prompter, messages=messages)
    assert not prompter.use_block_tokens("m", 16)
    assert prompter.use_block_tokens("m", 32)
    wide = chat(prompter, messages=messages)
    assert (wide.tokens_per_block, wide.tokens) == (32, narrow.tokens)
    assert len(wide.hashes) == narrow.tokens // 32
    assert not set(wide.hashes) & set(narrow.hashes)
    assert prompter.block_tokens_of("another model") == 16
    assert not prompter.use_block_tokens("m", 0)
    assert prompter.use_block_tokens("m", 16)
    assert chat(prompter, messages=messages) == narrow
