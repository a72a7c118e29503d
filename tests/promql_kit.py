"""Reads PromQL as Prometheus does and says what it asks for that a page of metrics does not have.

Every selector must find a series on the page, by its labels' values too, and every label that a query
groups, joins or shows by must be one that its series have at that point.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.types import Outcome
from gateway.telemetry.record import AdmissionResult, AttemptResult
from gateway.telemetry.reference import error_codes

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ROOT / "config" / "grafana" / "dashboards"
ALERTS = ROOT / "config" / "alerts.yml"
TARGET = frozenset({"instance", "job"})  # what Prometheus adds to every series
# Every value that a label of the gateway's can have, where the code knows them all.
VALUES = {
    ("gateway_requests_total", "outcome"): frozenset(Outcome),
    ("gateway_admission_total", "result"): frozenset(AdmissionResult),
    ("gateway_upstream_attempts_total", "result"): frozenset(AttemptResult),
    ("gateway_errors_total", "code"): frozenset(error_codes()),
    ("gateway_reloads_total", "result"): frozenset({"ok", "failed"}),
    ("gateway_tls_certificate_loads_total", "result"): frozenset({"ok", "failed"}),
    ("gateway_slo_seconds", "target"): frozenset({"ttft", "tpot"}),
    ("gateway_shadow_predicted_seconds_total", "result"): frozenset({"saved", "lost"}),
}
VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "30m",
    "$class": ".*",
    "$backend": ".*",
    "$gpus": "1",
}


@dataclass(frozen=True)
class Asked:
    """A query as it stands in a file; `legend` is the labels its legend shows."""

    where: str
    expr: str
    legend: frozenset[str] = frozenset()


@dataclass
class Shown:
    """The series of a page: label sets by sample name.

    `values` are those a label of a metric can have though no series has it yet, by (metric, label).
    """

    series: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    values: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, page: str, values: Mapping[tuple[str, str], frozenset[str]] | None = None
    ) -> "Shown":
        shown = cls(values=values or {})
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                shown.series.setdefault(sample.name, []).append(dict(sample.labels))
        return shown

    def add(self, name: str, *labels: str) -> None:
        """Add a series of which only the labels are known: any value is one of theirs."""
        self.series.setdefault(name, []).append(dict.fromkeys(labels, "?"))


class Unknown(Exception):
    """A query asks for what is not there."""


def of_boards() -> list[Asked]:
    """Return every panel's and variable's query."""
    found = []
    for path in sorted(BOARDS.glob("*.json")):
        board = orjson.loads(path.read_bytes())
        for panel in board["panels"]:
            for target in panel["targets"]:
                legend = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                found.append(Asked(f"{path.stem}: {panel['title']}", target["expr"], legend))
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                assert match is not None, variable
                where = f"{path.stem}: ${variable['name']}"
                found.append(Asked(where, match[1], frozenset({match[2]})))
    return found


def of_alerts() -> list[Asked]:
    """Return every rule's query."""
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    found = []
    for rule in rules:
        text = rule["annotations"]["summary"]
        legend = frozenset(re.findall(r"\$labels\.(\w+)", text))
        found.append(Asked(f"alert {rule['alert']}", rule["expr"], legend))
    return found


def expand(expr: str) -> str:
    """Return the query with Grafana's variables filled in."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def check(asked: Asked, shown: Shown) -> None:
    """Raise Unknown for a query that cannot work on that page."""
    labels = labels_of(promql.parse(expand(asked.expr)), shown)
    if labels is None:
        raise Unknown(f"{asked.where}: a number, not series")
    missing = asked.legend - labels
    if missing:
        raise Unknown(f"{asked.where}: its series have no {sorted(missing)}, only {sorted(labels)}")


def labels_of(expr: Any, shown: Shown) -> frozenset[str] | None:
    """Return the labels that an expression's series have; None = it is a number or a text."""
    if isinstance(expr, promql.NumberLiteral | promql.StringLiteral):
        return None
    if isinstance(expr, promql.ParenExpr | promql.UnaryExpr):
        return labels_of(expr.expr, shown)
    if isinstance(expr, promql.MatrixSelector):
        return _selected(expr.vector_selector, shown)
    for kind, read in _READERS.items():
        if isinstance(expr, kind):
            return read(expr, shown)
    raise Unknown(f"not understood: {expr}")


