"""A `tokenizer` in the configuration: counts must be the engine's own, token for token."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from loadtest.tokens_check import (
    KINDS,
    Case,
    compare,
    engine_ids,
    load_cases,
    make_model,
    running,
)
from tests.e2e.conftest import Engine
from tests.e2e.fleet import MODEL, Fleet, Gateway, TinyModel, eventually, start_gateway
from tests.e2e.talk import ask, cached_tokens, opening

BLOCK_TOKENS = {"vllm": 32}
"""Of the engines' own blocks, see run_replicas.py; else the gateway's 16 count."""


@pytest.fixture(scope="module")
def exact(
    engine: Engine, fleet: Fleet, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """Run a gateway that has the model's tokenizer."""
    if engine.name == "sim":
        pytest.skip("simulated replicas have a tokeniser of their own")
    folder = tmp_path_factory.mktemp("exact")
    rows = [{"name": f"b{i}", "url": url} for i, url in enumerate(fleet.urls)]
    model = {"name": MODEL, "tokenizer": str(tiny_model.directory), "backends": rows}
    config = folder / "gateway.yaml"
    config.write_bytes(orjson.dumps({"models": [model]}))
    with start_gateway([str(config)], Path(folder)) as running:
        eventually(lambda: len(running.backends()) == 2, what="both backends in /status")
        yield running


def test_prompts_are_counted_as_the_engine_counts_them(exact: Gateway) -> None:
    for seed in range(5):
        answer = ask(exact, opening(4000 + seed))
        counted = int(answer.headers["x-gateway-prefix"].partition("/")[2])

        assert counted == answer.json()["usage"]["prompt_tokens"]


def test_a_second_turn_is_predicted_to_the_block(exact: Gateway, engine: Engine) -> None:
    block = BLOCK_TOKENS.get(engine.name, 16)
    messages = opening(4100)
    first = ask(exact, messages)
    text = first.json()["choices"][0]["message"]["content"]
    more = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    second = ask(exact, more)
    predicted = int(second.headers["x-gateway-prefix"].partition("/")[0])

    assert second.headers["x-gateway-backend"] == first.headers["x-gateway-backend"]
    assert predicted % block == 0
    # text may be tokenized otherwise than it was sampled: the block with the answer is no hit then
    assert 0 < predicted <= cached_tokens(second.json()["usage"]) + block


@pytest.mark.parametrize("kind", list(KINDS))
def test_golden_conversations_have_the_engines_own_ids(
    engine: Engine, kind: str, tmp_path: Path
) -> None:
    if engine.name == "sim":
        pytest.skip("simulated replicas have a tokeniser of their own")
    directory, gguf = make_model(kind, tmp_path)
    model = directory if engine.name == "vllm" else gguf
    with running(engine.name, engine.python, model, tmp_path) as url:
        asked = [case for case in load_cases() if not case.engines or engine.name in case.engines]

        assert len(asked) > 20
        assert list(compare(engine.name, url, directory, asked)) == []
        _must_notice(engine.name, url, directory, asked[1])


def _must_notice(engine: str, url: str, tokenizer: Path, case: Case) -> None:
    """The comparison itself must not be blind."""
    other = replace(case, body={**case.body, "messages": case.body["messages"][:1]})
    assert engine_ids(engine, url, other) != engine_ids(engine, url, case) != array("I")
    media = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    unrendered = replace(case, name="media", body={"messages": [media]})
    found = list(compare(engine, url, tokenizer, [unrendered]))
    assert found
    assert all(line.startswith("media") for line in found)
