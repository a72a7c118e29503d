from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.answer import MAX_BYTES, Said, grown, is_followed, whole_answer
from gateway.core.chain import NARROW_BYTES
from gateway.core.prompter import BytePrompter
from gateway.core.request import parse_json
from gateway.core.scan import Scanner
from gateway.core.types import Api, Chain
from tests.unit.test_scan import payload_of

SAMPLES = Path(__file__).parents[1] / "samples"
SALT = 7
LONG = 'An answer with "quotes", back\\slashes, n\news, ünïcode, 😀 and </b> tags. ' * 20
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "edit", "arguments": '{"path":"a.py","lines":[{"n":1},{"n":2}]}' * 20},
}


def chain_of(api: Api, body: dict[str, Any]) -> Chain:
    return BytePrompter(SALT).chain(parse_json(api, orjson.dumps({"model": "m"} | body)))


def events(*values: dict[str, Any], named: bool = False) -> bytes:
    out = b""
    for value in values:
        name = f"event: {value['type']}\n".encode() if named else b""
        out += name + b"data: " + orjson.dumps(value) + b"\n\n"
    return out


def chat_delta(**delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def heard(api: Api, data: bytes, step: int = 10**9) -> Said:
    said = Said(api)
    for start in range(0, len(data), step):
        said.take([data[start : start + step]])
    return said


def framed(data: bytes) -> list[bytes]:
    """Return each event of a stream as the chunk that engines send it in."""
    return [b"%x\r\n%b\n\n\r\n" % (len(e) + 2, e) for e in data.split(b"\n\n") if e]


def chat_stream(text: str) -> bytes:
    deltas = [chat_delta(content=piece) for piece in pieces(text)]
    return events(chat_delta(role="assistant", content=""), *deltas) + b"data: [DONE]\n\n"


USER = {"role": "user", "content": "question " * 40}
NEXT = {"role": "user", "content": "and then? " * 40}


def matches_next_turn(first: Chain, second: Chain, said: Said, least_bytes: int) -> None:
    """The grown chain is a prefix of the next turn's, up to the answer's last full block."""
    hashes = grown(first, said)
    assert hashes is not None
    assert hashes == second.hashes[: len(hashes)]
    assert (len(hashes) - len(first.hashes)) * first.block_bytes > least_bytes - 512


@pytest.mark.parametrize("step", [1, 13, 1000, 10**9])
def test_a_chat_stream_is_what_the_next_turn_begins_with(step: int) -> None:
    first = chain_of(Api.CHAT, {"messages": [USER]})
    answer = {"role": "assistant", "content": LONG}
    second = chain_of(Api.CHAT, {"messages": [USER, answer, NEXT]})
    said = heard(Api.CHAT, chat_stream(LONG), step)
    matches_next_turn(first, second, said, len(LONG.encode()))


@pytest.mark.parametrize("step", [1, 50, 10**9])
def test_tool_calls_of_a_chat_stream_are_put_together(step: int) -> None:
    function = CALL["function"]
    assert isinstance(function, dict)
    begin = {"index": 0, "id": "call_1", "type": "function"}
    calls = [
        chat_delta(tool_calls=[begin | {"function": {"name": "edit", "arguments": ""}}]),
        *(
            chat_delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            for piece in pieces(function["arguments"])
        ),
    ]
    data = chat_stream(LONG).replace(b"data: [DONE]\n\n", b"") + events(*calls)
    answer = {"role": "assistant", "content": LONG, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done " * 100}
    first = chain_of(Api.CHAT, {"messages": [USER]})
    second = chain_of(Api.CHAT, {"messages": [USER, answer, result]})
    total = len(LONG.encode()) + len(function["arguments"])
    matches_next_turn(first, second, heard(Api.CHAT, data, step), total)


def test_two_calls_in_one_answer_keep_their_own_arguments() -> None:
    deltas = []
    for index, name in enumerate(("read", "write")):
        begin = {"index": index, "id": f"c{index}", "type": "function"}
        start = begin | {"function": {"name": name, "arguments": '{"a'}}
        rest = {"index": index, "function": {"arguments": f'":{index}}}'}}
        deltas += [chat_delta(tool_calls=[start]), chat_delta(tool_calls=[rest])]
    for step in (1, 10**9):
        items = heard(Api.CHAT, events(*deltas), step).items()
        assert isinstance(items, list)
        calls = items[0]["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "read", "arguments": '{"a":0}'},
            {"name": "write", "arguments": '{"a":1}'},
        ]


def messages_stream(text: str) -> bytes:
    deltas = [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}, "index": 0}
        for piece in pieces(text)
    ]
    block = {"type": "text", "text": ""}
    start = {"type": "content_block_start", "content_block": block, "index": 0}
    return events(start, *deltas, {"type": "content_block_stop", "index": 0}, named=True)


