"""The page as Prometheus reads it: every family documented, valid, cheap, and made in turns."""

import asyncio
import random
import re
from array import array
from dataclasses import dataclass
from itertools import count
from math import inf

import pytest
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.queued import QueuedDispatcher
from gateway.core.settings import (
    BackendSpec,
    ClassSpec,
    CoreSettings,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import Chain, Finish, Outcome, Query, Ticket, Usage
from gateway.telemetry import metrics
from gateway.telemetry.families import FAMILIES
from gateway.telemetry.metrics import OTHER, RequestRecord, Telemetry

BACKENDS = ("a", "b")
SETTINGS = CoreSettings(
    models=(ModelSpec("m", BACKENDS),),
    backends=tuple(BackendSpec(name) for name in BACKENDS),
    classes=(ClassSpec("coding"), ClassSpec("chat", default=True)),
    routing=RoutingSpec(shadow="round_robin"),
)
STREAM = RequestRecord(
    "r-1", "/v1/chat/completions", 1.0, "chat", "m", "a", "team", 200, Outcome.OK, ran=True
)
STREAM.stream, STREAM.ttft_s, STREAM.total_s, STREAM.completion_tokens = True, 0.9, 1.8, 19


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.core = QueuedDispatcher(SETTINGS, random.Random(1), self.now)
        self.telemetry = Telemetry(self.core, clock=lambda: self.now, version="1.2.3")
        targets = {"coding": (5.0, 0.1), "chat": (1.0, 0.05)}
        self.telemetry.set_labels(("coding", "chat"), ("m",), BACKENDS, ("team",), targets)

    def families(self) -> dict[str, Metric]:
        return named(self.telemetry.render())

    def sample(self, name: str, **tags: str) -> float:
        (value,) = [
            one.value
            for family in text_string_to_metric_families(self.telemetry.render().decode())
            for one in family.samples
            if one.name == name and one.labels == tags
        ]
        return value


@pytest.fixture
def rig() -> Rig:
    return Rig()


def named(page: bytes) -> dict[str, Metric]:
    found = text_string_to_metric_families(page.decode())
    return {one.name + ("_total" if one.type == "counter" else ""): one for one in found}


def full(rig: Rig) -> None:
    """Have most of the families that are there only sometimes on the page."""
    rig.telemetry.finished(STREAM)
    rig.telemetry.fallback("no_prompt")
    rig.telemetry.page.losses = lambda: {"usage_log": 3}
    rig.telemetry.page.certificates = lambda: [("listener", "", 2e9), ("backend", "a", 2.1e9)]


def test_the_table_of_families_is_what_the_page_shows(rig: Rig) -> None:
    full(rig)
    shown = {name: one for name, one in rig.families().items() if name.startswith("gateway_")}

    table = {family.name: family for family in FAMILIES}
    assert len(table) == len(FAMILIES)
    assert shown.keys() <= table.keys()
    assert {family.name for family in FAMILIES if not family.when} <= shown.keys()
    for name, one in shown.items():
        assert (one.type, one.documentation) == (table[name].kind, table[name].text)
        assert one.samples, name
        for sample in one.samples:
            assert set(sample.labels) - {"le"} == set(table[name].labels), name


def test_families_come_in_the_tables_order(rig: Rig) -> None:
    full(rig)
    page = rig.telemetry.render().decode()
    order = re.findall(r"# TYPE (gateway_\S+)", page)
    assert order == [family.name for family in FAMILIES if family.name in order]


def test_every_family_is_documented_and_named_as_prometheus_wants_it() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"gateway_[a-z_]+", family.name)
        assert family.text.endswith("."), family.name
        assert "\n" not in family.text
        assert "\\" not in family.text
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")
    assert not {label for family in FAMILIES for label in family.labels} - {
        "backend", "class", "code", "file", "key", "kind", "model", "outcome", "policy", "python",
        "reason", "result", "side", "source", "target", "version",
    }  # fmt: skip


def test_no_series_is_on_the_page_twice(rig: Rig) -> None:
    full(rig)
    lines = [line for line in rig.telemetry.render().decode().splitlines() if line[0] != "#"]
    series = [line.rpartition(" ")[0] for line in lines]
    assert len(set(series)) == len(series)


