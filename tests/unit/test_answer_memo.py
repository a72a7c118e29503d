import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.relay.heads import AnswerMemo, Headers

BODY = b'{"a":1}'
VLLM = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 15:09:43 GMT\r\nserver: uvicorn\r\n"
    b"content-length: 7\r\ncontent-type: application/json\r\n\r\n"
)
UNDATED = (
    b"HTTP/1.1 404 Not Found\r\nServer: x\r\nContent-Type: text/plain\r\nContent-Length: 7\r\n\r\n"
)


class Parsed:
    """What llhttp makes of an answer."""

    def __init__(self, data: bytes) -> None:
        self.headers: Headers = []
        self.reason = b""
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(data)
        self.status = parser.get_status_code()

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))


def noted(head: bytes) -> AnswerMemo:
    memo = AnswerMemo()
    parsed = Parsed(head + BODY)
    memo.note(head + BODY, parsed.status, parsed.reason, parsed.headers)
    return memo


@pytest.mark.parametrize("head", [VLLM, UNDATED])
def test_the_same_head_is_known_with_another_date_and_length(head: bytes) -> None:
    memo = noted(head)
    other = head.replace(b"15:09:43", b"16:10:44").replace(b": 7\r\n", b": 1234\r\n")

    assert memo.match(head + BODY) == len(head)
    assert memo.match(other + b"x" * 1234) == len(other)
    shown = memo.head + memo.length + b"\r\n\r\n"
    assert sorted(shown.lower().split(b"\r\n")) == sorted(other.lower().split(b"\r\n"))
    assert memo.status == Parsed(head + BODY).status


@pytest.mark.parametrize("head", [VLLM, UNDATED])
def test_a_head_that_differs_in_any_byte_is_not_known(head: bytes) -> None:
    data = head + BODY
    variable = {data.index(b" 7\r\n") + 1}
    for at in range(len(head)):
        for byte in (data[at] ^ 0x20, data[at] ^ 1, 0, 10, 13, 32, 255):
            changed = data[:at] + bytes([byte]) + data[at + 1 :]
            if changed == data or at in variable:
                continue
            memo = noted(head)
            start = memo.match(changed)
            if start:  # only another second may be known
                date = data.find(b"Mon, ")
                assert date <= at < date + 29
                assert Parsed(changed).headers[0] == (b"date", changed[date : date + 29])


@pytest.mark.parametrize("head", [VLLM, UNDATED])
@pytest.mark.parametrize("digits", [b"", b"+7", b"-7", b"7 7", b"0x7", b"7,7", b"8", b"6", b"0"])
def test_a_length_that_is_not_the_bodys_is_not_known(head: bytes, digits: bytes) -> None:
    data = head.replace(b" 7\r\n", b" " + digits + b"\r\n") + BODY

    assert noted(head).match(data) == 0


@pytest.mark.parametrize(
    "head",
    [
        VLLM.replace(b"content-length: 7", b"transfer-encoding: chunked"),
        VLLM.replace(b"application/json", b"text/event-stream"),
        VLLM.replace(b"HTTP/1.1 200 OK", b"HTTP/1.1 304 Not Modified"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + VLLM,
    ],
)
def test_heads_that_need_the_parser_are_not_noted(head: bytes) -> None:
    memo = AnswerMemo()
    parsed = Parsed(head)
    memo.note(head + BODY, parsed.status, parsed.reason, parsed.headers)

    assert memo.match(head + BODY) == 0


def test_a_backend_that_varies_its_heads_is_noted_no_more() -> None:
    memo, data = AnswerMemo(), b""
    for i in range(20):
        data = VLLM.replace(b"uvicorn", b"%d" % i) + BODY
        assert memo.match(data) == 0
        parsed = Parsed(data)
        memo.note(data, parsed.status, parsed.reason, parsed.headers)

    assert memo.match(data) == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(VLLM + BODY)))
def test_a_part_of_an_answer_is_not_known(cut: int) -> None:
    whole = VLLM + BODY
    memo = noted(VLLM)

    assert bool(memo.match(whole[:cut])) == (cut == len(whole))
    assert memo.match(whole + whole[:cut]) == (len(VLLM) if cut == 0 else 0)
