"""The synthetic workloads have the shapes they are named for."""

from itertools import pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from gateway.sim.generators import MAKERS, WARM_SHARE, synthetic
from gateway.sim.generators.arrivals import bursty, poisson
from gateway.sim.traffic import BLOCK_TOKENS, Dialogue, Workload


def made(name: str, rate: float = 10.0) -> Workload:
    return synthetic(name, requests=3000)(rate, 1)


def prompts(workload: Workload) -> list[int]:
    return [ask.prompt_tokens for dialogue in workload.dialogues for ask in dialogue.asks]


def share(workload: Workload, length: int) -> float:
    """Share of the dialogues whose first `length` tokens some other begins with as well."""
    blocks = length // BLOCK_TOKENS
    starts = [tuple(dialogue.hashes[:blocks]) for dialogue in workload.dialogues]
    return sum(starts.count(start) > 1 for start in starts) / len(starts)


@pytest.mark.parametrize("name", MAKERS)
def test_a_workload_is_in_order_and_covered_by_its_hashes(name: str) -> None:
    workload = made(name)
    starts = [dialogue.start_s for dialogue in workload.dialogues]
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1] < workload.seconds
    assert workload.warm_s == WARM_SHARE * workload.seconds
    for dialogue in workload.dialogues:
        last = dialogue.asks[-1]
        assert len(dialogue.hashes) >= last.prompt_tokens // BLOCK_TOKENS
        assert dialogue.cls in workload.slos
        lengths = [ask.prompt_tokens for ask in dialogue.asks]
        assert lengths == sorted(lengths)
        assert all(ask.output_tokens >= 1 for ask in dialogue.asks)


@pytest.mark.parametrize("name", MAKERS)
def test_the_rate_is_requests_per_second(name: str) -> None:
    workload = made(name, 8.0)
    asked = sum(len(dialogue.asks) for dialogue in workload.dialogues)
    assert asked / workload.seconds == pytest.approx(8.0, rel=0.2)


def test_coding_prompts_grow_to_sixty_thousand_tokens() -> None:
    workload = made("coding")
    assert mean(prompts(workload)) == pytest.approx(40_000, rel=0.1)
    ends = [dialogue.asks[-1].prompt_tokens for dialogue in workload.dialogues]
    assert mean(ends) == pytest.approx(60_000, rel=0.1)
    assert share(workload, 12_000) == 1.0


def test_groups_share_six_thousand_tokens_and_no_more() -> None:
    workload = made("groups")
    assert share(workload, 6_000) > 0.99
    assert share(workload, 6_100) == 0.0


def test_unique_and_short_prompts_share_nothing() -> None:
    for name, length in (("unique", 3_500), ("short", 150)):
        workload = made(name)
        blocks = [block for dialogue in workload.dialogues for block in dialogue.hashes]
        assert len(set(blocks)) == len(blocks)
        assert mean(prompts(workload)) == pytest.approx(length, rel=0.15)


def test_the_hot_document_is_in_three_tenths_of_the_requests() -> None:
    workload = made("hot")
    hot = sum(tokens >= 24_000 for tokens in prompts(workload)) / len(workload.dialogues)
    assert hot == pytest.approx(0.3, abs=0.05)


def test_half_of_the_agents_requests_are_tool_calls_with_tiny_answers() -> None:
    workload = made("agents")
    asks = [ask for dialogue in workload.dialogues for ask in dialogue.asks]
    tools = [d for d in workload.dialogues if d.cls == "chat"]
    assert len(tools) / len(asks) == pytest.approx(0.52, abs=0.05)
    assert all(3 <= dialogue.asks[0].output_tokens <= 40 for dialogue in tools)


def test_the_mix_is_mostly_chat_sessions() -> None:
    dialogues: list[Dialogue] = list(made("mix").dialogues)
    chat = sum(dialogue.cls == "chat" for dialogue in dialogues) / len(dialogues)
    assert chat == pytest.approx(0.85, abs=0.05)


def test_bursts_have_the_variation_asked_for() -> None:
    for cv, times in (
        (1.0, list(poisson(Random(1), 50.0, 400.0))),
        (4.0, list(bursty(Random(1), 50.0, 400.0, 4.0))),
    ):
        gaps = [b - a for a, b in pairwise(times)]
        assert mean(gaps) == pytest.approx(1 / 50, rel=0.15)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.15)


def test_an_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown synthetic workload 'x': one of coding, chat"):
        synthetic("x")
