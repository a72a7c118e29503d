"""The filter takes out the usage chunk and nothing else, whatever the split."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.relay.usage_filter import HOLD_MAX, UsageFilter
from tests.property.wire import pieces, splits

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}'
KEPT = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}',
    b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\":{"}}]}',
    b'data: {"choices":[],"usage":null}',
    b'data: {"choices": [],"prompt_filter_results":[]}',
    b"data: [DONE]",
    b": comment",
    b"event: x\ndata: 1",
    b'data: {"choices":[{"x":"' + b"y" * HOLD_MAX + b'"}]}',
]
events = st.lists(
    st.tuples(st.sampled_from([USAGE, USAGE, *KEPT]), st.sampled_from([b"\n\n", b"\r\n\r\n"])),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(events, st.booleans(), st.data())
@example([(KEPT[7], b"\n\n"), (USAGE, b"\n\n")], False, None)
def test_only_usage_chunks_are_taken_out(
    events: list[tuple[bytes, bytes]], cut_short: bool, data: st.DataObject | None
) -> None:
    raw = b"".join(event + end for event, end in events)
    expected = b"".join(event + end for event, end in events if event != USAGE)
    if cut_short:
        raw, expected = raw + b'data: {"ha', expected + b'data: {"ha'
    cuts = data.draw(splits(max(2, len(raw)))) if data is not None else [len(KEPT[7]) + 1]
    usage_filter = UsageFilter()
    got = b"".join(usage_filter.feed(part) for part in pieces(raw, cuts))

    assert got + usage_filter.flush() == expected
