"""Each recorded vLLM exchange, replayed against a simulated replica: same head, same structure."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.sim_rig import RawAnswer, exchange, live_replica, parse_answer, shape

SAMPLES = Path(__file__).parents[1] / "samples" / "vllm-0.32"
# Deliberate differences: no logprobs or token ids in streams, tools accepted (as with
# --enable-auto-tool-choice), no CORS or operator routes.
LEFT_OUT = {
    "abort_requests",
    "chat_options",
    "chat_render",
    "chat_stream_logprobs",
    "chat_stream_token_ids",
    "completion_render",
    "err_tools_auto",
    "is_paused",
    "is_sleeping",
    "metrics",
    "server_info",
    "sleep",
    "wake_up",
}
NAMES = sorted(
    name
    for path in SAMPLES.glob("*.request.http")
    if (name := path.name.removesuffix(".request.http")) not in LEFT_OUT
)
# The error text of the JSON parser is the parser's own; everything else is compared whole.
SAME_BODY = [name for name in NAMES if name.startswith("err_") or name.endswith("unknown_model")]


def recorded(name: str) -> tuple[bytes, RawAnswer]:
    request = (SAMPLES / f"{name}.request.http").read_bytes()
    return request, parse_answer((SAMPLES / f"{name}.response.http").read_bytes())


def event_shapes(answer: RawAnswer) -> list[Any]:
    """Return the stream's events, runs of equal ones as one: chunk counts are timing."""
    shapes: list[Any] = []
    for event in answer.events:
        name, _, data = event.rpartition(b"data: ")
        value = data if data == b"[DONE]" else shape(orjson.loads(data))
        if not shapes or shapes[-1] != (name, value):
            shapes.append((name, value))
    return shapes


def structure(answer: RawAnswer) -> Any:
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return event_shapes(answer)
    if answer.body and kind == "application/json":
        return shape(orjson.loads(answer.body))
    return answer.body


def comparable(headers: dict[str, str]) -> dict[str, str]:
    skip = ("date", "content-length")
    return {name: "" if name in skip else value for name, value in headers.items()}


@pytest.mark.parametrize("name", NAMES)
async def test_answer_has_the_recorded_head_and_structure(name: str) -> None:
    request, expected = recorded(name)

    async with live_replica() as live:
        answer = await exchange(live.port, request)

    assert answer.status == expected.status
    assert comparable(answer.headers) == comparable(expected.headers)
    got, want = structure(answer), structure(expected)
    if name.startswith("tokenize_"):  # another tokeniser: other counts
        got["tokens"], want["tokens"] = got["tokens"][:1], want["tokens"][:1]
        if isinstance(got["token_strs"], list):
            got["token_strs"], want["token_strs"] = got["token_strs"][:1], want["token_strs"][:1]
    if name == "chat_stream_stop":  # the toy voice says more than one token before its first "e"
        assert got.pop(1) != got[1]
    assert got == want
    assert list(key_order(got)) == list(key_order(want))


def key_order(value: Any) -> Any:
    """Yield all keys in order: equal dicts may still be ordered differently."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from key_order(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from key_order(item)


@pytest.mark.parametrize("name", [name for name in SAME_BODY if name != "err_missing_model"])
async def test_error_body_is_the_recorded_one(name: str) -> None:
    request, expected = recorded(name)

    async with live_replica() as live:
        answer = await exchange(live.port, request)

    if name == "err_bad_json":
        strip = rb"body\.\d+|'error': '[^']*'"
        assert re.sub(strip, b"", answer.body) == re.sub(strip, b"", expected.body)
    else:
        assert answer.body == expected.body


@pytest.mark.parametrize("name", ["err_too_long_chat_stream", "err_too_long_prompt"])
async def test_too_long_prompt_is_refused_in_vllms_words(name: str) -> None:
    expected = parse_answer((SAMPLES / f"{name}.response.http").read_bytes())
    body = orjson.dumps({"model": "tiny", "prompt": "word" * 9000, "stream": "chat" in name})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    async with live_replica() as live:
        answer = await exchange(live.port, head.encode() + body)

    assert (answer.status, answer.body) == (400, expected.body)


async def test_metrics_page_has_the_recorded_names_labels_and_kinds() -> None:
    raw = (SAMPLES / "metrics_idle.response.http").read_bytes()
    expected = parse_answer(raw)
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    async with live_replica(started_at=1_796_039_803.76) as live:
        answer = await exchange(live.port, request)

    assert comparable(answer.headers) == comparable(expected.headers)
    got, want = page_lines(answer.body), page_lines(expected.body)
    assert got == [line for line in want if re.search(r"(^|\s)(vllm:|process_)", line)]
    assert b"\nprocess_start_time_seconds 1.79603980376e+09\n" in answer.body


def page_lines(page: bytes) -> list[str]:
    """Return comments whole and series without values; sizes of the cache are the replica's own."""
    lines = []
    for line in page.decode().splitlines():
        text = line if line.startswith("#") else line.rpartition(" ")[0]
        if text.startswith("vllm:cache_config_info"):
            text = re.sub(r'="[^"]*"', "", text)
        lines.append(text)
    return lines
