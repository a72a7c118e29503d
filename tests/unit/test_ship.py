"""The files that ship the gateway agree with each other, with the code and with the tree."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
import yaml

from gateway.cli.main import COMMANDS
from gateway.config.backends import backends_of
from gateway.config.load import Loaded, load

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ["vllm", "demo"]
GATEWAY = {"vllm": "gateway", "demo": "demo-gateway"}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions in order, continuation lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    rows = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in rows]


def last(name: str) -> str:
    return [rest for have, rest in instructions() if have == name][-1]


def image_env() -> dict[str, str]:
    words = " ".join(rest for name, rest in instructions() if name == "ENV").split()
    return dict(word.split("=", 1) for word in words)


def services(profile: str) -> dict[str, dict[str, Any]]:
    """Return the services that a profile starts, by every name they answer to."""
    found = {}
    for name, service in compose()["services"].items():
        if profile in service.get("profiles", [profile]):
            aliases = service.get("networks", {}).get("default", {}).get("aliases", [])
            found.update(dict.fromkeys([name, *aliases], service))
    return found


def loaded_in_compose(service: dict[str, Any]) -> Loaded:
    """Load the mounted file as the container does: the image's variables, then the service's."""
    sources = {
        target: source
        for source, target, *_ in (volume.split(":") for volume in service["volumes"])
    }
    mounted = orjson.loads(last("CMD"))[-1]
    return load(ROOT / sources[mounted], env={**image_env(), **service["environment"]})


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_starts_one_gateway_and_what_watches_it(profile: str) -> None:
    running = services(profile)
    assert running["gateway"] is running[GATEWAY[profile]]
    assert {"prometheus", "grafana"} <= running.keys()
    other = next(name for name in PROFILES if name != profile)
    assert running["gateway"] is not services(other)["gateway"]


def test_the_state_file_is_on_a_volume_that_the_gateways_user_owns() -> None:
    gateway = services("vllm")["gateway"]
    path = loaded_in_compose(gateway).config.state.path
    assert path is not None
    folder = str(Path(path).parent)
    assert f"state:{folder}" in gateway["volumes"]
    assert gateway["read_only"]
    assert any(f"install -d -o radixgate -m 0700 {folder}" in rest for _, rest in instructions())


def test_what_compose_publishes_is_for_this_machine_only() -> None:
    ports = [port for one in compose()["services"].values() for port in one.get("ports", [])]
    assert len(ports) >= 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_stopped_container_has_time_to_drain() -> None:
    gateway = services("vllm")["gateway"]
    timeouts = loaded_in_compose(gateway).config.timeouts
    grace_s = int(gateway["stop_grace_period"].removesuffix("s"))
    assert grace_s > timeouts.drain_delay_s + timeouts.drain_s
    assert last("STOPSIGNAL") == "SIGTERM"


def test_grafana_is_given_its_data_source_and_every_dashboard() -> None:
    grafana = compose()["services"]["grafana"]
    mounted = {target: ROOT / source for source, target, _ in map(_split, grafana["volumes"])}
    provisioning = "/etc/grafana/provisioning"
    sources = yaml.safe_load(mounted[f"{provisioning}/datasources/radixgate.yml"].read_text())
    (source,) = sources["datasources"]
    url = urlsplit(source["url"])
    prometheus = compose()["services"]["prometheus"]
    assert url.hostname == "prometheus"
    assert prometheus["ports"][0].endswith(f":{url.port}")
    scraping = yaml.safe_load((ROOT / "config" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    providers = yaml.safe_load(mounted[f"{provisioning}/dashboards/radixgate.yml"].read_text())
    (provider,) = providers["providers"]
    folder = mounted[provider["options"]["path"]]
    names = {path.name for path in folder.iterdir()}
    assert names == {"overview.json", "backends.json", "admission.json", "gateway.json"}
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/overview.json"


def test_prometheus_is_given_the_rules_that_it_loads() -> None:
    rules = yaml.safe_load((ROOT / "config" / "prometheus.yml").read_text())["rule_files"]
    mounts = [_split(volume) for volume in compose()["services"]["prometheus"]["volumes"][:2]]
    beside = {Path(target).name: ROOT / source for source, target, _ in mounts}
    assert all(Path(target).parent == Path("/etc/prometheus") for _, target, _ in mounts)
    assert set(rules) == {"alerts.yml"}
    assert beside["alerts.yml"].is_file()


def _split(volume: str) -> list[str]:
    return volume.split(":")


@pytest.mark.parametrize("profile", PROFILES)
def test_the_mounted_configuration_finds_its_backends_by_their_service_names(
    profile: str,
) -> None:
    running = services(profile)

    config = loaded_in_compose(running["gateway"]).config

    assert (config.listen.host, config.admin.host) == ("0.0.0.0", "0.0.0.0")
    for backend in backends_of(config):
        assert backend.url is not None
        url = urlsplit(backend.url)
        assert url.hostname in running
        assert url.port == 8000


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_backends_serve_the_configured_model(profile: str) -> None:
    running = services(profile)
    names = {model.name for model in loaded_in_compose(running["gateway"]).config.models}
    for name in ("vllm-a", "vllm-b"):
        command = running[name]["command"]
        words = command.split() if isinstance(command, str) else command
        flag = "--model" if profile == "demo" else "--served-model-name"
        assert {words[words.index(flag) + 1]} == names


def test_every_file_that_compose_mounts_exists() -> None:
    mounts = [
        volume.split(":")
        for service in compose()["services"].values()
        for volume in service.get("volumes", [])
    ]
    files = [mount for mount in mounts if mount[0].startswith(".")]
    assert len(files) >= 3
    for source, target, *mode in files:
        path = ROOT / source
        if Path(target).suffix:
            assert path.is_file(), source
        else:
            assert list(path.iterdir()), source
        assert mode == ["ro"], source
    assert {mount[0] for mount in mounts if mount not in files} <= set(compose()["volumes"])


def test_published_ports_are_those_the_configuration_listens_on() -> None:
    gateway = services("vllm")["gateway"]
    config = loaded_in_compose(gateway).config
    inside = {int(port.split(":")[-1]) for port in gateway["ports"]}
    assert inside == {config.listen.port, config.admin.port}
    assert {int(port) for port in last("EXPOSE").split()} == inside


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_scrapes_services_that_run(profile: str) -> None:
    jobs = yaml.safe_load((ROOT / "config" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {
        target for job in jobs for static in job["static_configs"] for target in static["targets"]
    }
    assert "gateway:9090" in targets
    assert {target.split(":")[0] for target in targets} <= services(profile).keys()


def test_image_copies_files_that_exist_and_are_not_ignored() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert "gateway" in copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, f"{rule}*") for rule in allowed), source


def test_image_is_a_second_stage_without_root_that_gets_signals_itself() -> None:
    order = [name for name, _ in instructions()]
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]

    assert bases == ["python:3.11-slim"] * 2
    assert last("USER") not in {"root", "0"}
    assert order.index("USER") > len(order) - 1 - order[::-1].index("FROM")
    assert orjson.loads(last("ENTRYPOINT")) == ["radixgate"]
    assert orjson.loads(last("CMD"))[0] == "serve"
    check = last("HEALTHCHECK").split("CMD", 1)[1]
    assert any("/healthz" in word for word in orjson.loads(check))


def test_image_passes_the_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no package for this machine")
    argv = [str(hadolint), "--failure-threshold", "style", str(ROOT / "Dockerfile")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_image_installs_only_hashed_core_dependencies() -> None:
    default = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")
    runs = " ".join(rest for name, rest in instructions() if name == "RUN")
    runs = runs.replace("${LOCK}", default["LOCK"])
    assert "--require-hashes -r requirements/core.lock" in runs
    assert "dev.lock" not in runs
    locked = (ROOT / "requirements" / "core.lock").read_text()
    assert not re.search(r"(?m)^(pytest|locust|xllamacpp)==", locked)


def test_the_full_image_has_every_extra_that_serving_uses() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    locked = (ROOT / "requirements" / "full.lock").read_text()
    pinned = set(re.findall(r"(?m)^([a-z0-9.-]+)==", locked))
    for extra, wanted in extras.items():
        names = {re.split(r"[<>=\[ ]", one)[0] for one in wanted}
        if extra != "tune":  # searches on a trace; not done by a gateway
            assert names <= pinned, f"run `make lock` with --extra {extra} for full.lock"


def test_build_lock_is_made_from_what_the_build_system_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = (ROOT / "requirements" / "build.in").read_text().splitlines()
    assert [line for line in wanted if not line.startswith("#")] == project["build-system"][
        "requires"
    ]


def test_readme_names_only_commands_and_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text()))
    used = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", readme))
    assert {"demo", "test"} <= used <= targets
    assert set(re.findall(r"\bradixgate ([a-z]+)\b(?= )", readme)) <= {*COMMANDS, "is"}
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_readme_configuration_is_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "readme.yaml"
        path.write_text(block)
        assert load(path).config.models


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    """Return a copy of the CI script among tools that all succeed and print their names."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ruff", "mypy", "lint-imports"):
        script = tools / name
        script.write_text(f"#!/bin/sh\necho {name}\n")
        script.chmod(0o755)
    (tmp_path / "Makefile").write_text(
        ".venv/.installed-from-lock:\n\t@echo installed\ntest:\n\t@echo '3 passed in 0.1s'\n"
    )
    return tmp_path


def run_ci(home: Path) -> "subprocess.CompletedProcess[str]":
    env = {"PATH": os.environ["PATH"]}
    argv = ["bash", str(home / ".ci" / "run")]
    return subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/", check=False)


def test_ci_runs_every_check_and_ends_with_the_tests_own_summary(ci: Path) -> None:
    done = run_ci(ci)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["installed", "ruff", "ruff", "mypy", "lint-imports", "3 passed in 0.1s"]


@pytest.mark.parametrize("tool", ["ruff", "mypy", "lint-imports"])
def test_ci_fails_when_a_check_fails(ci: Path, tool: str) -> None:
    (ci / ".venv" / "bin" / tool).write_text("#!/bin/sh\nexit 3\n")

    done = run_ci(ci)

    assert done.returncode != 0
    assert "passed" not in done.stdout


def test_ci_fails_when_the_tests_fail(ci: Path) -> None:
    makefile = (ci / "Makefile").read_text()
    (ci / "Makefile").write_text(makefile + "\t@exit 1\n")

    assert run_ci(ci).returncode != 0