@pytest.mark.parametrize("step", [1, 100, 10**9])
def test_text_and_tool_use_of_a_messages_stream_are_put_together(step: int) -> None:
    given = {"path": "a.py", "text": LONG}
    block = {"type": "tool_use", "id": "t1", "name": "edit", "input": {}}
    parts = [
        {
            "type": "content_block_delta",
            "delta": {"type": "input_json_delta", "partial_json": piece},
            "index": 1,
        }
        for piece in pieces(orjson.dumps(given).decode())
    ]
    start = {"type": "content_block_start", "content_block": block, "index": 1}
    data = messages_stream(LONG) + events(start, *parts, {"type": "message_stop"}, named=True)
    answer = {
        "role": "assistant",
        "content": [{"type": "text", "text": LONG}, block | {"input": given}],
    }
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "done " * 100}
    first = chain_of(Api.MESSAGES, {"messages": [USER]})
    second = chain_of(
        Api.MESSAGES, {"messages": [USER, answer, {"role": "user", "content": [result]}]}
    )
    matches_next_turn(first, second, heard(Api.MESSAGES, data, step), 2 * len(LONG.encode()))


@pytest.mark.parametrize("step", [1, 100, 10**9])
def test_a_responses_stream_is_followed_by_its_text(step: int) -> None:
    deltas = [
        {
            "content_index": 0,
            "delta": piece,
            "item_id": "msg_1",
            "type": "response.output_text.delta",
        }
        for piece in pieces(LONG)
    ]
    end = {"type": "response.completed", "response": {"output": [{"text": LONG}]}}
    said = heard(Api.RESPONSES, events(*deltas, end, named=True), step)
    first = chain_of(Api.RESPONSES, {"input": [USER]})
    answer = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": LONG}],
    }
    second = chain_of(Api.RESPONSES, {"input": [USER, answer, NEXT]})
    matches_next_turn(first, second, said, len(LONG.encode()))


def test_a_completion_goes_on_with_its_prompt() -> None:
    prompt = "Once upon a time " * 30
    data = events(*({"choices": [{"index": 0, "text": piece}]} for piece in pieces(LONG)))
    first = chain_of(Api.COMPLETIONS, {"prompt": prompt})
    second = chain_of(Api.COMPLETIONS, {"prompt": prompt + LONG + " and more " * 50})
    matches_next_turn(first, second, heard(Api.COMPLETIONS, data), len(LONG.encode()))


