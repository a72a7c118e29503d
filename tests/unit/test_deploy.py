"""The Kubernetes manifests: valid by the API's own schemas, and in agreement with the gateway."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config.groups import expand, groups_of
from gateway.config.load import load
from gateway.config.schema import BackendConfig, Config
from gateway.edge import routes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FOREIGN = {"Kustomization", "ServiceMonitor"}  # no kinds of the API server's own
VERSIONS = ("1.37", "1.31")  # the newest known, and one that clusters still run
LABELS = {"app.kubernetes.io/name": "radixgate"}


def documents() -> list[dict[str, Any]]:
    return [
        one
        for path in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
    ]


def one(kind: str, name: str = "radixgate") -> dict[str, Any]:
    (found,) = [d for d in documents() if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pod() -> dict[str, Any]:
    template: dict[str, Any] = one("Deployment")["spec"]["template"]
    return template


def container() -> dict[str, Any]:
    (only,) = pod()["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def config(tmp_path: Path) -> Config:
    """Load the ConfigMap's file as the gateway does."""
    data = one("ConfigMap")["data"]
    mount = next(m for m in container()["volumeMounts"] if m["name"] == "config")
    folder, name = container()["args"][1].rsplit("/", 1)
    assert container()["args"][0] == "serve"
    assert mount["mountPath"] == folder
    path = tmp_path / name
    path.write_text(data[name])
    return load(path, env={}).config


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_what_the_api_server_takes(version: str) -> None:
    checked = [d for d in documents() if d["kind"] not in FOREIGN]
    assert {d["kind"] for d in checked} == {
        "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding",
        "Service", "ServiceAccount",
    }  # fmt: skip
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_in_a_manifest_would_be_found() -> None:
    broken = one("Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_kustomize_builds_them() -> None:
    resources = one_kustomization()["resources"]
    assert set(resources) == {p.name for p in FOLDER.glob("*.yaml")} - {
        "kustomization.yaml",
        "servicemonitor.yaml",
    }
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    argv = [kubectl, "kustomize", str(FOLDER)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    built = list(yaml.safe_load_all(done.stdout))
    assert len(built) == len([d for d in documents() if d["kind"] not in FOREIGN])


def one_kustomization() -> dict[str, Any]:
    (found,) = [d for d in documents() if d["kind"] == "Kustomization"]
    return found


def test_the_configuration_is_valid_and_listens_where_the_manifests_say(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": loaded.listen.port, "admin": loaded.admin.port}
    assert (loaded.listen.host, loaded.admin.host) == ("0.0.0.0", "0.0.0.0")
    (listing,) = loaded.models[0].backends
    assert listing.kubernetes is not None  # what the Role is for
    (key,) = groups_of(loaded)
    pods = tuple(BackendConfig(url=f"http://10.0.0.{number}:8000") for number in (1, 2))
    expanded = expand(loaded, {key: pods})
    assert len(expanded.models[0].backends) == 2


def test_a_stopping_pod_has_time_to_drain(tmp_path: Path) -> None:
    timeouts = config(tmp_path).timeouts
    grace_s = pod()["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > timeouts.drain_delay_s + timeouts.drain_s + 10


def test_selectors_find_the_pods() -> None:
    assert pod()["metadata"]["labels"] == LABELS
    assert one("Deployment")["spec"]["selector"]["matchLabels"] == LABELS
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == LABELS
    assert one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == LABELS
    for name in ("radixgate", "radixgate-admin"):
        assert one("Service", name)["spec"]["selector"] == LABELS


def test_ports_are_named_as_the_container_names_them() -> None:
    names = {port["name"] for port in container()["ports"]}
    services = [one("Service"), one("Service", "radixgate-admin")]
    assert [s["spec"]["ports"][0]["targetPort"] for s in services] == ["http", "admin"]
    allowed = [rule["ports"][0]["port"] for rule in one("NetworkPolicy")["spec"]["ingress"]]
    assert set(allowed) == names
    assert "from" in one("NetworkPolicy")["spec"]["ingress"][allowed.index("admin")]


def test_probes_ask_what_the_data_listener_answers() -> None:
    for probe, path in (
        ("startupProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
        ("livenessProbe", "/healthz"),
    ):
        asked = container()[probe]["httpGet"]
        assert asked == {"path": path, "port": "http"}
        assert routes.find("GET", path).local is not None


def test_the_role_allows_watching_endpoint_slices_and_nothing_else() -> None:
    (rule,) = one("Role")["rules"]
    assert rule["resources"] == ["endpointslices"]
    assert set(rule["verbs"]) == {"get", "list", "watch"}
    (subject,) = one("RoleBinding")["subjects"]
    assert subject["name"] == one("ServiceAccount")["metadata"]["name"]
    assert one("RoleBinding")["roleRef"]["name"] == one("Role")["metadata"]["name"]
    assert pod()["spec"]["serviceAccountName"] == subject["name"]


def test_the_state_file_is_where_the_pod_may_write(tmp_path: Path) -> None:
    path = config(tmp_path).state.path
    assert path is not None
    assert str(Path(path).parent) in [m["mountPath"] for m in container()["volumeMounts"]]


def test_the_pod_is_not_root_and_writes_only_where_a_volume_is() -> None:
    spec, own = pod()["spec"], container()["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert f"--uid {spec['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    writable = [m["mountPath"] for m in container()["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["/var/lib/radixgate", "/tmp"]
    mounts = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}


def test_the_clusters_own_variables_are_kept_away_and_would_do_no_harm(tmp_path: Path) -> None:
    assert pod()["spec"]["enableServiceLinks"] is False
    (tmp_path / "gateway.yaml").write_text(one("ConfigMap")["data"]["gateway.yaml"])
    env = {"RADIXGATE_PORT": "tcp://10.0.0.1:8080", "RADIXGATE_ADMIN_SERVICE_HOST": "10.0.0.2"}
    loaded = load(tmp_path / "gateway.yaml", env=env).config
    assert loaded == config(tmp_path)


def test_the_service_monitor_scrapes_the_admin_service_as_the_alerts_know_it() -> None:
    monitor = one("ServiceMonitor")["spec"]
    admin = one("Service", "radixgate-admin")
    labels = admin["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert (
        not monitor["selector"]["matchLabels"].items()
        <= one("Service")["metadata"]["labels"].items()
    )
    assert [e["port"] for e in monitor["endpoints"]] == [p["name"] for p in admin["spec"]["ports"]]
    job = labels[monitor["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "config" / "alerts.yml").read_text()
