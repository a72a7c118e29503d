"""What a reload changes, told path by path, with no secret in it."""

import pytest

from gateway.config.diff import MOST_CHANGES, changes
from gateway.config.schema import (
    BackendConfig,
    BucketConfig,
    ClassConfig,
    Config,
    KeyConfig,
    KubernetesConfig,
    LimitsConfig,
    MatchConfig,
    ModelConfig,
)


def _told(old: Config, new: Config) -> list[str]:
    return [str(change) for change in changes(old, new)]


def _model(*backends: BackendConfig, **more: object) -> ModelConfig:
    return ModelConfig(name="m", backends=list(backends), **more)  # type: ignore[arg-type]


A = BackendConfig(name="a", url="http://h:1")
B = BackendConfig(name="b", url="http://h:2")


def test_the_same_twice_is_no_change() -> None:
    assert _told(Config(models=[_model(A)]), Config(models=[_model(A)])) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            Config(),
            Config(limits=LimitsConfig(streams=5, body_mib=1)),
            ["limits.body_mib: 64 -> 1", "limits.streams: 10000 -> 5"],
        ),
        (
            Config(models=[_model(A)]),
            Config(models=[_model(B, aliases=["x"])]),
            [
                "models[m].aliases: [] -> [x]",
                "models[m].backends[a] removed",
                "models[m].backends[b] added: {name: b, url: 'http://h:2'}",
            ],
        ),
        (
            Config(backends=[BackendConfig(url="http://h:1"), A]),
            Config(backends=[BackendConfig(url="http://h:9"), A]),
            ["backends[0].url: http://h:1 -> http://h:9"],
        ),
        (
            Config(classes={"c": ClassConfig(bucket=None)}),
            Config(
                classes={
                    "c": ClassConfig(
                        bucket=BucketConfig(tokens_per_second=1.0, burst_tokens=2.0),
                        match=[MatchConfig(tools=True)],
                    ),
                    "a b": ClassConfig(),
                }
            ),
            [
                "classes.c.match[0] added: {tools: true}",
                "classes.c.bucket added: {burst_tokens: 2.0, tokens_per_second: 1.0}",
                "classes.'a b' added: {}",
            ],
        ),
        (
            Config(backends=[BackendConfig(name="k", kubernetes=KubernetesConfig(service="v"))]),
            Config(backends=[BackendConfig(name="k", kubernetes=KubernetesConfig(service="w"))]),
            ["backends[k].kubernetes.service: v -> w"],
        ),
        (Config(record="/a"), Config(), ["record: /a -> null"]),
    ],
)
def test_every_changed_path_is_told_with_its_values(
    old: Config, new: Config, told: list[str]
) -> None:
    assert _told(old, new) == told


def test_the_hash_of_a_key_is_never_told() -> None:
    one, two = "1" * 64, "2" * 64
    old = Config(keys=[KeyConfig(name="k", sha256=one), KeyConfig(name="gone", sha256=one)])
    new = Config(keys=[KeyConfig(name="k", sha256=two), KeyConfig(name="come", sha256=two)])
    told = changes(old, new)

    assert [change.path for change in told] == ["keys[k].sha256", "keys[gone]", "keys[come]"]
    assert not [c for c in told if one in str((c.old, c.new)) or two in str((c.old, c.new))]


def test_a_long_value_is_cut_and_very_many_changes_are() -> None:
    old = Config(backends=[BackendConfig(name=f"b{n}", url=f"http://h:{n}") for n in range(1, 300)])
    new = Config(record="x" * 500)

    assert len(changes(old, new)) == MOST_CHANGES
    (long,) = changes(Config(), new)
    assert long.new is not None
    assert len(long.new) == 120


def test_two_items_of_one_name_are_both_told() -> None:
    old = Config(models=[_model(A), _model(A)])
    new = Config(models=[_model(A), _model(B)])

    assert _told(old, new)[0] == "models[1].backends[a] removed"