WHOLE = [
    (Api.CHAT, {"choices": [{"message": {"role": "assistant", "content": LONG}}]}),
    (Api.COMPLETIONS, {"choices": [{"text": LONG}]}),
    (Api.MESSAGES, {"content": [{"type": "text", "text": LONG}]}),
    (
        Api.RESPONSES,
        {
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": LONG}],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(("api", "answer"), WHOLE)
def test_whole_answers_are_followed_as_their_streams_are(api: Api, answer: dict[str, Any]) -> None:
    bodies: dict[Api, dict[str, Any]] = {
        Api.CHAT: {"messages": [USER]},
        Api.MESSAGES: {"messages": [USER]},
        Api.COMPLETIONS: {"prompt": "Once upon a time " * 30},
        Api.RESPONSES: {"input": [USER]},
    }
    stream = {
        Api.CHAT: chat_stream(LONG),
        Api.MESSAGES: messages_stream(LONG),
        Api.COMPLETIONS: events({"choices": [{"text": LONG}]}),
        Api.RESPONSES: events({"delta": LONG, "type": "response.output_text.delta"}, named=True),
    }[api]
    first = chain_of(api, bodies[api])
    data = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + orjson.dumps(answer)
    said = whole_answer(api, data, 500)
    assert said is not None
    assert grown(first, said) == grown(first, heard(api, stream)) is not None


def test_a_chain_grows_past_where_blocks_double_as_a_longer_prompt_would() -> None:
    question = {"role": "user", "content": "x" * (NARROW_BYTES - 1000)}
    answer = {"role": "assistant", "content": LONG * 3}
    first = chain_of(Api.CHAT, {"messages": [question]})
    second = chain_of(Api.CHAT, {"messages": [question, answer, NEXT]})
    hashes = grown(first, heard(Api.CHAT, chat_stream(LONG * 3)))
    assert hashes is not None
    assert len(hashes) > first.narrow_blocks > len(first.hashes)
    assert hashes == second.hashes[: len(hashes)]


def test_a_short_prompt_without_a_block_grows_too() -> None:
    hello = {"role": "user", "content": "hello"}
    first = chain_of(Api.CHAT, {"messages": [hello]})
    assert not first.hashes
    answer = {"role": "assistant", "content": LONG}
    second = chain_of(Api.CHAT, {"messages": [hello, answer, NEXT]})
    matches_next_turn(first, second, heard(Api.CHAT, chat_stream(LONG)), len(LONG.encode()))


@pytest.mark.parametrize(
    "data",
    [
        events(chat_delta(reasoning_content="hm")) + chat_stream(LONG),
        events(chat_delta(reasoning="hm")) + chat_stream(LONG),
        chat_stream("<think>hm</think>" + LONG),
        chat_stream("<think>hm, no end " + LONG),
    ],
)
def test_an_answer_that_reasons_is_not_followed(data: bytes) -> None:
    assert heard(Api.CHAT, data).items() is None


def test_reasoning_of_the_other_apis_is_not_followed() -> None:
    thought = {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "h"}}
    assert heard(Api.MESSAGES, events(thought, named=True) + messages_stream(LONG)).items() is None
    item = {"type": "response.reasoning_text.delta", "delta": "hm"}
    said = {"type": "response.output_text.delta", "delta": LONG}
    assert heard(Api.RESPONSES, events(item, said, named=True)).items() is None
    for api, answer in (
        (Api.CHAT, {"choices": [{"message": {"content": LONG, "reasoning": "hm"}}]}),
        (Api.MESSAGES, {"content": [{"type": "thinking", "thinking": "hm"}]}),
        (Api.RESPONSES, {"output": [{"type": "reasoning"}]}),
    ):
        whole = Said(api)
        whole.read(orjson.dumps(answer))
        assert whole.items() is None


def test_null_reasoning_is_none() -> None:
    data = events(chat_delta(content=LONG, reasoning=None, reasoning_content=None, tool_calls=None))
    assert heard(Api.CHAT, data).items() == [{"role": "assistant", "content": LONG}]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"choices":[]}', b'{"choices":[{"message":null}]}', b"\xff" * 9],
)
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
def test_odd_whole_answers_say_nothing(api: Api, data: bytes) -> None:
    said = Said(api)
    said.read(data)
    assert said.items() is None


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":7}}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":"name"}}]}\n\n',
        b'data: {"tool_calls": "name" broken\n\n',
        b'data: {"content":"no end',
        b"x" * 200_000,
    ],
)
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
def test_odd_streams_raise_nothing(api: Api, data: bytes) -> None:
    heard(api, data).items()
    heard(api, chat_stream("a" * 300) + data, 100).items()


def test_of_an_endless_answer_the_beginning_is_followed_and_no_more_is_held() -> None:
    first = chain_of(Api.CHAT, {"messages": [USER]})
    text = LONG * 200
    said = Said(Api.CHAT)
    for piece in pieces(text, 500):
        said.take([events(chat_delta(content=piece))])
    assert said.size_hint < MAX_BYTES + 2000
    hashes = grown(first, said)
    assert hashes is not None
    answer = {"role": "assistant", "content": text}
    second = chain_of(Api.CHAT, {"messages": [USER, answer, NEXT]})
    assert hashes == second.hashes[: len(hashes)]


def test_a_short_answer_costs_nothing_more() -> None:
    chain = chain_of(Api.CHAT, {"messages": [USER]})
    assert grown(chain, heard(Api.CHAT, chat_stream("x" * 255))) is None
    assert grown(chain, heard(Api.CHAT, chat_stream("x" * 300))) is not None
    assert whole_answer(Api.CHAT, b"{}", 63) is None
    assert whole_answer(Api.CHAT, b"{}", 64) is not None


def test_an_exact_chain_is_left_to_its_tokenizer() -> None:
    chain = chain_of(Api.CHAT, {"messages": [USER]})
    exact = Chain(chain.hashes, 16.0, 500, exact=True)
    assert grown(exact, heard(Api.CHAT, chat_stream(LONG))) is None


