from pathlib import Path

import pytest

from gateway.config.load import load
from gateway.config.problems import ConfigErrors
from gateway.config.schema import BackendConfig, Config
from tests.unit.config import ONE_BACKEND, load_text


def test_a_file_that_says_nothing_else_gives_the_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, ONE_BACKEND).config

    assert config == Config(backends=[BackendConfig(url="http://h:1")])


def test_the_contracts_example_loads(tmp_path: Path) -> None:
    text = f"""
listen: {{host: 0.0.0.0, port: 8080}}
admin: {{host: 127.0.0.1, port: 9090}}
models:
  - name: qwen3-coder            # the id clients send
    aliases: [coder]
    tokenizer: {tmp_path}
    backends:
      - {{name: a, url: "http://vllm-a:8000", engine: vllm, api_key_env: VLLM_KEY,
          kv_events: "tcp://vllm-a:5557"}}
      - {{name: b, url: "http://vllm-b:8000"}}
      - {{dns: vllm.internal, port: 8000}}
routing:
  policy: cost
  weights: {{prefix: 3, queue: 5, kv: 2}}
classes:
  coding:
    match: [{{path: /v1/messages}}, {{tools: true}}, {{min_prompt_tokens: 8000}},
            {{user_agent: "claude-cli*"}}, {{key: team-a}}]
    bucket: {{tokens_per_second: 60000, burst_tokens: 600000}}
    share: 0.5
    max_wait_s: 30
    slo: {{ttft_s: 5, tpot_s: 0.1}}
  chat:
    default: true
    bucket: {{tokens_per_second: 30000, burst_tokens: 120000}}
    share: 0.5
    max_wait_s: 5
    slo: {{ttft_s: 1, tpot_s: 0.05}}
keys:
  - {{name: team-a, sha256: "{"ab" * 32}", class: chat, models: ["*"],
      tokens_per_minute: 200000, requests_per_minute: 600}}
poll: {{interval_s: 0.25, timeout_s: 1}}
limits: {{body_mib: 64, header_kib: 64, streams: 10000}}
timeouts: {{connect_s: 2, first_byte_s: 600, idle_s: 600, total_s: 0, drain_s: 30}}
streams: {{keepalive_s: 0}}
cors: {{origins: []}}
trusted_proxies: []
debug_headers: true
log: {{format: json, level: info, requests: true}}
record: null
"""
    loaded = load_text(tmp_path, text, env={"VLLM_KEY": "x"})

    assert loaded.warnings == ()
    assert loaded.config.keys[0].class_ == "chat"
    assert loaded.config.models[0].backends[2].dns == "vllm.internal"


@pytest.mark.parametrize("name", ["absent.yaml", ".", "nul\0.yaml"])
def test_a_file_that_cannot_be_read_is_a_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigErrors, match="cannot be read"):
        load(f"{tmp_path}/{name}")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "5\n"])
def test_a_file_that_is_no_mapping_is_a_mistake(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigErrors, match="the file is not a mapping"):
        load_text(tmp_path, text)


def test_an_emptied_file_is_refused_so_that_a_reload_keeps_the_old_one(tmp_path: Path) -> None:
    for text in ("", "# all gone\n", "null\n"):
        with pytest.raises(ConfigErrors, match="no backend is given"):
            load_text(tmp_path, text)


def test_an_open_listener_is_warned_of_when_others_can_reach_it(tmp_path: Path) -> None:
    opened = load_text(tmp_path, ONE_BACKEND + "listen: {host: 0.0.0.0}")
    private = load_text(tmp_path, ONE_BACKEND + "listen: {host: 127.0.0.2}")
    local = load_text(tmp_path, ONE_BACKEND + "listen: {host: localhost}")

    assert [(warning.key, warning.line) for warning in opened.warnings] == [("keys", 2)]
    assert private.warnings == local.warnings == ()


def test_a_reachable_admin_listener_is_warned_of(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, ONE_BACKEND + "admin: {host: '::'}")

    assert [warning.key for warning in loaded.warnings] == ["admin.host"]


@pytest.mark.parametrize("key", ["key_env: X", "key_file: FILE", "sha256: " + "ab" * 32])
def test_a_key_that_anyone_on_the_way_can_read_is_warned_of(key: str, tmp_path: Path) -> None:
    given = key.replace("FILE", str(tmp_path / "g.yaml"))
    loaded = load_text(tmp_path, ONE_BACKEND + f"admin: {{host: 0.0.0.0, {given}}}", env={"X": "k"})
    local = load_text(tmp_path, ONE_BACKEND + f"admin: {{{given}}}", env={"X": "k"})

    [warning] = loaded.warnings
    assert (warning.line, warning.key) == (2, "admin.host")
    assert "plain HTTP: its key can be read on the way" in str(warning)
    assert local.warnings == ()


def test_a_missing_secret_is_warned_of_by_name(tmp_path: Path) -> None:
    text = "backends: [{url: 'http://h:1', api_key_env: VLLM_KEY}]"

    assert "VLLM_KEY is not set" in str(load_text(tmp_path, text, env={}).warnings[0])
    assert load_text(tmp_path, text, env={"VLLM_KEY": "x"}).warnings == ()


BLIND = """\
models:
  - name: bytes
    backends: [{name: a, url: "http://a:1", kv_events: "tcp://a:5557"}, {name: b, url: "http://b:1"}]
  - name: tokens
    tokenizer: TOKENIZER
    backends: [{name: b, kv_events: "tcp://b:5557"}]
backends: [{url: "http://c:1", kv_events: "ipc:///run/kv"}]
"""


def test_kv_events_of_a_model_without_a_tokenizer_are_said_to_tell_nothing(tmp_path: Path) -> None:
    warnings = load_text(tmp_path, BLIND.replace("TOKENIZER", str(tmp_path))).warnings

    assert [(warning.line, warning.key) for warning in warnings] == [
        (3, "models[0].backends[0].kv_events"),
        (7, "backends[0].kv_events"),
    ]
    assert all("no model of this backend has a tokenizer" in str(warning) for warning in warnings)


def test_a_tokenizer_that_is_not_there_is_a_warning_and_no_mistake(tmp_path: Path) -> None:
    model = "models: [{name: m, backends: [{url: 'http://h:1'}], tokenizer: '%s'}]"
    for absent in (tmp_path / "absent", tmp_path / ("x" * 300)):
        loaded = load_text(tmp_path, model % absent)
        (warning,) = loaded.warnings
        assert (warning.line, warning.key) == (1, "models[0].tokenizer")
        assert f"{absent} does not exist on this machine, expected" in str(warning)
        assert loaded.config.models[0].tokenizer == str(absent)

    assert load_text(tmp_path, model % tmp_path).warnings == ()
