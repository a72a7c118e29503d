from pathlib import Path

import pytest

from gateway.config.backends import Names, backend_names, backends_of, events_of
from gateway.config.schema import BackendConfig, Config
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