@pytest.mark.parametrize(
    ("api", "body", "followed"),
    [
        (Api.CHAT, {"messages": []}, True),
        (Api.CHAT, {"messages": [], "n": 2}, False),
        (Api.CHAT, {"messages": [], "continue_final_message": True}, False),
        (Api.COMPLETIONS, {"prompt": "a"}, True),
        (Api.COMPLETIONS, {"prompt": ["a"]}, True),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, False),
        (Api.COMPLETIONS, {"prompt": [1, 2]}, False),
        (Api.COMPLETIONS, {"prompt": "a", "echo": True}, False),
        (Api.RESPONSES, {"input": "a"}, True),
        (Api.RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, False),
        (Api.EMBEDDINGS, {"input": "a"}, False),
    ],
)
def test_only_what_the_next_turn_repeats_is_followed(
    api: Api, body: dict[str, Any], followed: bool
) -> None:
    assert is_followed(parse_json(api, orjson.dumps({"model": "m"} | body))) is followed


RECORDED = [
    ("vllm-0.32/chat_stream.response.http", Api.CHAT, "vllm-0.32/chat.response.http"),
    ("llamacpp/chat_stream.response.http", Api.CHAT, "llamacpp/chat.response.http"),
    ("vllm-0.32/completion_stream.response.http", Api.COMPLETIONS, None),
    ("vllm-0.32/messages_stream.response.http", Api.MESSAGES, None),
    ("llamacpp/messages_stream.response.http", Api.MESSAGES, None),
    ("vllm-0.32/responses_stream.response.http", Api.RESPONSES, None),
    ("llamacpp/responses_stream.response.http", Api.RESPONSES, None),
]


@pytest.mark.parametrize(("name", "api", "whole"), RECORDED)
@pytest.mark.parametrize("step", [1, 60, 10**6])
def test_recorded_streams_say_all_their_text_in_any_split(
    name: str, api: Api, whole: str | None, step: int
) -> None:
    data = payload_of(name)
    scanner = Scanner(api)
    for start in range(0, len(data), step):
        scanner.keep(data[start : start + step])
    said = scanner.said(stream=True)
    assert said is not None
    items = said.items()
    texts = [
        value.get("text") or value["choices"][0].get("text")
        for value in _values(data)
        if api is Api.COMPLETIONS and value.get("choices")
    ]
    if api is Api.COMPLETIONS:
        assert items == "".join(texts)
        return
    assert isinstance(items, list)
    content = items[0]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    assert text == _text_of(api, data)
    if whole is not None:
        read = Said(api)
        read.read(payload_of(whole))
        assert read.items() is not None


def _values(data: bytes) -> list[dict[str, Any]]:
    lines = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
    return [orjson.loads(line) for line in lines if line.startswith(b"{")]


def _text_of(api: Api, data: bytes) -> str:
    """The stream's text, read the slow way."""
    text = ""
    for value in _values(data):
        if api is Api.CHAT:
            text += "".join(c["delta"].get("content") or "" for c in value["choices"])
        elif api is Api.MESSAGES:
            text += (value.get("delta") or {}).get("text", "")
        elif value.get("type") == "response.output_text.delta":
            text += value["delta"]
    return text


@pytest.mark.parametrize("size", [1, 7, 40, 90, 300])
@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
def test_chunks_as_they_come_say_what_all_of_the_stream_says(
    api: Api, batch: int, size: int
) -> None:
    parts = pieces(LONG, size)
    stream = {
        Api.CHAT: events(
            chat_delta(role="assistant", content=""),
            *(chat_delta(content=part) | {"pad": "x" * 90} for part in parts),
            chat_delta() | {"finish_reason": "stop"},
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 9}},
        ),
        Api.COMPLETIONS: events(*({"choices": [{"index": 0, "text": part}]} for part in parts)),
        Api.MESSAGES: messages_stream(LONG),
        Api.RESPONSES: events(
            *(
                {"delta": part, "sequence_number": n, "type": "response.output_text.delta"}
                for n, part in enumerate(parts)
            ),
            named=True,
        ),
    }[api] + b"data: [DONE]\n\n"
    chunks = framed(stream)
    said = Said(api)
    for start in range(0, len(chunks), batch):
        said.take(chunks[start : start + batch])
    items = said.items()
    assert items == heard(api, stream).items()
    said_text = items
    if isinstance(items, list):
        content = items[0]["content"]
        said_text = content if isinstance(content, str) else content[0]["text"]
    assert said_text == LONG


def test_two_events_in_one_chunk_are_both_heard() -> None:
    one, two = chat_delta(content="one "), chat_delta(content="two ")
    said = Said(Api.CHAT)
    said.take(framed(events(one)) * 5)
    both = events(one, two)
    said.take([b"%x\r\n%b\r\n" % (len(both), both)])
    said.take(framed(events(two)) * 3)
    assert said.items() == [{"role": "assistant", "content": "one " * 6 + "two " * 4}]
