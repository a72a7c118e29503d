"""Whatever short prompts come, in whatever order, a long prompt's estimate stays near the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prompter import BytePrompter
from gateway.core.request import ParsedRequest, parse_json
from gateway.core.token_fit import LONG_BYTES
from gateway.core.types import Api, Chain

overheads = st.integers(0, 64)
ratios = st.floats(2.7, 5.3)  # 4 is believed at first; dense scripts have less, prose has more
short = st.lists(st.integers(1, LONG_BYTES - 200), min_size=1, max_size=60)
long = st.integers(LONG_BYTES, 100_000)
shared_starts = st.booleans()


class Engine:
    """Counts as an engine does whose template adds `overhead` tokens."""

    def __init__(self, overhead: int, ratio: float, *, shared: bool) -> None:
        self.prompter = BytePrompter(1)
        self.overhead, self.ratio, self.shared = overhead, ratio, shared
        self.asked = 0

    def _request(self, size: int) -> ParsedRequest:
        self.asked += 1
        start = "" if self.shared else f"{self.asked} "
        text = (start + "x" * size)[:size]
        return parse_json(Api.COMPLETIONS, b'{"model":"m","prompt":"%b"}' % text.encode())

    def true_tokens(self, chain: Chain) -> float:
        return self.overhead + chain.text_bytes / self.ratio

    def serve(self, size: int) -> None:
        chain = self.prompter.chain(self._request(size))
        self.prompter.learn("m", "chat", chain, round(self.true_tokens(chain)))

    def error(self, size: int) -> float:
        chain = self.prompter.chain(self._request(size))
        return abs(chain.tokens / self.true_tokens(chain) - 1.0)


@given(overheads, ratios, shared_starts, short, long)
def test_short_prompts_alone_leave_a_long_one_within_a_third(
    overhead: int, ratio: float, shared: bool, sizes: list[int], size: int
) -> None:
    engine = Engine(overhead, ratio, shared=shared)
    for each in sizes:
        engine.serve(each)
    assert engine.error(size) < 0.35


@given(overheads, ratios, shared_starts, st.tuples(short, long, short), long)
def test_one_long_prompt_is_enough_whatever_short_ones_come_before_and_after(
    overhead: int,
    ratio: float,
    shared: bool,
    served: tuple[list[int], int, list[int]],
    asked: int,
) -> None:
    engine = Engine(overhead, ratio, shared=shared)
    before, seen, after = served
    for size in (*before, seen, *after):
        engine.serve(size)
    assert engine.error(asked) < 0.10
    assert engine.error(seen) < 0.10


@pytest.mark.parametrize("overhead", [0, 36, 64])
@pytest.mark.parametrize("ratio", [2.7, 4.0, 5.3])
def test_thousands_of_short_prompts_forget_nothing_about_long_ones(
    overhead: int, ratio: float
) -> None:
    engine = Engine(overhead, ratio, shared=True)
    engine.serve(LONG_BYTES)
    for turn in range(5000):
        engine.serve(1 + turn % 400)
    assert engine.error(LONG_BYTES) < 0.10
    assert engine.error(100_000) < 0.10
