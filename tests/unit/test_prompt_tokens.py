"""Exact chains with a small byte-level tokenizer made here."""

import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gateway.core.chain import chain_blocks
from gateway.core.prompter import BytePrompter, Prompter
from gateway.core.request import parse_json
from gateway.core.types import Api, Chain
from gateway.prompt.amount import MAX_TEXT_CHARS
from gateway.prompt.engines import Encoder
from gateway.prompt.jobs import BUSY
from gateway.prompt.load import TokenizerProblem, load_prompter
from gateway.prompt.pool import EncoderPool, PoolBehind
from gateway.prompt.tokens import EncodingCache, TokenPrompter

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox says hello to the world\n",
] * 50


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bos = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    return directory


@pytest.fixture
def prompter(model: Path) -> TokenPrompter:
    loaded = load_prompter(model, 7, BytePrompter(1))
    assert isinstance(loaded, TokenPrompter)
    return loaded


def chain(prompter: Prompter, api: Api, *, isolation: str = "", **fields: Any) -> Chain:
    request = parse_json(api, orjson.dumps({"model": "m", **fields}))
    return prompter.chain(request, isolation=isolation)


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_chat_tokens_are_those_of_the_rendered_prompt(prompter: TokenPrompter) -> None:
    text = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    expected = make_tokenizer().encode(text, add_special_tokens=False).ids
    got = chain(prompter, Api.CHAT, messages=[user("hello world")])
    assert (got.tokens, got.exact, got.tokens_per_block) == (len(expected), True, 16)


def test_completion_tokens_have_the_special_ones_unless_unwanted(prompter: TokenPrompter) -> None:
    plain = len(make_tokenizer().encode("hello", add_special_tokens=False).ids)
    assert chain(prompter, Api.COMPLETIONS, prompt="hello").tokens == plain + 1
    assert (
        chain(prompter, Api.COMPLETIONS, prompt="hello", add_special_tokens=False).tokens == plain
    )


def test_text_and_its_token_ids_have_one_chain(prompter: TokenPrompter) -> None:
    text = "the quick brown fox " * 50
    ids = make_tokenizer().encode(text).ids
    by_text = chain(prompter, Api.COMPLETIONS, prompt=text)
    for prompt in (ids, [ids], [text]):
        assert chain(prompter, Api.COMPLETIONS, prompt=prompt) == by_text
    assert len(by_text.hashes) == len(ids) // 16


def test_next_turn_keeps_the_chain_of_the_last(prompter: TokenPrompter) -> None:
    turns = [user("hello " * 100), {"role": "assistant", "content": "fox " * 50}, user("world")]
    first = chain(prompter, Api.CHAT, messages=turns[:1])
    third = chain(prompter, Api.CHAT, messages=turns)
    assert len(first.hashes) > 5
    assert third.hashes[: len(first.hashes)] == first.hashes


def test_model_salt_and_isolation_start_other_chains(prompter: TokenPrompter, model: Path) -> None:
    prompt = "hello " * 100
    chains = [
        chain(prompter, Api.COMPLETIONS, prompt=prompt),
        chain(prompter, Api.COMPLETIONS, prompt=prompt, model="lora"),
        chain(prompter, Api.COMPLETIONS, prompt=prompt, cache_salt="s"),
        chain(prompter, Api.COMPLETIONS, prompt=prompt, isolation="team"),
        chain(load_prompter(model, 8, BytePrompter(1)), Api.COMPLETIONS, prompt=prompt),
    ]
    assert len({one.hashes[0] for one in chains}) == len(chains)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.CHAT, {"messages": [user([{"type": "image_url", "image_url": {"url": "u"}}])]}),
        (Api.CHAT, {"messages": []}),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}),
        (Api.COMPLETIONS, {"prompt": [[1], [2]]}),
        (Api.COMPLETIONS, {"prompt": [1.5]}),
        (Api.COMPLETIONS, {"prompt": "x", "suffix": "y"}),
        (Api.COMPLETIONS, {}),
        (Api.COMPLETIONS, {"prompt": "x" * (MAX_TEXT_CHARS + 1)}),
        (Api.MESSAGES, {"messages": [user([{"type": "image", "source": {}}])]}),
        (Api.EMBEDDINGS, {"input": "x"}),
    ],
)
def test_what_cannot_be_exact_falls_back_to_bytes(
    prompter: TokenPrompter, api: Api, fields: dict[str, Any]
) -> None:
    assert chain(prompter, api, **fields) == chain(BytePrompter(1), api, **fields)
    assert prompter.unrendered == 1


def test_estimates_of_the_fallback_are_learnt(prompter: TokenPrompter) -> None:
    image = {"type": "image", "source": {}}
    fields: dict[str, Any] = {"messages": [user("x" * 2000), user([image])]}
    before = chain(prompter, Api.MESSAGES, **fields)
    prompter.learn("m", "chat", before, before.tokens * 2)
    after = chain(prompter, Api.MESSAGES, **fields)
    assert abs(after.tokens - before.tokens * 2) <= 2


def test_agreement_with_the_engine_is_counted(prompter: TokenPrompter) -> None:
    exact = chain(prompter, Api.COMPLETIONS, prompt="hello")
    prompter.learn("m", "chat", exact, exact.tokens)
    prompter.learn("m", "chat", exact, exact.tokens + 1)
    assert (prompter.matched, prompter.mismatched) == (1, 1)


