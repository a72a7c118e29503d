from random import Random
from typing import Any

import orjson
import pytest

from gateway.core.dispatcher import Dispatcher
from gateway.core.prompter import BytePrompter
from gateway.core.types import Api, Chain, Query
from gateway.edge import routes
from gateway.edge.query import build_query, parse_body, start_chain
from tests.core_kit import settings

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
READING = (
    *("/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score"),
    *("/score", "/pooling", "/classify", "/tokenize", "/detokenize"),
)


def built(path: str, **fields: Any) -> Query:
    route = routes.find("POST", path)
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "input": "hello", "prompt": "hello", **fields}
    parsed = parse_body(route, orjson.dumps(body), "application/json")
    core = Dispatcher(settings(2), Random(1), 0.0)
    chain = start_chain(BytePrompter(1), parsed, "m")
    assert isinstance(chain, Chain)
    return build_query(core, chain, parsed, "m", path=route.path)


@pytest.mark.parametrize("path", READING)
def test_a_route_that_only_reads_expects_no_answer_tokens(path: str) -> None:
    assert built(path, max_tokens=500).expected_output_tokens == 0


@pytest.mark.parametrize("path", GENERATING)
def test_a_route_that_writes_expects_what_it_learnt_or_was_told_at_most(path: str) -> None:
    assert built(path).expected_output_tokens == 250
    assert built(path, max_tokens=20).expected_output_tokens == 20


@pytest.mark.parametrize("path", GENERATING + READING)
def test_only_what_the_tokenizer_answers_runs_no_prefill(path: str) -> None:
    tokenizer = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
    assert built(path).prefills is (path not in tokenizer)


def test_every_route_either_reads_or_writes() -> None:
    audio = {"/v1/audio/transcriptions", "/v1/audio/translations"}
    assert {api.value for api in Api} == {*GENERATING, *READING} | audio


@pytest.mark.parametrize("stream", [True, False])
def test_the_dispatcher_is_told_whether_the_answer_streams(stream: bool) -> None:
    assert built("/v1/chat/completions", stream=stream).stream is stream


def test_an_answer_comes_whole_unless_a_stream_is_asked_for() -> None:
    assert built("/v1/chat/completions").stream is False


def test_the_body_names_the_session() -> None:
    assert built("/v1/chat/completions", session_id="s1").session == "s1"
