"""Writes the Grafana dashboards beside it: `python config/grafana/build.py`, part of `make reference`.

A dashboard in JSON is thousands of lines of which its queries are a few; here they are all there is.
Each query sums over gateways unless it is about one of them. Must stay free of what one installation
names: data source, classes and backends are variables.
"""
# ruff: noqa: INP001 - a script beside the files it writes

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

HERE = Path(__file__).resolve().parent / "dashboards"

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 24, 8
_R = "$__rate_interval"
_CLASS = 'class=~"$class"'
_BACKEND = 'backend=~"$backend"'
_OURS = "and on (instance) gateway_build_info"
# What a client did wrong or gave up on says nothing about us.
_JUDGED = 'outcome!~"client_closed|bad_request|unauthorized|not_found|upstream_4xx"'
_REFUSED = 'code=~"rate_limited|insufficient_quota|queue_full|queue_timeout|no_backend|overloaded|draining"'


@dataclass(slots=True, frozen=True)
class Query:
    """A PromQL expression and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(slots=True, frozen=True)
class Panel:
    """One panel. `states` are names and colours of whole values, for a timeline of states."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    text: str = ""
    stack: bool = False
    below_zero: bool = False
    most: float | None = None
    states: tuple[tuple[int, str, str], ...] = ()


def chart(title: str, *queries: Query, unit: str = "short", text: str = "", **more: Any) -> Panel:
    """Return a panel of lines over time."""
    return Panel(title, queries, unit, text=text, **more)


