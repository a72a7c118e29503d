"""A `tokenizer` in the configuration: counts must be the engine's own, token for token."""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.e2e.conftest import Engine
from tests.e2e.fleet import MODEL, Fleet, Gateway, TinyModel, eventually, start_gateway
from tests.e2e.talk import ask, cached_tokens, opening

BLOCK_TOKENS = 16


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


def test_a_second_turn_is_predicted_to_the_block(exact: Gateway) -> None:
    messages = opening(4100)
    first = ask(exact, messages)
    text = first.json()["choices"][0]["message"]["content"]
    more = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    second = ask(exact, more)
    predicted = int(second.headers["x-gateway-prefix"].partition("/")[0])

    assert second.headers["x-gateway-backend"] == first.headers["x-gateway-backend"]
    assert predicted % BLOCK_TOKENS == 0
    assert 0 < predicted <= cached_tokens(second.json()["usage"]) + BLOCK_TOKENS
