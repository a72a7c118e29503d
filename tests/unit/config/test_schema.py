from gateway.config.build import core_settings
from gateway.config.schema import BUILTIN_CLASSES, Config, KeyConfig


def test_defaults_are_those_of_the_contract() -> None:
    config = Config()

    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8080)
    assert (config.admin.host, config.admin.port) == ("127.0.0.1", 9090)
    assert config.routing.policy == "cost"
    assert (config.poll.interval_s, config.poll.timeout_s) == (0.25, 1.0)
    assert (config.limits.body_mib, config.limits.header_kib) == (64, 64)
    assert config.timeouts.total_s == 0
    assert config.streams.keepalive_s == 0
    assert config.record is None
    assert config.debug_headers
    assert config.keys == []


def test_two_configurations_share_no_mutable_default() -> None:
    assert Config().models is not Config().models
    assert KeyConfig(name="a", sha256="").models is not KeyConfig(name="b", sha256="").models


def test_builtin_classes_have_one_default_and_shares_of_at_most_one() -> None:
    assert [name for name, cls in BUILTIN_CLASSES.items() if cls.default] == ["chat"]
    assert sum(cls.share for cls in core_settings(Config(), {}).classes) <= 1
