from pathlib import Path

import pytest

from gateway.core.scan import Scanner, find_usage
from gateway.core.types import Api, Usage

SAMPLES = Path(__file__).parents[1] / "samples"


def payload_of(name: str) -> bytes:
    """Return a recorded answer's body, chunk framing removed."""
    raw = (SAMPLES / name).read_bytes()
    head, _, body = raw.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return body
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        out += body[:length]
        body = body[length + 2 :]
    return out


def scanned(data: bytes, step: int) -> Scanner:
    scanner = Scanner()
    seen = False
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        seen = seen or scanner.is_first_content(piece)
        scanner.keep(piece)
    return scanner


CASES = [
    ("vllm-0.32/chat_stream_usage.response.http", Api.CHAT, Usage(34, 6, 32)),
    ("vllm-0.32/completion_stream_usage.response.http", Api.COMPLETIONS, None),
    ("vllm-0.32/messages_stream.response.http", Api.MESSAGES, Usage(11, 4, 0)),
    ("vllm-0.32/responses_stream.response.http", Api.RESPONSES, None),
    ("llamacpp/chat_stream_usage.response.http", Api.CHAT, Usage(34, 6, 33)),
    ("llamacpp/messages_stream.response.http", Api.MESSAGES, Usage(11, 4, None)),
    ("llamacpp/responses_stream.response.http", Api.RESPONSES, None),
]


@pytest.mark.parametrize("step", [1, 7, 100, 10**6])
@pytest.mark.parametrize(("name", "api", "usage"), CASES)
def test_recorded_streams_are_understood_in_any_split(
    name: str, api: Api, usage: Usage | None, step: int
) -> None:
    scanner = scanned(payload_of(name), step)

    assert scanner.terminated(api)
    assert not scanner.reported_error()
    assert scanner.ends_between_events()
    found = scanner.usage()
    assert found.completion_tokens
    if usage is not None:
        assert (found.prompt_tokens, found.completion_tokens) == (
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        assert usage.cached_tokens is None or found.cached_tokens == usage.cached_tokens


@pytest.mark.parametrize("name", ["vllm-0.32/chat.response.http", "llamacpp/chat.response.http"])
def test_usage_of_a_whole_answer_is_found(name: str) -> None:
    usage = find_usage(payload_of(name))

    assert usage.prompt_tokens == 34
    assert usage.completion_tokens == 6


def test_usage_written_by_the_model_is_not_believed() -> None:
    text = rb'{"choices":[{"text":"say \"usage\": {\"prompt_tokens\": 9}"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'

    assert find_usage(text) == Usage(3, 1, None)


@pytest.mark.parametrize(
    "usage", [b'{"prompt_tokens":-1}', b'{"prompt_tokens":"x"}', b'{"prompt_tokens":tru', b"{}"]
)
def test_odd_usage_is_unknown(usage: bytes) -> None:
    assert find_usage(b'{"usage":' + usage + b"}").prompt_tokens is None


def test_first_content_is_not_the_role_event() -> None:
    scanner = Scanner()

    assert not scanner.is_first_content(
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    )
    assert scanner.is_first_content(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')


def test_tool_calls_and_reasoning_count_as_content() -> None:
    for event in (
        b'{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}',
        b'{"delta":{"reasoning_content":"hm"}}',
        b'{"delta":{"type":"input_json_delta","partial_json":"{"}}',
    ):
        assert Scanner().is_first_content(event)


def test_memory_is_bounded_for_any_stream() -> None:
    scanner = Scanner()
    for _ in range(100_000):
        scanner.keep(b"x" * 50)

    assert sum(map(len, scanner.tail)) < 16 * 5000


def test_error_event_in_a_stream_is_noticed() -> None:
    scanner = Scanner()
    scanner.keep(b'data: {"choices":[]}\n\n')
    scanner.keep(b'data: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n')

    assert scanner.reported_error()
    assert scanner.terminated(Api.CHAT)


def test_a_terminal_event_is_found_however_much_repeats_its_mark_behind_it() -> None:
    scanner = Scanner()
    scanner.keep(b"data: {}\n\ndata: [DONE]\n\n: " + b"x" * 200 + b"[DONE] again\n\n")
    assert scanner.terminated(Api.CHAT)

    text = Scanner()
    text.keep(b'data: {"choices":[{"delta":{"content":"[DONE]"}}]}\n\n')
    assert not text.terminated(Api.CHAT)


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        ((700, 0, 0), 700),
        ((100, 600, 0), 700),
        ((100, 600, 64), 700),  # vLLM: what it has cached now is among the input tokens
        ((100, 500, 100), 600),
        ((20, 500, 180), 700),  # Anthropic: it is beside them
    ],
)
def test_a_messages_prompt_is_what_was_read_from_the_cache_and_what_was_not(
    usage: tuple[int, int, int], prompt: int
) -> None:
    data = (
        b'{"usage":{"input_tokens":%d,"output_tokens":4,"cache_read_input_tokens":%d,'
        b'"cache_creation_input_tokens":%d}}' % usage
    )
    assert find_usage(data) == Usage(prompt, 4, usage[1])
