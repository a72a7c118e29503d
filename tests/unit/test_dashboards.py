"""Dashboards and alerts ask only for what the table of metrics has, and are what was generated."""

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import orjson
import promql_parser as promql
import pytest
import yaml

from gateway.telemetry.families import FAMILIES
from tests.promql_kit import (
    ALERTS,
    BOARDS,
    ROOT,
    VALUES,
    Asked,
    Shown,
    Unknown,
    check,
    expand,
    labels_of,
    of_alerts,
    of_boards,
    selectors,
)

QUERIES = [*of_boards(), *of_alerts()]
PROCESS = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds",
           "process_max_fds", "process_start_time_seconds")  # fmt: skip


def table() -> Shown:
    """Return every series that there can be, by labels."""
    shown = Shown(values=VALUES)
    for family in FAMILIES:
        names = [family.name]
        if family.kind == "histogram":
            names = [f"{family.name}_count", f"{family.name}_sum"]
            shown.add(f"{family.name}_bucket", *family.labels, "le")
        for name in names:
            shown.add(name, *family.labels)
    for name in PROCESS:
        shown.add(name)
    return shown


@pytest.mark.parametrize("asked", QUERIES, ids=lambda asked: asked.where)
def test_a_query_asks_for_metrics_and_labels_there_are(asked: Asked) -> None:
    check(asked, table())


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum by (class) (rate(gateway_request_total[1m]))", "no metric"),
        ("sum by (klass) (rate(gateway_requests_total[1m]))", "by"),
        ('rate(gateway_requests_total{clas="chat"}[1m])', "no label clas"),
        ('rate(gateway_requests_total{outcome=~"ok|okay"}[1m])', "never 'okay'"),
        ('rate(gateway_requests_total{outcome!="okay"}[1m])', "never 'okay'"),
        ("histogram_quantile(0.5, sum by (class) (rate(gateway_ttft_seconds_bucket[1m])))", "le"),
        ("gateway_ttft_seconds", "no metric"),
        ("gateway_backend_up + on (class) gateway_backend_up", "on"),
        ("gateway_backend_up + on (backend) gateway_backend_up", "several"),
        ("gateway_queue_depth / gateway_backend_up", "never meet"),
        ("gateway_index_bytes * on (instance) group_left (zone) gateway_build_info", "group_left"),
        ("vector(1)", "not understood|number|unpack"),
    ],
)
def test_a_query_that_cannot_work_is_found(expr: str, complaint: str) -> None:
    with pytest.raises((Unknown, ValueError), match=complaint):
        check(Asked("test", expr), table())


def test_a_legend_that_shows_nothing_is_found() -> None:
    expr = "sum by (class) (gateway_queue_depth)"
    check(Asked("test", expr, frozenset({"class"})), table())
    with pytest.raises(Unknown, match="backend"):
        check(Asked("test", expr, frozenset({"backend"})), table())


def test_join_and_filter_keep_the_labels_that_prometheus_keeps() -> None:
    def labels(expr: str) -> set[str] | None:
        found = labels_of(promql.parse(expr), table())
        return None if found is None else set(found)

    assert labels("1 + 1") is None
    assert labels("gateway_queue_depth > 3") == {"class", "instance", "job"}
    assert labels("sum (gateway_queue_depth)") == set()
    assert labels("sum without (instance) (gateway_queue_depth)") == {"class", "job"}
    joined = "gateway_index_bytes * on (instance) group_left (version) gateway_build_info"
    assert labels(joined) == {"instance", "job", "version"}
    kept = "gateway_backend_up unless on (instance, backend) gateway_backend_draining"
    assert labels(kept) == {"backend", "instance", "job"}


def test_the_dashboards_are_current() -> None:
    build = runpy.run_path(str(ROOT / "config" / "grafana" / "build.py"))
    assert {path.stem for path in BOARDS.glob("*.json")} == set(build["BOARDS"])
    for name in build["BOARDS"]:
        assert (BOARDS / f"{name}.json").read_bytes() == build["text_of"](name), "make reference"


