"""Generated traffic: reproducible, of the announced shape, sized for the demonstration."""

from itertools import pairwise

import pytest

from gateway.sim import tokens, workload
from gateway.sim.profiles import DEMO

CODING = workload.CodingShape(users=6, repositories=3).scaled(8)
CHAT = workload.ChatShape(rate=2.0).scaled(8)


def prompt_tokens(session: workload.Session, turns: int, answer: int) -> int:
    messages = [{"role": "system", "content": session.system}]
    for turn in session.turns[:turns]:
        messages += [{"role": "user", "content": turn.text}, {"role": "a", "content": "x" * answer}]
    return tokens.count(tokens.render(messages, tools=list(session.tools)))


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_traffic(seed: int) -> None:
    assert workload.demo(2, 0.8, 60, seed) == workload.demo(2, 0.8, 60, seed)
    assert workload.demo(2, 0.8, 60, seed) != workload.demo(2, 0.8, 60, seed + 1)


def test_coding_sessions_share_tools_and_repositories_and_nothing_else() -> None:
    sessions = workload.coding(CODING, 200, 1)
    systems = {session.system for session in sessions}

    assert len({session.tools[0]["function"]["description"] for session in sessions}) == 1
    assert len(systems) == CODING.repositories
    common = min(len(s) for s in systems) - CODING.repository * 4
    assert len({s[:common] for s in systems}) == 1
    texts = [turn.text for session in sessions for turn in session.turns]
    assert len({text[:16] for text in texts}) == len(texts)


def test_a_coding_prompt_starts_at_its_common_part_and_grows_every_turn() -> None:
    session = workload.coding(CODING, 60, 1)[0]
    sizes = [prompt_tokens(session, turns, 4 * 80) for turns in range(len(session.turns) + 1)]

    assert sizes[0] == pytest.approx(CODING.common + CODING.repository, rel=0.1)
    assert all(a < b for a, b in pairwise(sizes))


def test_chat_arrives_in_bursts_at_the_asked_rate() -> None:
    sessions = workload.chat(CHAT, 4000, 3)
    gaps = [b.start_s - a.start_s for a, b in pairwise(sessions)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(1 / CHAT.rate, rel=0.2)
    assert deviation / mean == pytest.approx(CHAT.cv, rel=0.3)
    assert len({session.system for session in sessions}) == CHAT.prompts
    turns = sum(len(session.turns) for session in sessions) / len(sessions)
    assert turns == pytest.approx(CHAT.turns, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_demo_contexts_exceed_one_replicas_cache_and_fit_the_pool(seed: int) -> None:
    replicas, load = 4, 0.8
    sessions = workload.demo(replicas, load, 150, seed)
    agents = [s for s in sessions if s.cls == "coding"]
    users = {s.id.split("-")[1] for s in agents}
    longest = max(prompt_tokens(s, len(s.turns), 4 * 320) for s in agents)
    final = [prompt_tokens(s, len(s.turns) // 2, 4 * 80) for s in agents]
    average = sum(final) / len(final)

    assert longest < DEMO.max_model_len
    assert DEMO.engine.kv_tokens < average * len(users) < replicas * DEMO.engine.kv_tokens


def test_tools_mark_coding_only() -> None:
    kinds = {(s.cls, bool(s.tools)) for s in workload.demo(1, 1.0, 60, 0)}

    assert kinds == {("coding", True), ("chat", False)}


def test_texts_have_the_length_asked_for() -> None:
    for session in workload.chat(CHAT, 100, 1):
        assert all(len(turn.text) % 4 == 0 and len(turn.text) >= 16 for turn in session.turns)