def test_histograms_of_the_page_add_up(rig: Rig) -> None:
    rng = random.Random(3)
    for _ in range(500):
        record = replace(STREAM, ttft_s=rng.expovariate(1), total_s=rng.expovariate(0.01))
        rig.telemetry.finished(replace(record, queue_s=rng.choice([0.0, 0.3, 7.0])))
        rig.telemetry.itl("chat", "m").observe(rng.expovariate(20))
        rig.telemetry.decided(rng.expovariate(2000))
    histograms = [one for one in rig.families().values() if one.type == "histogram"]
    assert len(histograms) == 5
    for family in histograms:
        for tags in {tuple(s.labels.items()) for s in family.samples if s.name.endswith("_count")}:
            mine = [s for s in family.samples if tags == tuple(s.labels.items())[: len(tags)]]
            buckets = [(float(s.labels["le"]), s.value) for s in mine if "le" in s.labels]
            assert buckets == sorted(buckets)
            assert buckets[-1][0] == inf
            (count,) = [s.value for s in mine if s.name.endswith("_count")]
            assert count == buckets[-1][1]
    assert rig.sample("gateway_ttft_seconds_count", **{"class": "chat", "model": "m"}) == 500


# --- goodput


def met(rig: Rig, record: RequestRecord) -> bool:
    rig.telemetry.finished(record)
    tags = {"class": "chat", "model": "m", "backend": "a"}
    return rig.sample("gateway_slo_met_requests_total", **tags) == 1


def test_a_stream_in_time_is_goodput(rig: Rig) -> None:
    assert met(rig, STREAM)  # 0.9 s, then 18 tokens in 0.9 s: 0.05 each


@pytest.mark.parametrize(
    "late",
    [
        {"ttft_s": 1.01},
        {"total_s": 1.9},
        {"outcome": Outcome.UPSTREAM_TRUNCATED},
        {"outcome": Outcome.CLIENT_CLOSED},
    ],
)
def test_a_stream_that_was_late_or_broke_is_not(rig: Rig, late: dict[str, object]) -> None:
    assert not met(rig, replace(STREAM, **late))


def test_an_answer_of_one_token_is_judged_by_its_first(rig: Rig) -> None:
    assert met(rig, replace(STREAM, completion_tokens=1, total_s=60.0))


@pytest.mark.parametrize(("total_s", "good"), [(1.9, True), (2.0, False)])
def test_a_whole_answer_has_until_its_last_token_was_due(
    rig: Rig, total_s: float, good: bool
) -> None:
    whole = replace(STREAM, stream=False, ttft_s=None, total_s=total_s)
    assert met(rig, whole) is good  # 1 s and 19 tokens of 0.05 s


def test_a_class_without_targets_has_no_goodput(rig: Rig) -> None:
    rig.telemetry.set_labels(("chat",), ("m",), BACKENDS)
    assert not met(rig, STREAM)


def test_targets_are_told_and_change_with_the_configuration(rig: Rig) -> None:
    tags = {"class": "chat", "target": "tpot"}
    assert rig.sample("gateway_slo_seconds", **tags) == 0.05
    assert met(rig, STREAM)
    rig.telemetry.set_labels(("chat",), ("m",), BACKENDS, (), {"chat": (0.5, 0.2)})
    assert rig.sample("gateway_slo_seconds", **tags) == 0.2
    assert met(rig, STREAM)  # still one: the second missed the new target


# --- what was saved


def ask(rig: Rig, hashes: int, cached: int | None) -> None:
    """Send a prompt of 256-token blocks; the engine says `cached` of its tokens were."""
    chain = Chain(array("Q", range(1, hashes + 1)), 256.0, 256 * hashes)
    ticket = rig.core.admit(Query("m", "chat", chain, 50), rig.now)
    assert isinstance(ticket, Ticket)
    rig.now += 1.0
    rig.core.first_token(ticket, rig.now)
    usage = Usage(chain.tokens, 50, cached)
    rig.core.finish(ticket, Finish(Outcome.OK, True, usage, 50), rig.now)


def saved(rig: Rig) -> float:
    return sum(rig.sample("gateway_prefill_saved_seconds_total", backend=b) for b in BACKENDS)


def test_a_cold_prompt_saves_nothing(rig: Rig) -> None:
    ask(rig, 40, 0)
    assert saved(rig) == 0.0


def test_reported_hits_save_the_seconds_their_prefill_would_have_taken(rig: Rig) -> None:
    ask(rig, 40, 5_000)
    engine = SETTINGS.backends[0].profile
    alone = 5_000 * engine.prefill_token_s + engine.attention_s * 5_000 * 2_500
    assert saved(rig) == pytest.approx(alone)


