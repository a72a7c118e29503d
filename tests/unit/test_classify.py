from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.classify import DEFAULT_RULE, FORCED_RULE, KEY_RULE, Classifier, Features
from gateway.core.settings import ClassSpec, MatchRule

CODING = ClassSpec(
    "coding",
    match=(
        MatchRule(path="/v1/messages"),
        MatchRule(tools=True),
        MatchRule(min_prompt_tokens=8000),
        MatchRule(user_agent="claude-cli*"),
        MatchRule(key="agents"),
        MatchRule(model="*-coder", max_prompt_tokens=50),
    ),
)
CHAT = ClassSpec("chat", default=True)
PLAIN = Features(
    "/v1/chat/completions", tools=False, prompt_tokens=100, user_agent="curl", model="m"
)


def classify(**changes: Any) -> tuple[str, str]:
    return Classifier((CODING, CHAT)).classify(replace(PLAIN, **changes))


def test_what_no_rule_matches_is_of_the_default_class() -> None:
    assert classify() == ("chat", DEFAULT_RULE)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"path": "/v1/messages"}, "path=/v1/messages"),
        ({"tools": True}, "tools=true"),
        ({"prompt_tokens": 8000}, "min_prompt_tokens=8000"),
        ({"user_agent": "claude-cli/2.0 (x)"}, "user_agent=claude-cli*"),
        ({"key": "agents"}, "key=agents"),
        ({"model": "qwen3-coder", "prompt_tokens": 50}, "max_prompt_tokens=50 model=*-coder"),
    ],
)
def test_each_rule_matches_and_is_named(change: dict[str, object], rule: str) -> None:
    cls, text = classify(**change)
    assert cls == "coding"
    assert sorted(text.split()) == sorted(rule.split())


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 7999},
        {"user_agent": "not claude-cli/1"},
        {"key": "agents2"},
        {"model": "qwen3-coder", "prompt_tokens": 51},
        {"path": "/v1/messages/count_tokens"},
    ],
)
def test_a_rule_that_holds_only_in_part_does_not_match(change: dict[str, object]) -> None:
    assert classify(**change)[0] == "chat"


def test_a_forced_class_beats_the_keys_class_and_all_rules() -> None:
    assert classify(tools=True, key_class="coding", forced_class="chat") == ("chat", FORCED_RULE)


def test_the_keys_class_beats_the_rules() -> None:
    assert classify(tools=True, key_class="chat") == ("chat", KEY_RULE)


def test_a_class_that_does_not_exist_forces_nothing() -> None:
    assert classify(forced_class="gold", key_class="silver") == ("chat", DEFAULT_RULE)


def test_classes_are_tried_in_configured_order() -> None:
    first = ClassSpec("first", match=(MatchRule(tools=True),))
    second = ClassSpec("second", match=(MatchRule(tools=True),), default=True)
    assert Classifier((first, second)).classify(Features("/", tools=True, prompt_tokens=1)) == (
        "first",
        "tools=true",
    )


def test_an_empty_rule_matches_everything() -> None:
    spec = ClassSpec("all", match=(MatchRule(),))
    assert Classifier((spec, CHAT)).classify(PLAIN) == ("all", "any")


def test_without_a_default_the_last_class_takes_the_rest() -> None:
    classifier = Classifier((ClassSpec("a"), ClassSpec("b")))
    assert classifier.classify(PLAIN) == ("b", DEFAULT_RULE)


def test_no_classes_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one class"):
        Classifier(())


def test_patterns_are_case_sensitive_globs_not_expressions() -> None:
    spec = ClassSpec("x", match=(MatchRule(user_agent="a.c*"),))
    classifier = Classifier((spec, CHAT))
    assert classifier.classify(Features("/", False, 1, "abc"))[0] == "chat"
    assert classifier.classify(Features("/", False, 1, "a.cd"))[0] == "x"


def test_what_is_remembered_of_a_client_never_changes_the_answer() -> None:
    kept = Classifier((CODING, CHAT))
    rng = Random(1)
    for _ in range(3000):
        features = Features(
            rng.choice(["/v1/messages", "/v1/chat/completions"]),
            rng.random() < 0.2,
            rng.choice([10, 50, 51, 7999, 8000]),
            rng.choice(["", "curl", "claude-cli/1", "claude-cli" + "x" * 1000]),
            rng.choice([None, "agents", "agent"]),
            rng.choice(["m", "qwen-coder"]),
            rng.choice([None, None, "chat", "gold"]),
            rng.choice([None, None, "coding", "silver"]),
        )
        assert kept.classify(features) == Classifier((CODING, CHAT)).classify(features)


def test_clients_that_invent_agents_fill_no_memory() -> None:
    classifier = Classifier((CODING, CHAT))
    sizes = []
    for number in range(3000):
        classifier.classify(replace(PLAIN, user_agent=f"agent {number}"))
        classifier.classify(replace(PLAIN, user_agent=f"{number}" + "x" * 5000))
        sizes.append(len(classifier._left))
    assert 100 < max(sizes) <= 1024
    assert max(len(client[2]) for client in classifier._left) < 100