def _selected(selector: Any, shown: Shown) -> frozenset[str]:
    name = selector.name
    if name == "up":
        return TARGET
    if name not in shown.series:
        raise Unknown(f"no metric {name}")
    matchers = list(selector.matchers.matchers)
    if not any(all(_fits(m, row, name, shown) for m in matchers) for row in shown.series[name]):
        raise Unknown(f"no series of {name} fits {selector.prettify()}")
    return frozenset().union(*shown.series[name]) | TARGET


def _fits(matcher: Any, row: Mapping[str, str], name: str, shown: Shown) -> bool:
    if matcher.name in TARGET:
        return True
    if matcher.name not in row:
        raise Unknown(f"{name} has no label {matcher.name}")
    known = shown.values.get((name, matcher.name), frozenset())
    if row[matcher.name] == "?" and not known:
        return True
    wanted = known | {row[matcher.name]}
    alternatives = [matcher.value]
    if str(matcher.op) in {"MatchOp.Re", "MatchOp.NotRe"}:
        alternatives = matcher.value.split("|")
    if known:  # a mistyped value would never show: each must be one there is
        for one in alternatives:
            if not any(re.fullmatch(one, value) for value in known):
                raise Unknown(f"{name}: {matcher.name} is never {one!r}")
    hit = any(re.fullmatch(one, value) for one in alternatives for value in wanted)
    return hit or "Not" in str(matcher.op)


def _aggregated(expr: Any, shown: Shown) -> frozenset[str]:
    inner = labels_of(expr.expr, shown)
    if inner is None:
        raise Unknown("a number is aggregated")
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    if named - inner:
        raise Unknown(f"by {sorted(named - inner)}, which {sorted(inner)} do not have")
    by = "By" in str(expr.modifier.type)
    return named if by else inner - named


def _called(expr: Any, shown: Shown) -> frozenset[str] | None:
    given = [labels_of(arg, shown) for arg in expr.args]
    if expr.func.name == "time":
        return None
    (labels,) = [one for one in given if one is not None]
    if expr.func.name == "histogram_quantile":
        if "le" not in labels:
            raise Unknown("histogram_quantile without le")
        return labels - {"le"}
    return labels


def _joined(expr: Any, shown: Shown) -> frozenset[str] | None:
    left, right = labels_of(expr.lhs, shown), labels_of(expr.rhs, shown)
    if left is None or right is None:
        return right if left is None else left
    modifier = expr.modifier
    matching = None if modifier is None else modifier.matching
    if matching is None:
        if left != right:
            raise Unknown(f"{sorted(left)} never meet {sorted(right)}")
        return left
    on = frozenset(matching.labels)
    for side in (left, right):
        if on - side:
            raise Unknown(f"on {sorted(on - side)}, which {sorted(side)} do not have")
    if modifier.card == promql.VectorMatchCardinality.ManyToMany:  # and, or, unless
        return left
    if modifier.card == promql.VectorMatchCardinality.OneToOne:
        if not left == right == on:
            raise Unknown(f"several of {sorted(left)} or {sorted(right)} have one {sorted(on)}")
        return on
    extra = frozenset(modifier.group_labels)
    if extra - right:
        raise Unknown(f"group_left {sorted(extra - right)}, which {sorted(right)} do not have")
    return left | extra


_READERS: dict[Any, Callable[[Any, Shown], frozenset[str] | None]] = {
    promql.VectorSelector: _selected,
    promql.AggregateExpr: _aggregated,
    promql.Call: _called,
    promql.BinaryExpr: _joined,
}


def selectors(expr: str) -> list[str]:
    """Return the metrics that a query reads."""
    found: list[str] = []

    def note(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node.name or "")
        elif isinstance(node, promql.MatrixSelector):
            note(node.vector_selector)
        elif isinstance(node, promql.BinaryExpr):
            note(node.lhs)
            note(node.rhs)
        elif isinstance(node, promql.Call):
            for arg in node.args:
                note(arg)
        elif hasattr(node, "expr"):
            note(node.expr)

    note(promql.parse(expand(expr)))
    return found
