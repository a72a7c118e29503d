"""Prompters are kept over reloads while their files are the same, and forgotten with their model."""

import os
from pathlib import Path

import orjson
import pytest

from gateway.config.schema import Config, ModelConfig
from gateway.core.prompter import BytePrompter
from gateway.prompt.load import TokenizerProblem
from gateway.prompt.shelf import STEADY_S, Tokenizers
from gateway.prompt.tokens import TokenPrompter
from tests.tokenizer_kit import write_tokenizer


def config(**paths: Path | str | None) -> Config:
    named = [
        ModelConfig(name=name, tokenizer=None if path is None else str(path))
        for name, path in paths.items()
    ]
    return Config(models=named)


@pytest.fixture
def shelf() -> Tokenizers:
    return Tokenizers(1, BytePrompter(1), lambda _: None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tokenizer("gpt2", tmp_path)


def later(file: Path) -> None:
    """Make a file look written after all others."""
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


def test_only_models_with_a_tokenizer_have_a_prompter(shelf: Tokenizers, file: Path) -> None:
    found = shelf.prompters(config(a=file, b=None, c=file.parent))

    assert found.keys() == {"a", "c"}


def test_models_of_one_file_share_its_prompter(shelf: Tokenizers, file: Path) -> None:
    found = shelf.prompters(config(a=file, b=file))

    assert found["a"] is found["b"]


def test_unchanged_files_keep_their_prompter(shelf: Tokenizers, file: Path) -> None:
    first = shelf.prompters(config(a=file))

    assert shelf.prompters(config(a=file, b=file))["b"] is first["a"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("directory", [True, False])
def test_a_change_of_any_of_the_files_loads_again(
    shelf: Tokenizers, file: Path, name: str, directory: bool
) -> None:
    given = file.parent if directory else file
    (file.parent / "tokenizer_config.json").write_bytes(orjson.dumps({}))
    first = shelf.prompters(config(a=given))["a"]
    changed = file.parent / name
    if changed.exists():
        later(changed)
    else:
        changed.write_text("{{ messages }}")

    assert shelf.prompters(config(a=given))["a"] is not first


def test_a_change_of_a_template_by_name_loads_again(shelf: Tokenizers, file: Path) -> None:
    more = file.parent / "additional_chat_templates"
    more.mkdir()
    (file.parent / "chat_template.jinja").write_text("{{ messages }}")
    first = shelf.prompters(config(a=file))["a"]
    (more / "tool_use.jinja").write_text("{{ tools }}")
    second = shelf.prompters(config(a=file))["a"]
    later(more / "tool_use.jinja")
    third = shelf.prompters(config(a=file))["a"]

    assert first is not second is not third


def test_a_file_replaced_by_another_of_its_date_loads_again(shelf: Tokenizers, file: Path) -> None:
    template = file.parent / "chat_template.jinja"
    template.write_text("{{ messages }}")
    at = template.stat().st_mtime_ns
    first = shelf.prompters(config(a=file))["a"]
    template.write_text("{{ messages }}.")
    os.utime(template, ns=(at, at))

    assert shelf.prompters(config(a=file))["a"] is not first


def test_a_file_that_broke_leaves_what_was_held(shelf: Tokenizers, file: Path) -> None:
    first = shelf.prompters(config(a=file))["a"]
    with pytest.raises(TokenizerProblem):
        shelf.prompters(config(a=file, b=file.parent / "nowhere.json"))

    assert shelf.prompters(config(a=file))["a"] is first


def test_what_no_model_names_is_forgotten(shelf: Tokenizers, file: Path) -> None:
    shelf.prompters(config(a=file))
    assert len(shelf._held) == 1

    assert shelf.prompters(config(a=None)) == {}
    assert shelf._held == {}


def test_closing_ends_the_pool_if_there_is_one(shelf: Tokenizers, file: Path) -> None:
    shelf.close()
    shelf.prompters(config(a=file))
    pool = shelf._pool
    shelf.close()

    assert pool is not None
    with pytest.raises(RuntimeError):
        pool._executor.submit(print)


def test_blocks_are_as_large_as_the_engines_of_each_model(shelf: Tokenizers, file: Path) -> None:
    found = shelf.prompters(config(a=file, b=file, c=None))
    sizes = {"a": 32, "b": None, "c": 64}

    assert shelf.fit_blocks(sizes.get, 0.0) == ["a"]
    assert shelf.fit_blocks(sizes.get, 1.0) == []
    prompter = found["a"]
    assert isinstance(prompter, TokenPrompter)
    assert [prompter.block_tokens_of(name) for name in "ab"] == [32, 16]


def test_block_sizes_told_in_turn_change_them_once(shelf: Tokenizers, file: Path) -> None:
    found = shelf.prompters(config(a=file))["a"]
    assert isinstance(found, TokenPrompter)
    changed = [
        now
        for now in range(1000)
        for _ in shelf.fit_blocks({"a": (64, 32)[now % 2]}.get, float(now))
    ]

    assert changed == [0, 1]
    assert found.block_tokens_of("a") == 32


def test_larger_blocks_are_taken_when_they_have_been_told_for_a_minute(
    shelf: Tokenizers, file: Path
) -> None:
    shelf.prompters(config(a=file))
    assert shelf.fit_blocks({"a": 32}.get, 0.0) == ["a"]

    assert shelf.fit_blocks({"a": 48}.get, 10.0) == []
    assert shelf.fit_blocks({"a": 64}.get, 20.0) == []
    assert shelf.fit_blocks({"a": 64}.get, 20.0 + STEADY_S - 1) == []
    assert shelf.fit_blocks({"a": 64}.get, 20.0 + STEADY_S) == ["a"]
    assert shelf.fit_blocks({"a": 16}.get, 81.0) == ["a"]


def test_another_chat_template_is_another_prompter(shelf: Tokenizers, file: Path) -> None:
    template = file.parent / "other.jinja"
    template.write_text("{{ messages[0].content }}")
    models = [
        ModelConfig(name="a", tokenizer=str(file)),
        ModelConfig(name="b", tokenizer=str(file), chat_template=str(template)),
    ]
    found = shelf.prompters(Config(models=models))

    assert found["a"] is not found["b"]
    later(template)
    assert shelf.prompters(Config(models=models))["b"] is not found["b"]
