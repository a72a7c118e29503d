from pathlib import Path

import pytest

from gateway.config.backends import backends_of, events_of
from gateway.config.groups import Members, changed_names, expand, groups_of
from gateway.config.load import load
from gateway.config.schema import BackendConfig, Config, KubernetesConfig, ModelConfig
from tests.unit.config import load_text, problems_of

KEY = "dns:v.internal:8000"


def _at(*hosts: str) -> Members:
    return tuple(BackendConfig(url=f"http://{host}:8000") for host in hosts)


def _pool() -> Config:
    pool = BackendConfig(name="pool", dns="v.internal", port=8000, engine="vllm")
    first = ModelConfig(name="m", backends=[pool, BackendConfig(name="a", url="http://h:1")])
    second = ModelConfig(name="n", backends=[BackendConfig(name="pool")])
    return Config(models=[first, second])


def test_every_address_behind_a_name_is_a_backend() -> None:
    config = expand(_pool(), {KEY: _at("10.0.0.1", "[fd00::1]", "10.0.0.1")})

    urls = [backend.url for backend in config.models[0].backends]
    assert urls == ["http://10.0.0.1:8000", "http://[fd00::1]:8000", "http://h:1"]
    assert config.models[1].backends == config.models[0].backends[:2]
    assert {backend.engine for backend in config.models[1].backends} == {"vllm"}


def test_an_address_keeps_its_name_when_others_come_and_go_and_does_not_tell_itself() -> None:
    one = expand(_pool(), {KEY: _at("10.0.0.1")}).models[0].backends[0]
    two = expand(_pool(), {KEY: _at("10.0.0.9", "10.0.0.1")}).models[0].backends[1]

    assert one == two
    assert one.name is not None
    assert one.name.startswith("pool-")
    assert "10.0.0" not in one.name


def test_an_unresolved_name_gives_no_backend() -> None:
    assert backends_of(expand(_pool(), {}))[0].name == "a"


def test_a_configuration_without_groups_is_left_as_it_is() -> None:
    config = Config(backends=[BackendConfig(name="a", url="http://h:1")])

    assert expand(config, {KEY: _at("10.0.0.1")}) is config


def test_event_endpoints_follow_each_address_behind_a_name() -> None:
    pool = BackendConfig(name="pool", dns="v.internal", port=8000, kv_events="tcp://*:5557")
    config = expand(Config(backends=[pool]), {KEY: _at("10.0.0.1", "[fd00::1]")})

    assert [events_of(backend) for backend in backends_of(config)] == [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558"),
    ]


def test_a_member_keeps_its_own_name_and_what_it_states() -> None:
    pool = BackendConfig(name="pool", file="/b.yaml", engine="vllm", api_key_env="POOL")
    members = (
        BackendConfig(name="gpu-1", url="http://h:1/", api_key_env="ONE"),
        BackendConfig(url="http://h:2", kv_events="tcp://h:9"),
    )
    one, two = backends_of(expand(Config(backends=[pool]), {"file:/b.yaml": members}))

    assert (one.name, one.url, one.engine, one.api_key_env) == (
        "gpu-1",
        "http://h:1",
        "vllm",
        "ONE",
    )
    assert (two.api_key_env, two.kv_events) == ("POOL", "tcp://h:9")
    assert one.file is None


def test_a_name_that_another_backend_has_is_made_one_of_its_own() -> None:
    static = BackendConfig(name="gpu-1", url="http://h:1")
    pools = [BackendConfig(name=name, file=f"/{name}.yaml") for name in ("p", "q")]
    found = {
        "file:/p.yaml": (BackendConfig(name="gpu-1", url="http://h:2"),),
        "file:/q.yaml": (
            BackendConfig(name="gpu-1", url="http://h:3"),
            BackendConfig(name="gpu-1", url="http://h:1"),
        ),
    }
    backends = backends_of(expand(Config(backends=[static, *pools]), found))

    assert [backend.url for backend in backends] == ["http://h:1", "http://h:2", "http://h:3"]
    assert len({backend.name for backend in backends}) == 3
    assert all(backend.name and backend.name.startswith("gpu-1") for backend in backends)


def test_a_static_address_that_a_source_tells_of_as_well_is_one_backend() -> None:
    static = BackendConfig(name="a", url="http://10.0.0.1:8000")
    pool = BackendConfig(name="pool", dns="v.internal", port=8000)
    config = expand(Config(backends=[static, pool]), {KEY: _at("10.0.0.1")})

    assert [backend.name for backend in backends_of(config)] == ["a"]