def test_repeated_prompt_is_encoded_once(prompter: TokenPrompter) -> None:
    first = chain(prompter, Api.COMPLETIONS, prompt="hello " * 100)
    held = prompter._cache.bytes
    assert chain(prompter, Api.COMPLETIONS, prompt="hello " * 100) == first
    assert prompter._cache.bytes == held > 0


def test_cache_is_bounded_and_forgets_the_longest_unused() -> None:
    cache = EncodingCache(max_bytes=3000)
    ids = array("I", range(200))
    for number in range(3):
        cache.put(b"%d" % number, ids)
        assert cache.get(b"0") is not None
    cache.put(b"3", ids)
    assert cache.bytes <= 3000
    assert cache.get(b"0") is not None
    assert cache.get(b"1") is None
    cache.put(b"0", array("I"))
    cache.put(b"huge", array("I", range(5000)))
    assert cache.bytes == 0


def test_template_file_wins_over_the_config(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    prompter = load_prompter(tmp_path / "tokenizer.json", 7, BytePrompter(1))
    assert chain(prompter, Api.CHAT, messages=[user("hello world")]).tokens == 1


def test_named_templates_serve_the_default(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "<s>"}]
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps({"chat_template": named}))
    prompter = load_prompter(tmp_path, 7, BytePrompter(1))
    assert chain(prompter, Api.CHAT, messages=[user("hello world")]).tokens == 1


def test_tokenizer_without_template_serves_completions_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    prompter = load_prompter(tmp_path, 7, BytePrompter(1))
    assert chain(prompter, Api.COMPLETIONS, prompt="hello").exact
    assert not chain(prompter, Api.CHAT, messages=[user("x")]).exact


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json"),
        ({"tokenizer_config.json": b"{"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": b"[]"}, "must be a JSON object"),
        ({"chat_template.jinja": b"{% for %}"}, "does not compile"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja"),
    ],
)
def test_broken_files_are_named(
    model: Path, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    if files and "tokenizer.json" not in files:
        (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerProblem, match=message):
        load_prompter(tmp_path, 7, BytePrompter(1))


def test_token_chain_never_widens_its_blocks() -> None:
    ids = array("I", range(80_000))
    assert len(chain_blocks(ids.tobytes(), 1, 64)) == 5_000


class Waiting:
    """A pool's stand-in: says what it was given, and is let go or refused by the test."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.behind = False

    async def encode(self, encoder: Encoder, texts: Sequence[str]) -> "list[array[int]]":
        self.texts += texts
        if self.behind:
            raise PoolBehind
        return [encoder.encode(text) for text in texts]


def pooled(model: Path, pool: Waiting, reasons: list[str]) -> Prompter:
    return load_prompter(
        model,
        7,
        BytePrompter(1),
        pool=cast("EncoderPool", pool),
        on_fallback=reasons.append,
    )


LONG = "the quick brown fox says hello " * 400  # 12 KB: longer than any encoder takes in place


@pytest.mark.parametrize("fields", [{"messages": [user(LONG)]}, {"prompt": LONG}])
async def test_long_new_text_is_encoded_by_the_pool_to_the_same_chain(
    model: Path, fields: dict[str, Any]
) -> None:
    api = Api.CHAT if "messages" in fields else Api.COMPLETIONS
    request = parse_json(api, orjson.dumps({"model": "m", **fields}))
    pool, reasons = Waiting(), list[str]()
    prompter = pooled(model, pool, reasons)

    pending = prompter.start(request)
    assert not isinstance(pending, Chain)
    assert pool.texts == []  # nothing is done for who does not wait
    assert await pending.wait() == prompter.chain(request)
    again = prompter.start(request)

    assert isinstance(again, Chain)
    assert again.exact
    assert again == load_prompter(model, 7, BytePrompter(1)).chain(request)
    assert (len(pool.texts), reasons) == (1, [])


def test_short_text_is_encoded_in_place(model: Path) -> None:
    pool = Waiting()
    request = parse_json(Api.COMPLETIONS, orjson.dumps({"model": "m", "prompt": "hello"}))

    assert isinstance(pooled(model, pool, []).start(request), Chain)
    assert pool.texts == []


async def test_a_pool_that_is_behind_means_bytes_under_the_models_own_name(model: Path) -> None:
    pool, reasons = Waiting(), list[str]()
    pool.behind = True
    request = parse_json(Api.CHAT, orjson.dumps({"model": "m", "messages": [user(LONG)]}))
    expected = BytePrompter(1).chain(request)
    pending = pooled(model, pool, reasons).start(request)
    assert not isinstance(pending, Chain)

    request.model = "an alias"
    chain = await pending.wait()

    assert chain == expected
    assert reasons == [BUSY]
    assert request.model == "an alias"


def test_missing_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in ("engines", "reference"):  # what imports it, as if for the first time
        monkeypatch.delitem(sys.modules, f"gateway.prompt.{name}")
    with pytest.raises(TokenizerProblem, match="the extra `tokens`"):
        load_prompter(model, 7, BytePrompter(1))
