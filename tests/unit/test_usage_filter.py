import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.usage_filter import HOLD_MAX, UsageFilter

USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1}}\n\n'
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\""}}]}\n\n',
    b": comment\n\n",
    b'data: {"choices": [{"delta":{}}]}\r\n\r\n',
    b"data: [DONE]\n\n",
    b"data: " + b"x" * 5000 + b"\n\n",
]


def run(pieces: list[bytes]) -> bytes:
    usage_filter = UsageFilter()
    return b"".join(map(usage_filter.feed, pieces)) + usage_filter.flush()


@given(st.lists(st.sampled_from([*EVENTS, USAGE]), max_size=8), st.data())
def test_only_the_usage_event_goes_in_any_split(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]

    assert run(pieces) == b"".join(event for event in events if event != USAGE)


def test_an_event_longer_than_the_hold_is_passed_on_unfinished() -> None:
    usage_filter = UsageFilter()
    long = b"data: " + b"x" * (2 * HOLD_MAX)

    assert usage_filter.feed(long) == long
    assert usage_filter.feed(b"tail\n\n" + USAGE + EVENTS[0]) == b"tail\n\n" + EVENTS[0]


def test_spaced_json_is_recognised() -> None:
    assert run([re.sub(rb":\[\]", rb": [ ]", USAGE)]) == b""


def test_an_unfinished_event_is_flushed_at_the_end() -> None:
    assert run([b'data: {"cho']) == b'data: {"cho'
