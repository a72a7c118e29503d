"""The clients people use, unchanged, through the gateway to a real engine."""

import re
import shutil
import subprocess
from typing import Any

import anthropic
import openai
import orjson
import pytest

from tests.e2e.fleet import MODEL, Fleet, Gateway, fetch
from tests.e2e.talk import chat, opening, prose

HELLO = opening(1)
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


@pytest.fixture
def sdk(gateway: Gateway) -> "openai.OpenAI":
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(gateway: Gateway) -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)


def test_openai_sdk_gets_a_whole_chat_answer(sdk: "openai.OpenAI") -> None:
    with sdk:
        answer = sdk.chat.completions.create(**chat(HELLO))

    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens > 400


def test_openai_sdk_streams_the_text_of_the_whole_answer(sdk: "openai.OpenAI") -> None:
    with sdk:
        whole = sdk.chat.completions.create(**chat(HELLO))
        with sdk.chat.completions.create(**chat(HELLO), stream=True) as stream:
            chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_usage_chunk_comes_only_when_asked_for(sdk: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    with sdk:
        with sdk.chat.completions.create(**chat(HELLO), stream=True) as stream:
            plain = list(stream)
        with sdk.chat.completions.create(**chat(HELLO, **asked)) as stream:
            with_usage = list(stream)

    assert all(chunk.choices for chunk in plain)
    assert all(chunk.usage is None for chunk in plain)
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage.completion_tokens == 8


def test_openai_sdk_completes_text_and_token_ids(sdk: "openai.OpenAI") -> None:
    with sdk:
        text = sdk.completions.create(model=MODEL, prompt="def parse(", **SHORT)
        ids = sdk.completions.create(model=MODEL, prompt=[70, 71, 72, 73], **SHORT)

    assert text.choices[0].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


def test_openai_sdk_streams_a_response_to_its_terminal_event(sdk: "openai.OpenAI") -> None:
    with (
        sdk,
        sdk.responses.create(
            model=MODEL, input="def parse(", max_output_tokens=16, temperature=0, stream=True
        ) as stream,
    ):
        kinds = [event.type for event in stream]

    assert "response.output_text.delta" in kinds
    assert kinds[-1] in {"response.completed", "response.incomplete"}


def test_openai_sdk_lists_the_model_of_the_backends(sdk: "openai.OpenAI") -> None:
    with sdk:
        listed = [model.id for model in sdk.models.list()]
        one = sdk.models.retrieve(MODEL)

    assert listed == [MODEL]
    assert one.id == MODEL


def test_openai_sdk_sees_an_unknown_model_as_not_found(sdk: "openai.OpenAI") -> None:
    with sdk, pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])

    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_anthropic_sdk_gets_a_whole_message_and_a_stream(claude: "anthropic.Anthropic") -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        "extra_body": {"temperature": 0},
        "system": prose(2),
        "messages": [{"role": "user", "content": "Which bucket is empty?"}],
    }
    with claude:
        whole = claude.messages.create(**body)
        with claude.messages.stream(**body) as stream:
            final = stream.get_final_message()

    assert whole.content[0].text
    assert whole.usage.output_tokens == 8
    assert final.usage.output_tokens == 8
    assert final.stop_reason == "max_tokens"


def test_anthropic_sdk_sees_an_unknown_model_as_not_found(claude: "anthropic.Anthropic") -> None:
    with claude, pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(
            model="nobody", max_tokens=4, messages=[{"role": "user", "content": "x"}]
        )

    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"


def test_curl_reads_the_stream_to_its_end(gateway: Gateway) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on this machine")
    argv = [curl, "-N", "-s", "-S", "-i", gateway.url + "/v1/chat/completions"]
    argv += [
        "-H",
        "content-type: application/json",
        "-d",
        orjson.dumps(chat(HELLO, stream=True)).decode(),
    ]

    done = subprocess.run(argv, capture_output=True, check=True)

    head, _, body = done.stdout.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert re.search(rb"(?im)^content-type: text/event-stream", head)
    assert re.search(rb"(?im)^x-accel-buffering: no\r?$", head)
    assert re.search(rb"(?im)^cache-control: no-cache\r?$", head)
    assert len(re.findall(rb"(?m)^data: \{", body)) >= 8
    assert body.rstrip().endswith(b"data: [DONE]")


def test_every_answer_carries_the_gateways_headers(gateway: Gateway, fleet: Fleet) -> None:
    url = gateway.url + "/v1/chat/completions"
    headers = fetch(url, method="POST", body=chat(HELLO)).headers

    assert headers["x-gateway-backend"] in {replica.name for replica in fleet.replicas}
    assert headers["x-gateway-class"] in {"coding", "chat"}
    assert headers["x-gateway-policy"] == "cost"
    assert re.fullmatch(r"\d+/[1-9]\d*", headers["x-gateway-prefix"])
    assert re.fullmatch(r"\d+(\.\d+)?", headers["x-gateway-queue-ms"])
    assert headers["x-gateway-attempts"] == "1"
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", headers["x-request-id"])