def test_groups_are_known_by_what_they_ask_for() -> None:
    config = Config(
        backends=[
            BackendConfig(srv="_http._tcp.V.internal"),
            BackendConfig(kubernetes=KubernetesConfig(service="vllm", port="http")),
            BackendConfig(kubernetes=KubernetesConfig(service="vllm", namespace="x")),
            BackendConfig(file="/b.yaml"),
            BackendConfig(url="http://h:1"),
        ]
    )
    assert list(groups_of(config)) == [
        "srv:_http._tcp.v.internal",
        "kubernetes:/vllm:http",
        "kubernetes:x/vllm:",
        "file:/b.yaml",
    ]
    assert [group.name for group in groups_of(config).values()] == [
        f"backend-{number}" for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("listing", "url", "server_name"),
    [
        ("dns: v.internal, port: 8000", "https://10.0.0.1:8000", "v.internal"),
        ("srv: _https._tcp.v.internal.", "https://10.0.0.1:8000", "v.internal"),
        ("kubernetes: {service: v, namespace: n}", "https://10.0.0.1:8000", "v.n.svc"),
        ("kubernetes: {service: v}", "https://10.0.0.1:8000", None),
        ("file: /b", "http://10.0.0.1:8000", None),
    ],
)
def test_with_tls_members_are_asked_over_https_by_the_group_s_name(
    tmp_path: Path, listing: str, url: str, server_name: str | None
) -> None:
    loaded = load_text(tmp_path, f"backends: [{{{listing}, tls: {{ca: c.pem}}}}]").config
    (key,) = groups_of(loaded)
    (backend,) = backends_of(expand(loaded, {key: _at("10.0.0.1")}))

    assert backend.url == url
    assert backend.tls is not None
    assert (backend.tls.ca, backend.tls.server_name) == ("c.pem", server_name)


def test_what_came_and_went_and_moved_is_told() -> None:
    def of(**urls: str) -> Config:
        return Config(backends=[BackendConfig(name=name, url=url) for name, url in urls.items()])

    old = of(a="http://h:1", b="http://h:2", c="http://h:3")
    new = of(b="http://h:2", c="http://h:4", d="http://h:5")

    assert list(changed_names(old, new)) == [("removed", "a"), ("added", "d"), ("moved", "c")]


ALL = """\
models:
  - name: m
    backends:
      - {srv: _http._tcp.v.internal}
      - {kubernetes: {service: vllm, port: 8000}}
      - {kubernetes: {service: vllm, namespace: prod, port: http}, kv_events: "tcp://*:5557"}
backends:
  - {file: BACKENDS}
discovery: {interval_s: 5, nameservers: ["10.0.0.10", "10.0.0.11:53", "[fd00::1]:53", "fd00::1"]}
"""


def test_every_kind_of_source_is_understood(tmp_path: Path) -> None:
    listed = tmp_path / "backends.yaml"
    listed.write_text("[]")
    loaded = load_text(tmp_path, ALL.replace("BACKENDS", str(listed)))

    first, second, third = loaded.config.models[0].backends
    assert first.srv == "_http._tcp.v.internal"
    assert second.kubernetes == KubernetesConfig(service="vllm", port="8000")
    assert third.kubernetes == KubernetesConfig(service="vllm", namespace="prod", port="http")


def test_a_file_of_backends_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(f"backends: [{{file: {tmp_path}/none.yaml}}]")

    assert [warning.key for warning in load(path, env={}).warnings] == ["backends[0].file"]


@pytest.mark.parametrize(
    ("entry", "key", "message"),
    [
        ("{srv: a, file: /b}", "srv", None),
        ("{url: 'http://h:1', kubernetes: {service: v}}", "kubernetes", "both url and kubernetes"),
        ("{srv: a, port: 1}", "port", "port belongs to dns"),
        ("{kubernetes: {}}", "kubernetes.service", "is missing"),
        ("{kubernetes: {service: v, port: 70000}}", "kubernetes.port", "70000 is not valid"),
        ("{kubernetes: {service: v, port: HTTP}}", "kubernetes.port", "'HTTP' is not valid"),
        ("{kubernetes: v}", "kubernetes", "'v' is not valid"),
        ("{srv: 'http://h'}", "srv", "'http://h' is not valid"),
        ("{file: /b, kv_events: 'tcp://h:1'}", "kv_events", "every address behind file"),
    ],
)
def test_a_listing_of_a_group_that_makes_no_sense_is_a_mistake(
    tmp_path: Path, entry: str, key: str, message: str | None
) -> None:
    (problem,) = problems_of(tmp_path, f"backends: [{entry}]")

    if message is None:
        assert problem.message == "both srv and file are given"
    else:
        assert problem.key == f"backends[0].{key}"
        assert problem.message.startswith(message)


@pytest.mark.parametrize(
    "server", ["dns.internal", "1.2.3.4:0", "[fd00::1", "1.2.3.4:x", "[fd00::1]5"]
)
def test_what_is_no_name_server_is_a_mistake(tmp_path: Path, server: str) -> None:
    text = f"backends: [{{url: 'http://h:1'}}]\ndiscovery: {{nameservers: ['{server}']}}"
    (problem,) = problems_of(tmp_path, text)

    assert problem.key == "discovery.nameservers[0]"
