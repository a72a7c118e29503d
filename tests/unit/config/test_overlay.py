from pathlib import Path

import pytest

from gateway.config.load import load
from gateway.config.problems import ConfigErrors
from tests.unit.config import ONE_BACKEND, load_text, problems_of

FILE = """\
listen: {port: 1}
poll: {interval_s: 0.1}
models:
  - name: m
    backends: [{name: a, url: "http://h:1"}]
classes:
  Big-Prompts: {default: true}
"""


def test_later_layers_win(tmp_path: Path) -> None:
    env = {"RADIXGATE_LISTEN__PORT": "2", "RADIXGATE_POLL__INTERVAL_S": "0.2"}

    loaded = load_text(tmp_path, FILE, env=env, overrides=["listen.port=3"])

    assert loaded.config.listen.port == 3
    assert loaded.config.poll.interval_s == 0.2
    assert loaded.config.poll.timeout_s == 1.0
    assert loaded.origins["listen.port"] == "--set listen.port"
    assert loaded.origins["poll.interval_s"] == "RADIXGATE_POLL__INTERVAL_S"
    assert loaded.origins["models[0].name"].endswith("g.yaml:4")
    assert "poll.timeout_s" not in loaded.origins


def test_list_items_and_classes_are_reached_from_variables(tmp_path: Path) -> None:
    env = {
        "RADIXGATE_MODELS__0__NAME": "405",
        "RADIXGATE_MODELS__0__BACKENDS__1__URL": "http://h:2",
        "RADIXGATE_CLASSES__BIG_PROMPTS__MAX_WAIT_S": "9",
        "RADIXGATE_KEYS": f"[{{name: k, sha256: '{'0' * 64}'}}]",
    }

    config = load_text(tmp_path, FILE, env=env).config

    assert config.models[0].name == "405"
    assert [backend.url for backend in config.models[0].backends] == ["http://h:1", "http://h:2"]
    assert config.classes["Big-Prompts"].max_wait_s == 9
    assert config.keys[0].name == "k"


def test_both_spellings_of_an_index_work(tmp_path: Path) -> None:
    for path in ("models.0.name", "models[0].name"):
        assert load_text(tmp_path, FILE, overrides=[f"{path}=x"]).config.models[0].name == "x"


def test_lists_can_be_built_from_nothing() -> None:
    loaded = load(env={"RADIXGATE_BACKENDS__0__URL": "http://h:1"})

    assert loaded.config.backends[0].url == "http://h:1"


def test_backend_options_are_added_to_the_files(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, ONE_BACKEND, backends=["http://h:2", "http://h:3"])

    assert [backend.url for backend in loaded.config.backends] == [
        "http://h:1",
        "http://h:2",
        "http://h:3",
    ]
    assert loaded.origins["backends[1].url"] == "--backend"


def test_backend_options_need_no_file() -> None:
    assert load(backends=["http://h:2"]).config.backends[0].url == "http://h:2"


def test_changing_a_builtin_class_keeps_the_others(tmp_path: Path) -> None:
    config = load_text(tmp_path, ONE_BACKEND, overrides=["classes.chat.max_wait_s=7"]).config

    assert list(config.classes) == ["coding", "chat"]
    assert config.classes["chat"].max_wait_s == 7
    assert config.classes["coding"].match


def test_values_of_kubernetes_services_are_not_ours(tmp_path: Path) -> None:
    env = {
        "RADIXGATE_PORT": "tcp://10.0.0.1:8080",
        "RADIXGATE_SERVICE_HOST": "10.0.0.1",
        "RADIXGATE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "RADIXGATE_ADMIN_SERVICE_PORT_HTTP": "1",
    }

    assert load_text(tmp_path, ONE_BACKEND, env=env).warnings == ()


def test_a_stray_variable_is_a_warning_and_a_misspelt_path_a_mistake(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, ONE_BACKEND, env={"RADIXGATE_LISTN": "x"})
    assert "did you mean RADIXGATE_LISTEN?" in str(loaded.warnings[0])

    problems = problems_of(tmp_path, ONE_BACKEND, env={"RADIXGATE_LISTN__PORT": "1"})
    assert str(problems[0]).startswith("RADIXGATE_LISTN__PORT: listn.port: ")

    problems = problems_of(tmp_path, ONE_BACKEND, env={"RADIXGATE_LISTEN__PROT": "1"})
    assert "did you mean port?" in str(problems[0])


@pytest.mark.parametrize("override", ["", "=", "x", "a..b=1", "listen.port=", "listen.port=x"])
def test_a_senseless_override_is_a_mistake(override: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(backends=["http://h:1"], overrides=[override])

    assert all(problem.file.startswith("--set") for problem in caught.value.problems)


@pytest.mark.parametrize("path", ["models.7.name", "models.x.name", "models.7", "models.99999999"])
def test_an_index_past_the_end_is_a_mistake(tmp_path: Path, path: str) -> None:
    problems = problems_of(tmp_path, FILE, overrides=[f"{path}=x"])

    assert problems[0].message == "no such list item"