def test_believed_hits_count_where_the_engine_reports_none(rig: Rig) -> None:
    ask(rig, 40, None)
    assert saved(rig) == 0.0
    ask(rig, 40, None)
    assert saved(rig) > 0.0
    reported = [rig.sample("gateway_backend_hits_reported_tokens_total", backend=b) for b in "ab"]
    assert reported == [0, 0]


# --- errors and losses


def test_refusals_are_there_from_zero_and_other_codes_when_they_come(rig: Rig) -> None:
    name = "gateway_errors_total"
    assert rig.sample(name, **{"class": "chat", "code": "queue_full"}) == 0
    assert rig.sample(name, **{"class": OTHER, "code": "draining"}) == 0
    rig.telemetry.refused("chat", "queue_full")
    rig.telemetry.refused(None, "invalid_json")
    assert rig.sample(name, **{"class": "chat", "code": "queue_full"}) == 1
    assert rig.sample(name, **{"class": OTHER, "code": "invalid_json"}) == 1


def test_files_that_are_not_written_have_no_series(rig: Rig) -> None:
    assert "gateway_file_dropped_requests_total" not in rig.families()
    rig.telemetry.page.losses = lambda: {"record": 7}
    assert rig.sample("gateway_file_dropped_requests_total", file="record") == 7


@dataclass
class Listing:
    name: str = "pool"
    kind: str = "dns"
    backends: int = 2
    failing: bool = False
    failures: int = 0


def test_listings_are_told_and_those_of_one_name_together(rig: Rig) -> None:
    assert "gateway_discovery_backends" not in rig.families()
    rig.telemetry.page.sources = lambda: [
        Listing(),
        Listing(backends=3, failing=True, failures=7),
        Listing(kind="file"),
    ]
    assert rig.sample("gateway_discovery_backends", source="pool", kind="dns") == 5
    assert rig.sample("gateway_discovery_failing", source="pool", kind="dns") == 1
    assert rig.sample("gateway_discovery_failures_total", source="pool", kind="dns") == 7
    assert rig.sample("gateway_discovery_failing", source="pool", kind="file") == 0


# --- caps


def test_rows_beyond_the_cap_fold_their_models_together(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.telemetry.counters._MAX_ROWS", 10)
    models = [f"lora-{i}" for i in range(100)]
    rig.telemetry.set_labels(("chat",), models, BACKENDS)
    for model in models:
        for backend in BACKENDS:
            rig.telemetry.finished(replace(STREAM, model=model, backend=backend))
    rows = rig.families()["gateway_requests_total"].samples
    assert len(rows) == 12
    assert sum(row.value for row in rows) == 200
    folded = {row.labels["backend"]: row.value for row in rows if row.labels["model"] == OTHER}
    assert folded == {"a": 95, "b": 95}


# --- turns


async def test_a_scrape_says_what_a_rendering_says(rig: Rig) -> None:
    full(rig)
    scraped, rendered = named(await rig.telemetry.scrape()), rig.families()
    assert scraped.keys() == rendered.keys()
    for name in scraped:
        if name.startswith("gateway_"):
            assert str(scraped[name]) == str(rendered[name])  # NaN is not equal to NaN


async def test_others_have_their_turn_during_a_scrape(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_TURN_S", 0.0)  # every piece ends a turn
    full(rig)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.ensure_future(other())
    await rig.telemetry.scrape()
    task.cancel()
    assert turns >= len(list(rig.telemetry.page.pieces())) - 1


async def test_requests_and_reloads_during_a_scrape_do_not_break_its_page(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_TURN_S", 0.0)

    async def others() -> None:
        for i in count():
            models = [f"m{i}", "m"]
            rig.telemetry.set_labels(("chat",), models, BACKENDS, (f"key-{i}",))
            rig.telemetry.finished(replace(STREAM, model=models[i % 2], backend=BACKENDS[i % 2]))
            rig.telemetry.fallback(f"reason {i % 40}")
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    for _ in range(5):
        page = await rig.telemetry.scrape()
        lines = [line for line in page.decode().splitlines() if line[0] != "#"]
        assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
        assert "gateway_build_info" in named(page)
    assert not task.done()  # it went well, and would go on
    task.cancel()
