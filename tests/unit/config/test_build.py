from pathlib import Path

import pytest

from gateway.config.build import core_settings, effective_classes
from gateway.config.schema import BackendConfig, Config
from gateway.core.settings import (
    AffinitySpec,
    BucketSpec,
    ChwblSpec,
    CostSpec,
    DynamoSpec,
    MatchRule,
    ModelSpec,
    PrebleSpec,
    RoutingSpec,
    Slo,
    SmgSpec,
    WeightsSpec,
)
from tests.unit.config import ONE_BACKEND, load_text


def test_without_classes_coding_and_chat_are_built_in() -> None:
    coding, chat = core_settings(Config(), {}).classes

    agents = ("claude-cli*", "codex*", "cline*", "aider*", "continue*", "opencode*")
    assert coding.name == "coding"
    assert coding.match == (
        MatchRule(path="/v1/messages"),
        MatchRule(tools=True),
        MatchRule(min_prompt_tokens=8000),
        *(MatchRule(user_agent=agent) for agent in agents),
    )
    assert (chat.name, chat.default, coding.default) == ("chat", True, False)
    assert (coding.bucket, chat.bucket) == (None, None)


def test_a_class_is_carried_over_whole(tmp_path: Path) -> None:
    text = (
        ONE_BACKEND
        + """\
classes:
  big:
    match: [{path: /x, tools: false, min_prompt_tokens: 1, max_prompt_tokens: 2,
             user_agent: u, model: "m*"}]
    bucket: {tokens_per_second: 3, burst_tokens: 4}
    share: 0.25
    max_wait_s: 6
    slo: {ttft_s: 7, tpot_s: 8}
  rest: {default: true}
"""
    )
    big, rest = core_settings(load_text(tmp_path, text).config, {}).classes

    assert big.match == (
        MatchRule("/x", tools=False, min_prompt_tokens=1, max_prompt_tokens=2,
                  user_agent="u", model="m*"),
    )  # fmt: skip
    assert big.bucket == BucketSpec(3, 4)
    assert (big.share, big.max_wait_s, big.slo) == (0.25, 6, Slo(7, 8))
    assert rest.default


def test_classes_without_a_share_part_what_the_others_leave(tmp_path: Path) -> None:
    text = ONE_BACKEND + "classes: {a: {share: 0.4}, b: {default: true}, c: {}}"

    shares = [cls.share for cls in core_settings(load_text(tmp_path, text).config, {}).classes]

    assert shares == pytest.approx([0.4, 0.3, 0.3])


def test_a_single_class_is_the_default(tmp_path: Path) -> None:
    config = load_text(tmp_path, ONE_BACKEND + "classes: {only: {}}").config

    assert core_settings(config, {}).classes[0].default
    assert effective_classes(config)["only"].default


def test_models_come_from_the_file_and_from_what_backends_serve(tmp_path: Path) -> None:
    text = """\
models:
  - {name: m, aliases: [n], backends: [{name: a, url: "http://h:1"}]}
backends: [{name: b, url: "http://h:2"}, {name: c, url: "http://h:3"}]
"""
    served = {"x": ("b", "c", "b"), "m": ("b",), "n": ("c",), "y": ("gone",), "z": ("gone", "c")}

    settings = core_settings(load_text(tmp_path, text).config, served)

    assert settings.models == (
        ModelSpec("m", ("a",), ("n",)),
        ModelSpec("x", ("b", "c")),
        ModelSpec("z", ("c",)),
    )
    assert [backend.name for backend in settings.backends] == ["a", "b", "c"]


def test_numbers_change_their_unit_and_nothing_else(tmp_path: Path) -> None:
    text = (
        ONE_BACKEND
        + """\
routing: {policy: weights, weights: {prefix: 1, queue: 2, kv: 3}}
poll: {interval_s: 2}
index: {max_mib: 3, block_bytes: 64}
"""
    )
    settings = core_settings(load_text(tmp_path, text).config, {})

    assert settings.routing == RoutingSpec("weights", weights=WeightsSpec(1, 2, 3))
    assert settings.stale_after_s == 6
    assert settings.index_bytes == 3 * 1024 * 1024
    assert settings.block_bytes == 64


def test_every_model_names_backends_that_exist() -> None:
    config = Config(backends=[BackendConfig(url="http://h:1")])

    settings = core_settings(config, {"m": ("backend-1",)})

    names = {backend.name for backend in settings.backends}
    assert all(set(model.backends) <= names for model in settings.models)
    assert settings.models[0].backends == ("backend-1",)


def test_the_routing_keys_have_the_defaults_of_the_core(tmp_path: Path) -> None:
    """Those of `weights` are the contract's, 3:5:2; the core's are the public chart's, 3:2:2."""
    settings = core_settings(load_text(tmp_path, ONE_BACKEND).config, {})
    assert settings.routing == RoutingSpec(weights=WeightsSpec(3, 5, 2))


def test_every_parameter_of_a_policy_reaches_the_core(tmp_path: Path) -> None:
    text = (
        ONE_BACKEND
        + """\
routing:
  policy: smg
  shadow: chwbl
  cost: {stall_weight: 0.2, tie_ratio: 0}
  affinity: {hit_ratio: 0.5, penalty_s: 2}
  smg: {match_ratio: 0.3, imbalance_requests: 64, imbalance_ratio: 1.5, guard: backend}
  dynamo: {overlap_weight: 2, block_tokens: 64}
  preble: {redirect_ratio: 3}
  chwbl: {virtual_nodes: 64, load_ratio: 1.1}
"""
    )
    assert core_settings(load_text(tmp_path, text).config, {}).routing == RoutingSpec(
        policy="smg",
        shadow="chwbl",
        cost=CostSpec(stall_weight=0.2, tie_ratio=0.0),
        weights=WeightsSpec(3, 5, 2),
        affinity=AffinitySpec(0.5, 2.0),
        smg=SmgSpec(0.3, 64, 1.5, "backend"),
        dynamo=DynamoSpec(2.0, 64),
        preble=PrebleSpec(3.0),
        chwbl=ChwblSpec(64, 1.1),
    )
