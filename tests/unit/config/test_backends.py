from pathlib import Path

import pytest

from gateway.config.backends import Names, backend_names, backends_of, events_of, expand_dns
from gateway.config.schema import BackendConfig, Config, ModelConfig
from tests.unit.config import load_text

TWO_MODELS = """\
models:
  - name: base
    backends:
      - {name: a, url: "http://h:1/"}
      - {url: "http://h:2", engine: vllm}
  - name: lora
    backends:
      - {name: a}
      - {name: b, url: "http://H:2"}
backends:
  - {url: "http://h:1", api_key_env: KEY}
  - {url: "http://[::1]:3"}
"""


def test_a_backend_of_two_models_is_one_with_all_that_was_stated(tmp_path: Path) -> None:
    config = load_text(tmp_path, TWO_MODELS).config

    backends = backends_of(config)

    assert [(b.name, b.url, b.engine, b.api_key_env) for b in backends] == [
        ("a", "http://h:1", "auto", "KEY"),
        ("b", "http://h:2", "vllm", None),
        ("backend-1", "http://[::1]:3", "auto", None),
    ]


def test_models_name_their_backends_alike(tmp_path: Path) -> None:
    config = load_text(tmp_path, TWO_MODELS).config
    names = Names(config)

    assert [backend_names(model, names) for model in config.models] == [("a", "b"), ("a", "b")]


def test_unnamed_backends_are_numbered_and_do_not_tell_their_address() -> None:
    urls = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    named = BackendConfig(name="backend-1", url="http://h:1")
    config = Config(backends=[*(BackendConfig(url=url) for url in urls), named])

    names = [backend.name for backend in backends_of(config)]
    assert names == ["backend-1_", "backend-2", "backend-1"]


def _pool() -> Config:
    pool = BackendConfig(name="pool", dns="v.internal", port=8000, engine="vllm")
    first = ModelConfig(name="m", backends=[pool, BackendConfig(name="a", url="http://h:1")])
    second = ModelConfig(name="n", backends=[BackendConfig(name="pool")])
    return Config(models=[first, second])


def test_every_address_behind_a_name_is_a_backend() -> None:
    config = expand_dns(_pool(), {"v.internal": ("10.0.0.1", "fd00::1", "10.0.0.1")})

    urls = [backend.url for backend in config.models[0].backends]
    assert urls == ["http://10.0.0.1:8000", "http://[fd00::1]:8000", "http://h:1"]
    assert config.models[1].backends == config.models[0].backends[:2]
    assert {backend.engine for backend in config.models[1].backends} == {"vllm"}


def test_an_address_keeps_its_name_when_others_come_and_go_and_does_not_tell_itself() -> None:
    one = expand_dns(_pool(), {"v.internal": ("10.0.0.1",)}).models[0].backends[0]
    two = expand_dns(_pool(), {"v.internal": ("10.0.0.9", "10.0.0.1")}).models[0].backends[1]

    assert one == two
    assert one.name is not None
    assert one.name.startswith("pool-")
    assert "10.0.0" not in one.name


def test_an_unresolved_name_gives_no_backend() -> None:
    assert backends_of(expand_dns(_pool(), {}))[0].name == "a"


def test_event_endpoints_follow_each_address_behind_a_name() -> None:
    pool = BackendConfig(name="pool", dns="v.internal", port=8000, kv_events="tcp://*:5557")
    config = expand_dns(Config(backends=[pool]), {"v.internal": ("10.0.0.1", "fd00::1")})

    assert [events_of(backend) for backend in backends_of(config)] == [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558"),
    ]


@pytest.mark.parametrize(
    ("events", "replay", "endpoints"),
    [
        (None, None, None),
        ("tcp://a:5557", None, ("tcp://a:5557", "tcp://a:5558")),
        ("tcp://a:5557", "tcp://a:9", ("tcp://a:5557", "tcp://a:9")),
        ("tcp://a:65535", None, ("tcp://a:65535", None)),
        ("ipc:///run/kv", None, ("ipc:///run/kv", None)),
    ],
)
def test_replays_are_at_the_next_port_unless_said_otherwise(
    events: str | None, replay: str | None, endpoints: tuple[str, str | None] | None
) -> None:
    assert (
        events_of(BackendConfig(url="http://a:1", kv_events=events, kv_replay=replay)) == endpoints
    )