def figure(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    """Return one number."""
    return Panel(title, (Query(expr),), unit, "stat", 4, text)


def rate(name: str, by: str, selector: str = "") -> str:
    """Return a counter's rate per second, summed by labels; none = over everything."""
    inner = f"rate({name}{{{selector}}}[{_R}])" if selector else f"rate({name}[{_R}])"
    return f"sum by ({by}) ({inner})" if by else f"sum ({inner})"


def quantiles(
    name: str, by: str, selector: str = "", shares: Sequence[int] = (50, 95, 99)
) -> tuple[Query, ...]:
    """Return percentiles of a histogram."""
    labels = f"{by}, le" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = rate(f"{name}_bucket", labels, selector)
    return tuple(
        Query(f"histogram_quantile({share / 100:g}, {buckets})", f"{legend}p{share}")
        for share in shares
    )


def per_backend(name: str, how: str = "sum") -> str:
    """Return a gauge of the chosen backends, over all gateways."""
    return f"{how} by (backend) ({name}{{{_BACKEND}}})"


def overview() -> list[Panel]:
    """Return what it is worth and how clients fare."""
    good = rate("gateway_slo_met_requests_total", "class", _CLASS)
    judged = rate("gateway_requests_total", "class", f"{_CLASS},{_JUDGED}")
    all_good = "sum (increase(gateway_slo_met_requests_total[$__range]))"
    all_judged = f"sum (increase(gateway_requests_total{{{_JUDGED}}}[$__range]))"
    cached = "sum (increase(gateway_prefix_cached_tokens_total[$__range]))"
    prompt = "sum (increase(gateway_prompt_tokens_total[$__range]))"
    saved = "sum (increase(gateway_prefill_saved_seconds_total[$__range]))"
    prompts = rate("gateway_prompt_tokens_total", "")
    shadow = "gateway_shadow_predicted_seconds_total"
    gained = rate(shadow, "policy", 'result="saved"')
    lost = rate(shadow, "policy", 'result="lost"')
    return [
        figure("Requests", "sum (rate(gateway_requests_total[$__range]))", "reqps"),
        figure("In SLO", f"{all_good} / {all_judged}", "percentunit", "Refused ones count as missed."),
        figure("Hit rate", f"{cached} / {prompt}", "percentunit", "Reported by the engines."),
        figure("Prefill tokens saved", cached),
        figure("GPU time saved", f"$gpus * {saved}", "s", "Against computing every prompt whole."),
        figure("Backends up", "max (sum by (instance) (gateway_backend_up))"),
        chart("Goodput", Query(good, "{{class}} in SLO"), Query(judged, "{{class}} all"), unit="reqps",
              text="Answers that kept to their class's slo, beside all that could have."),
        chart("Share in SLO", Query(f"{good} / {judged}", "{{class}}"), unit="percentunit", most=1),
        chart("Time to first token", *quantiles("gateway_ttft_seconds", "class", _CLASS), unit="s"),
        chart("Gap between tokens", *quantiles("gateway_itl_seconds", "class", _CLASS), unit="s"),
        chart(
            "Hit rate, predicted against reported",
            Query(f"{rate('gateway_prefix_predicted_tokens_total', '')} / {prompts}", "predicted"),
            Query(f"{rate('gateway_prefix_cached_tokens_total', '')} / {prompts}", "reported"),
            unit="percentunit", most=1,
            text="Reported needs vLLM's --enable-prompt-tokens-details.",
        ),
        chart(
            "Prefill tokens", Query(rate("gateway_prefix_cached_tokens_total", "class", _CLASS), "{{class}} saved"),
            Query(rate("gateway_prompt_tokens_total", "class", _CLASS), "{{class}} asked for"),
            text="Tokens per second.",
        ),
        chart(
            "GPUs saved", Query(f"$gpus * {rate('gateway_prefill_saved_seconds_total', 'backend')}", "{{backend}}"),
            stack=True, text="GPU-seconds of prefill saved per second. gpus = GPUs per backend.",
        ),
        chart(
            "What another policy would gain",
            Query(f"{gained} - {lost}", "{{policy}}"),
            unit="s", below_zero=True, text="Predicted seconds per second; below zero = ours is better. Needs routing.shadow.",
        ),
        chart("Requests by outcome", Query(rate("gateway_requests_total", "outcome"), "{{outcome}}"), unit="reqps", stack=True),
        chart("Whole requests", *quantiles("gateway_request_seconds", "class", _CLASS), unit="s"),
    ]  # fmt: skip


def backends() -> list[Panel]:
    """Return what each engine holds, owes and says."""
    attempts = f'{_BACKEND},result!="ok"'
    return [
        Panel("Up", (Query(per_backend("gateway_backend_up", "min"), "{{backend}}"),), kind="state-timeline",
              states=((0, "down", "red"), (1, "up", "green"))),
        Panel("Breaker", (Query(per_backend("gateway_backend_breaker_state", "max"), "{{backend}}"),),
              kind="state-timeline",
              states=((0, "closed", "green"), (1, "half-open", "yellow"), (2, "open", "red"))),
        chart(
            "Backends", Query("count by (instance) (gateway_backend_up)", "{{instance}} known"),
            Query("sum by (instance) (gateway_backend_up)", "{{instance}} up"),
            Query("sum by (instance) (gateway_backend_draining)", "{{instance}} draining"),
            Query("sum by (instance) (gateway_backend_warming)", "{{instance}} warming"),
        ),
        chart(
            "Discovery", Query("max by (source, kind) (gateway_discovery_backends)", "{{source}} by {{kind}}"),
            Query("max by (source, kind) (gateway_discovery_failing)", "{{source}} by {{kind}} fails"),
            text="Needs backends found by dns, srv, file or kubernetes.",
        ),
        chart("Breakers opened", Query(f"sum by (backend) (increase(gateway_backend_breaker_opens_total{{{_BACKEND}}}[5m]))", "{{backend}}"), text="In five minutes."),
        chart("KV cache in use", Query(per_backend("gateway_backend_kv_utilization", "max"), "{{backend}}"), unit="percentunit", most=1),
        chart(
            "Prefill owed", Query(per_backend("gateway_backend_owed_prefill_seconds"), "{{backend}}"),
            Query(f"min (gateway_backend_owed_limit_seconds{{{_BACKEND}}})", "limit"), unit="s",
            text="Seconds of prefill sent whose first token has not come; over the limit requests wait here.",
        ),
        chart(
            "Queue", Query(per_backend("gateway_backend_queue_depth", "max"), "{{backend}} in the engine"),
            Query(per_backend("gateway_backend_waiting_requests"), "{{backend}} at the gateway"),
        ),
        chart(
            "Running", Query(per_backend("gateway_backend_running", "max"), "{{backend}} by the engine"),
            Query(per_backend("gateway_inflight_requests"), "{{backend}} from here"),
        ),
        chart("Saturation", Query(per_backend("gateway_backend_saturation_ratio", "max"), "{{backend}}"), text="1 = the next request waits."),
        chart("Learnt prefill rate", Query(per_backend("gateway_backend_prefill_tokens_per_second", "avg"), "{{backend}}"), text="Tokens per second."),
        chart("Requests", Query(rate("gateway_requests_total", "backend", _BACKEND), "{{backend}}"), unit="reqps", stack=True),
        chart("Attempts that failed", Query(rate("gateway_upstream_attempts_total", "backend, result", attempts), "{{backend}} {{result}}"), unit="reqps"),
        chart(
            "Hit tokens", Query(rate("gateway_backend_hits_predicted_tokens_total", "backend", _BACKEND), "{{backend}} predicted"),
            Query(rate("gateway_backend_hits_reported_tokens_total", "backend", _BACKEND), "{{backend}} reported"),
            text="Per second, of answers whose engine reported its own.",
        ),
        chart("Prediction error", Query(per_backend("gateway_backend_prefix_error_ratio", "max"), "{{backend}}"), unit="percentunit", most=1),
        chart(
            "Prefix index", Query(per_backend("gateway_index_blocks", "max"), "{{backend}}"),
            Query(per_backend("gateway_index_capacity_blocks", "max"), "{{backend}} room"), text="Blocks believed resident.",
        ),
        chart("Age of the last look", Query(per_backend("gateway_backend_snapshot_age_seconds", "max"), "{{backend}}"), unit="s"),
        Panel("Index follows KV events", (Query(per_backend("gateway_backend_index_exact", "min"), "{{backend}}"),),
              kind="state-timeline", text="Needs kv_events.",
              states=((0, "approximate", "yellow"), (1, "exact", "green"))),
        chart(
            "KV events", Query(rate("gateway_kv_events_total", "backend", _BACKEND), "{{backend}}"),
            Query(rate("gateway_kv_event_losses_total", "backend", _BACKEND), "{{backend}} losses"),
            text="Per second. Needs kv_events.",
        ),
    ]  # fmt: skip


def admission() -> list[Panel]:
    """Return who waits, who is refused, and why."""
    errors = rate("gateway_errors_total", "class, code", f"{_CLASS},{_REFUSED}")
    return [
        chart("Buckets", Query(f"min by (class) (gateway_bucket_tokens{{{_CLASS}}} < Inf)", "{{class}}"), text="Tokens left; a class without a bucket is not shown."),
        chart("Refusals", Query(errors, "{{class}} {{code}}"), unit="reqps"),
        chart("Waiting", Query(f"sum by (class) (gateway_queue_depth{{{_CLASS}}})", "{{class}}"), stack=True),
        chart("Waits", *quantiles("gateway_queue_seconds", "class", _CLASS), unit="s"),
        chart("Admission", Query(rate("gateway_admission_total", "class, result", _CLASS), "{{class}} {{result}}"), unit="reqps"),
        chart("Bodies waiting", Query(f"sum by (class) (gateway_queue_bytes{{{_CLASS}}})", "{{class}}"), unit="bytes", stack=True),
        chart("Saturation of the models", Query("max by (model) (gateway_pool_saturation_ratio < Inf)", "{{model}}"), text="1 = the next request waits; nothing shown = no backend is up."),
        chart(
            "Share in SLO", Query(f"{rate('gateway_slo_met_requests_total', 'class', _CLASS)} / {rate('gateway_requests_total', 'class', f'{_CLASS},{_JUDGED}')}", "{{class}}"),
            unit="percentunit", most=1,
        ),
        chart("Tokens by key", Query(rate("gateway_key_tokens_total", "key, kind"), "{{key}} {{kind}}"), text="Per second. Needs keys."),
        chart("Requests by key", Query(rate("gateway_key_requests_total", "key, outcome"), "{{key}} {{outcome}}"), unit="reqps", text="Needs keys."),
    ]  # fmt: skip


def gateway() -> list[Panel]:
    """Return how the process itself is doing."""
    return [
        chart("Loop lag", Query("gateway_loop_lag_seconds", "{{instance}}"), Query("gateway_collector_pause_seconds", "{{instance}} garbage collector"), unit="s",
              text="Worst delay of a timer in 15 to 30 s: every stream waited as long."),
        chart("Memory", Query(f"process_resident_memory_bytes {_OURS}", "{{instance}}"), Query("gateway_index_bytes", "{{instance}} prefix index"), unit="bytes"),
        chart("Decision time", *quantiles("gateway_decision_seconds", "", "", (50, 95, 99)), unit="s",
              text="Last byte of a request to its backend, or its place in the queue."),
        chart("CPU", Query(f"rate(process_cpu_seconds_total[{_R}]) {_OURS}", "{{instance}}"), unit="percentunit", text="One core is 100 %: it is one process with one loop."),
        chart("Files and sockets", Query(f"process_open_fds {_OURS}", "{{instance}} open"), Query(f"process_max_fds {_OURS}", "{{instance}} limit")),
        chart("Requests in progress", Query("sum by (instance) (gateway_inflight_requests)", "{{instance}} sent"), Query("sum by (instance) (gateway_queue_depth)", "{{instance}} waiting"), stack=True),
        chart("Errors answered", Query(rate("gateway_errors_total", "code"), "{{code}}"), unit="reqps"),
        chart("Routed on part of the truth", Query(rate("gateway_fallback_total", "reason"), "{{reason}}"), unit="reqps", text="For example a prompt whose template could not be rendered."),
        chart("Reloads", Query("sum by (instance, result) (increase(gateway_reloads_total[5m]))", "{{instance}} {{result}}"), text="In five minutes."),
        chart(
            "Certificates end in",
            Query("min by (instance, side, backend) (gateway_tls_certificate_expiry_timestamp_seconds) - time()", "{{instance}} {{side}} {{backend}}"),
            unit="s", below_zero=True, text="Below 0 = ended. Needs listen.tls, or a backend's tls.cert.",
        ),
        chart("Requests that a file could not take", Query("sum by (instance, file) (increase(gateway_file_dropped_requests_total[5m]))", "{{instance}} {{file}}"), text="In five minutes. Needs usage_log.path or record."),
        Panel("Running", (Query("time() - process_start_time_seconds * on (instance) group_left (version) gateway_build_info", "{{instance}} {{version}}"),), "s", "stat", text="Since the last start."),
    ]  # fmt: skip


BOARDS = {
    "overview": ("Radixgate: overview", overview, ("class", "gpus")),
    "backends": ("Radixgate: backends", backends, ("backend",)),
    "admission": ("Radixgate: admission", admission, ("class",)),
    "gateway": ("Radixgate: gateway", gateway, ()),
}
_LABELS = {"class": "gateway_queue_depth", "backend": "gateway_backend_up"}


def board(name: str) -> dict[str, Any]:
    """Return one dashboard as Grafana reads it."""
    title, panels, variables = BOARDS[name]
    return {
        "uid": f"radixgate-{name}",
        "title": title,
        "tags": ["radixgate"],
        "timezone": "browser",
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "Radixgate", "tags": ["radixgate"], "includeVars": True}
            | {"keepTime": True, "asDropdown": False}
        ],
        "templating": {"list": [_source(), *map(_variable, variables)]},
        "annotations": {"list": []},
        "panels": list(_placed(panels())),
    }


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "data source",
    }