def boards() -> list[Any]:
    return [orjson.loads(path.read_bytes()) for path in sorted(BOARDS.glob("*.json"))]


def test_what_a_dashboard_shows_can_be_told_apart_and_found_again() -> None:
    every = boards()
    assert len({board["uid"] for board in every}) == len(every)
    for board in every:
        titles = [panel["title"] for panel in board["panels"]]
        assert len(set(titles)) == len(titles)
        assert len({panel["id"] for panel in board["panels"]}) == len(titles)
        for panel in board["panels"]:
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) > 0


def test_panels_lie_beside_each_other_and_never_over() -> None:
    for board in boards():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert max(x for x, _ in cells) < 24
            assert not cells & taken, panel["title"]
            taken |= cells


def test_variables_that_queries_use_are_those_the_dashboard_has() -> None:
    for board in boards():
        has = {f"${variable['name']}" for variable in board["templating"]["list"]}
        text = orjson.dumps([panel["targets"] for panel in board["panels"]]).decode()
        used = {name for name in ("$class", "$backend", "$gpus") if name in text}
        assert used == has - {"$datasource"}
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] == "${datasource}"


def test_a_panel_says_what_it_needs_that_is_not_always_there() -> None:
    rare = {family.name: family.when for family in FAMILIES if "is set" in family.when or "kv_events" in family.when or "keys" in family.when}  # fmt: skip
    for board in boards():
        for panel in board["panels"]:
            for target in panel["targets"]:
                for name in selectors(target["expr"]):
                    if name in rare:
                        assert "Needs" in panel["description"], panel["title"]


def test_the_issues_panels_are_there() -> None:
    read = {name for asked in of_boards() for name in selectors(asked.expr)}
    wanted = {
        "gateway_slo_met_requests_total", "gateway_ttft_seconds_bucket", "gateway_itl_seconds_bucket",
        "gateway_prefix_predicted_tokens_total", "gateway_prefix_cached_tokens_total",
        "gateway_prefill_saved_seconds_total", "gateway_backend_kv_utilization",
        "gateway_backend_owed_prefill_seconds", "gateway_backend_queue_depth",
        "gateway_backend_breaker_state", "gateway_bucket_tokens", "gateway_queue_seconds_bucket",
        "gateway_errors_total", "gateway_loop_lag_seconds", "process_resident_memory_bytes",
        "gateway_decision_seconds_bucket",
    }  # fmt: skip
    assert wanted <= read


# --- alerts


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    text = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "runbook"}
        assert len(rule["annotations"]["runbook"]) > 80
        assert f"`{rule['alert']}`" in text


def test_alerts_cover_what_the_issue_names() -> None:
    read = {name for rule in rules() for name in selectors(rule["expr"])}
    assert {
        "up", "gateway_backend_up", "gateway_pool_saturation_ratio", "gateway_requests_total",
        "gateway_queue_seconds_bucket", "gateway_errors_total", "gateway_loop_lag_seconds",
        "gateway_backend_prefix_error_ratio", "gateway_backend_snapshot_age_seconds",
        "gateway_file_dropped_requests_total",
    } <= read  # fmt: skip


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed")
    return found


def test_promtool_takes_configuration_and_rules() -> None:
    argv = [promtool(), "check", "config", str(ROOT / "config" / "prometheus.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_has_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    wordless = yaml.safe_load(ALERTS.read_text())  # labels are compared, not the runbook
    for group in wordless["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(wordless))
    cases = tmp_path / "alerts_test.yml"
    text = (ROOT / "tests" / "golden" / "alerts_test.yml").read_text()
    cases.write_text(text)
    argv = [promtool(), "test", "rules", str(cases)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_that_promtool_tries_are_all_of_them() -> None:
    cases = yaml.safe_load((ROOT / "tests" / "golden" / "alerts_test.yml").read_text())
    tried = {
        case["alertname"]
        for group in cases["tests"]
        for case in group["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert tried == {rule["alert"] for rule in rules()}


def test_grafanas_variables_are_all_filled_in() -> None:
    for asked in QUERIES:
        promql.parse(expand(asked.expr))
