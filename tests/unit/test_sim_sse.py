"""Stream encoders against the recorded events is tests/integration/test_sim_wire; here: the text."""

from typing import Any

import orjson
import pytest

from gateway.sim import tokens
from gateway.sim.answer import Answer, compose
from gateway.sim.asked import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Limits, parse
from gateway.sim.sse import DONE, encoder

LIMITS = Limits("m", 1000)
HI = [{"role": "user", "content": "hi"}]
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 9},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 9},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    RESPONSES: {"input": "hi", "max_output_tokens": 9},
}


def play(api: str, chunks: list[int]) -> tuple[Answer, list[dict[str, Any]]]:
    """Stream an answer whose tokens come in `chunks`; return it and its decoded events."""
    asked = parse(api, FIELDS[api] | {"stream": True}, LIMITS)
    answer = compose(asked, LIMITS, tokens.Voice(0), 16, answer_id="id", now=1)
    made = encoder(answer)
    events = [*made.head(), *made.first()]
    choice = answer.choices[0]
    for count in chunks:
        choice.produced += count
        events += made.delta(choice, last=choice.produced == 9)
    events += made.tail()
    assert all(event.endswith(b"\n\n") and event.count(b"\n\n") == 1 for event in events)
    datas = [event.rpartition(b"data: ")[2] for event in events if event != DONE]
    return answer, [orjson.loads(data) for data in datas]


def said(value: dict[str, Any]) -> str:
    for choice in value.get("choices", ()):
        return str(choice["delta"]["content"] if "delta" in choice else choice["text"])
    delta = value.get("delta", "")
    return str(delta.get("text", "") if isinstance(delta, dict) else delta)


@pytest.mark.parametrize("api", FIELDS)
@pytest.mark.parametrize("chunks", [[1] * 9, [1, 4, 4], [9]], ids=str)
def test_the_deltas_are_the_answer_however_they_are_cut(api: str, chunks: list[int]) -> None:
    answer, events = play(api, chunks)

    assert "".join(said(event) for event in events) == answer.choices[0].text


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_openai_streams_end_with_done_and_name_the_reason_once(api: str) -> None:
    _, events = play(api, [1, 8])
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]

    assert reasons[-1] == "length"
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert "system_fingerprint" in events[-1]


def test_response_events_are_numbered_without_a_gap() -> None:
    _, events = play(RESPONSES, [1] * 9)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 9