def _variable(name: str) -> dict[str, Any]:
    if name == "gpus":
        current = {"text": "1", "value": "1"}
        return {
            "name": name,
            "type": "textbox",
            "label": "GPUs per backend",
            "query": "1",
            "current": current,
            "options": [{**current, "selected": True}],
        }
    return {
        "name": name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({_LABELS[name]}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    """Set the panels beside each other, row by row."""
    x = y = below = 0
    for number, panel in enumerate(panels, 1):
        height = _HEIGHT // 2 if panel.width < _WIDTH // 2 else _HEIGHT
        if x + panel.width > _WIDTH:
            x, y = 0, y + below
        below = height
        grid = {"x": x, "y": y, "w": panel.width, "h": height}
        yield {"id": number, "gridPos": grid, **_panel(panel)}
        x += panel.width


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": _custom(panel)}
    if panel.below_zero:
        del defaults["min"]
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.states:
        shown = {str(value): {"text": text, "color": color} for value, text, color in panel.states}
        defaults["mappings"] = [{"type": "value", "options": shown}]
    return {
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for i, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
    }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
    return {"fillOpacity": 25 if panel.stack else 5, "showPoints": "never", "stacking": stacking}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        calc = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": calc, "colorMode": "none", "graphMode": "none"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    if panel.kind == "state-timeline":
        return {"mergeValues": True, "rowHeight": 0.8, "showValue": "auto", "legend": legend}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def text_of(name: str) -> bytes:
    """Return a dashboard's file."""
    return orjson.dumps(board(name), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def main() -> int:
    """Write them all."""
    for name in BOARDS:
        (HERE / f"{name}.json").write_bytes(text_of(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
