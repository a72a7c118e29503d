import argparse
import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient

from gateway.cli import explain as explain_command
from gateway.cli.explain import ExplainError, ask
from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import (
    BackendSpec,
    BucketSpec,
    ClassSpec,
    CoreSettings,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import Chain, Explanation, Query, Ticket
from gateway.edge.admin import AdminContext, ReloadResult, build_admin, guess_path
from gateway.errors import InvalidJson
from gateway.telemetry.metrics import Telemetry

SETTINGS = CoreSettings(
    models=(ModelSpec("m", ("a", "b"), aliases=("coder",)),),
    backends=(BackendSpec("a"), BackendSpec("b"), BackendSpec("idle")),
    classes=(ClassSpec("chat", default=True, bucket=BucketSpec(1.0, 9_000.0)), ClassSpec("batch")),
)
QUERY = Query("m", "chat", Chain(array("Q", [1, 2, 3]), 64.0, 200), 50, class_rule="default")


@dataclass
class Rig:
    """A dispatcher with one request in flight, and what the outside may answer."""

    dispatcher: Dispatcher = field(
        default_factory=lambda: Dispatcher(SETTINGS, random.Random(1), 100.0)
    )
    is_ready: bool = True
    reloaded: ReloadResult = field(default_factory=lambda: ReloadResult(ok=True))
    asked: list[tuple[bytes, str]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticket = self.dispatcher.admit(QUERY, 100.0)
        assert isinstance(ticket, Ticket)
        self.ticket = ticket
        self.dispatcher.remember("r-1", ticket, 100.0)

    def context(self) -> AdminContext:
        telemetry = Telemetry(self.dispatcher, clock=lambda: 101.0, version="1.2.3")
        telemetry.set_labels(("chat", "batch"), ("m",), ("a", "b", "idle"))
        return AdminContext(
            dispatcher=self.dispatcher,
            telemetry=telemetry,
            version="1.2.3",
            ready=lambda: self.is_ready,
            reload=self._reload,
            explain=self._explain,
            clock=lambda: 101.0,
            started_at=90.0,
            body_bytes=lambda: 10_000,
        )

    async def _reload(self) -> ReloadResult:
        return self.reloaded

    async def _explain(self, body: bytes, path: str, key: str | None = None) -> Explanation:
        self.asked.append((body, path))
        self.keys.append(key)
        if body == b"broken":
            raise InvalidJson("the body is not JSON")
        if body == b"fault":
            raise RuntimeError("secret detail")
        return self.dispatcher.explain(QUERY, 101.0)


Client = TestClient[Any, Any]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
async def client(rig: Rig, aiohttp_client: Callable[..., Awaitable[Client]]) -> Client:
    return await aiohttp_client(build_admin(rig.context()))


async def error_of(answer: ClientResponse) -> dict[str, Any]:
    assert answer.content_type == "application/json"
    error: dict[str, Any] = orjson.loads(await answer.read())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_status_shows_what_a_shadow_policy_would_have_done(client: Client, rig: Rig) -> None:
    assert (await (await client.get("/status")).json())["shadow"] is None
    rig.dispatcher.apply(replace(SETTINGS, routing=RoutingSpec(shadow="random")), 100.0)
    assert (await (await client.get("/status")).json())["shadow"] == {
        "policy": "random",
        "same": 0,
        "different": 0,
        "saved_s": 0.0,
        "lost_s": 0.0,
    }


async def test_status_has_the_contracts_keys(client: Client) -> None:
    answer = await client.get("/status")
    status = await answer.json()

    assert {"version", "uptime_s", "policy", "models", "classes"} <= status.keys()
    assert (status["version"], status["uptime_s"], status["policy"]) == ("1.2.3", 11.0, "cost")
    (model,) = status["models"]
    assert model.keys() == {"name", "aliases", "saturation", "backends"}
    assert (model["name"], model["aliases"]) == ("m", ["coder"])
    assert [backend["name"] for backend in model["backends"]] == ["a", "b"]
    for backend in model["backends"]:
        assert {
            "name",
            "up",
            "draining",
            "in_flight",
            "owed_prefill_s",
            "context_tokens",
            "kv_utilization",
            "queue_depth",
            "running",
            "snapshot_age_s",
            "prefill_tokens_per_s",
            "index_blocks",
            "hit_tokens_predicted",
            "hit_tokens_reported",
        } <= backend.keys()
    for cls in status["classes"]:
        assert {
            "name",
            "waiting",
            "waiting_bytes",
            "bucket_tokens",
            "admitted",
            "rejected",
        } <= cls.keys()


async def test_status_tells_the_books(rig: Rig, client: Client) -> None:
    status = await (await client.get("/status")).json()

    loaded = {b["name"]: b["in_flight"] for b in status["models"][0]["backends"]}
    assert loaded[rig.ticket.backend] == 1
    assert sum(loaded.values()) == 1
    classes = {cls["name"]: cls for cls in status["classes"]}
    assert classes["chat"]["admitted"] == 1
    assert classes["chat"]["bucket_tokens"] < 9_000
    assert classes["batch"]["bucket_tokens"] is None


async def test_backend_without_a_model_is_visible(client: Client) -> None:
    status = await (await client.get("/status")).json()

    assert [backend["name"] for backend in status["other_backends"]] == ["idle"]


async def test_metrics_are_prometheus_text(client: Client) -> None:
    answer = await client.get("/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"gateway_inflight_requests" in await answer.read()


async def test_health_is_not_readiness(rig: Rig, client: Client) -> None:
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 200
    rig.is_ready = False
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 503


async def test_page_is_one_file_that_loads_nothing_from_elsewhere(client: Client) -> None:
    answer = await client.get("/")
    text = await answer.text()

    assert answer.content_type == "text/html"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "http://" not in text
    assert "https://" not in text
    assert "innerHTML" not in text  # names come from configuration and engines: text only


async def test_decision_of_a_request_is_shown(rig: Rig, client: Client) -> None:
    answer = await client.get("/decisions/r-1")
    decision = await answer.json()

    assert decision["winner"] == rig.ticket.backend
    assert decision["class"] == "chat"
    assert (await client.get("/decisions/unknown")).status == 404


async def test_explanation_has_the_contracts_keys_and_changes_nothing(
    rig: Rig, client: Client
) -> None:
    before = [rig.dispatcher.backends(101.0), rig.dispatcher.classes(101.0)]
    answer = await client.post("/explain", data=b'{"model":"m","messages":[]}')
    told = await answer.json()

    assert answer.status == 200
    assert {
        "class",
        "class_rule",
        "prompt_tokens",
        "prompt_tokens_exact",
        "policy",
        "winner",
        "reason",
        "backends",
    } == told.keys()
    for backend in told["backends"]:
        assert {
            "name",
            "eligible",
            "why_not",
            "hit_tokens",
            "uncached_tokens",
            "in_flight",
            "owed_prefill_s",
            "cost_s",
            "terms",
            "index",
            "depth_blocks",
            "indexed_tokens",
            "why_hit",
        } == backend.keys()
    assert rig.asked == [(b'{"model":"m","messages":[]}', "/v1/chat/completions")]
    assert [rig.dispatcher.backends(101.0), rig.dispatcher.classes(101.0)] == before


async def test_route_of_an_explained_request_can_be_named(rig: Rig, client: Client) -> None:
    await client.post("/explain?path=/v1/messages", data=b"{}")

    assert rig.asked == [(b"{}", "/v1/messages")]


async def test_key_of_an_explained_request_can_be_named(
    rig: Rig, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await client.post("/explain?key=team%20a", data=b"{}")
    file = tmp_path / "request.json"
    file.write_bytes(b"{}")
    assert (
        await run(str(file), "--gateway", f"http://{client.host}:{client.port}", "--key", "b&c")
        == 0
    )
    assert rig.keys == ["team a", "b&c"]
    assert "winner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"messages":[]}', "/v1/chat/completions"),
        (b'{"prompt":"x"}', "/v1/completions"),
        (b'{"input":"x"}', "/v1/responses"),
        (b"[]", "/v1/chat/completions"),
        (b"\xff", "/v1/chat/completions"),
    ],
)
def test_route_is_guessed_from_the_fields(body: bytes, path: str) -> None:
    assert guess_path(body) == path


async def test_bad_request_is_refused_as_the_data_listener_would(client: Client) -> None:
    answer = await client.post("/explain", data=b"broken")

    assert answer.status == 400
    assert (await error_of(answer))["code"] == "invalid_json"


async def test_fault_of_ours_is_a_json_500_that_tells_nothing(client: Client) -> None:
    answer = await client.post("/explain", data=b"fault")

    assert answer.status == 500
    assert "secret" not in await answer.text()
    assert (await error_of(answer))["code"] == "internal_error"


async def test_too_large_body_is_a_json_413(client: Client) -> None:
    answer = await client.post("/explain", data=b"x" * 20_000)

    assert answer.status == 413
    assert (await error_of(answer))["code"] == "body_too_large"


async def test_index_is_shown_per_backend(rig: Rig, client: Client) -> None:
    both = await (await client.get("/trie")).json()
    assert both["index_bytes"] > 0
    assert {b["name"]: b["index_blocks"] for b in both["backends"]}[rig.ticket.backend] == 3
    shown = both["backends"][0]
    assert (shown["mode"], shown["trust_ratio"], shown["index_capacity_ratio"]) == (
        "approximate",
        1.0,
        1.0,
    )
    assert shown["index_capacity_blocks"] > 0
    assert shown["error_ratio"] is None
    assert both["hot_prefixes"] == []

    one = await (await client.get("/trie", params={"backend": "b"})).json()
    assert [b["name"] for b in one["backends"]] == ["b"]
    unknown = await client.get("/trie", params={"backend": "nobody"})
    assert unknown.status == 404
    assert (await error_of(unknown))["param"] == "backend"


async def test_drained_backend_gets_nothing_new_until_undrained(rig: Rig, client: Client) -> None:
    answer = await client.post("/backends/a/drain")
    assert await answer.json() == {
        "name": "a",
        "draining": True,
        "in_flight": int(rig.ticket.backend == "a"),
    }
    tickets = [rig.dispatcher.admit(QUERY, 101.0) for _ in range(10)]
    assert {ticket.backend for ticket in tickets if isinstance(ticket, Ticket)} == {"b"}

    answer = await client.post("/backends/a/undrain")
    assert (await answer.json())["draining"] is False


@pytest.mark.parametrize("action", ["drain", "undrain"])
async def test_unknown_backend_cannot_be_drained(client: Client, action: str) -> None:
    answer = await client.post(f"/backends/nobody/{action}")

    assert answer.status == 404
    assert (await error_of(answer))["code"] == "not_found"


async def test_reload_says_how_it_went(rig: Rig, client: Client) -> None:
    answer = await client.post("/reload")
    assert (answer.status, await answer.json()) == (200, {"result": "ok"})

    rig.reloaded = ReloadResult(ok=False, problems=("g.yaml:3: poll: unknown key",))
    answer = await client.post("/reload")
    assert answer.status == 400
    assert (await answer.json())["problems"] == ["g.yaml:3: poll: unknown key"]


@pytest.mark.parametrize("path", ["/nothing", "/v1/models", "/status/more", "/backends/a"])
async def test_unknown_route_is_a_json_404(client: Client, path: str) -> None:
    answer = await client.get(path)

    assert answer.status == 404
    assert (await error_of(answer))["code"] == "not_found"


ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/status"),
    ("GET", "/"),
    ("GET", "/decisions/r-1"),
    ("GET", "/trie"),
    ("GET", "/events"),
    ("POST", "/explain"),
    ("POST", "/reload"),
    ("POST", "/backends/a/drain"),
    ("POST", "/backends/a/undrain"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_wrong_method_is_a_json_405_that_names_the_right_one(
    client: Client, method: str, path: str
) -> None:
    answer = await client.request("POST" if method == "GET" else "GET", path)

    assert answer.status == 405
    assert method in answer.headers["allow"]
    assert (await error_of(answer))["code"] == "method_not_allowed"


def test_routes_are_exactly_the_contracts(rig: Rig) -> None:
    app = build_admin(rig.context())
    made = {
        (route.method, route.resource.canonical if route.resource else "")
        for route in app.router.routes()
        if route.method != "HEAD"
    }

    named = {
        (method, path.replace("r-1", "{request_id}").replace("/a/", "/{name}/"))
        for method, path in ROUTES
    }
    assert made == named


@pytest.mark.parametrize("path", ["/status", "/metrics", "/healthz", "/readyz", "/", "/trie"])
async def test_head_is_answered_on_gets(client: Client, path: str) -> None:
    answer = await client.head(path)

    assert answer.status == 200
    assert await answer.read() == b""


async def test_another_sites_page_cannot_act(rig: Rig, client: Client) -> None:
    answer = await client.post("/backends/a/drain", headers={"origin": "https://evil.example"})
    assert answer.status == 403
    assert (await error_of(answer))["code"] == "permission_denied"
    assert not any(backend.draining for backend in rig.dispatcher.backends(101.0))

    own = f"http://{client.host}:{client.port}"
    assert (await client.post("/backends/a/drain", headers={"origin": own})).status == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("evil.example", "http://evil.example", 403),  # its name was made to resolve to us
        ("evil.example:9090", "http://evil.example:9090", 403),
        ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example", 403),
        ("localhost:9090", "http://evil.example", 403),
        ("localhost:9090", "null", 403),
        ("[bad", "http://[bad", 403),
        ("localhost:9090", "http://localhost:9090", 200),
        ("10.0.0.7:9090", "http://10.0.0.7:9090", 200),
        ("[::1]:9090", "http://[::1]:9090", 200),
        ("gateway.internal", "https://gateway.internal", 200),  # the configured name
        ("evil.example", None, 200),  # no browser: curl, a script, Prometheus
    ],
)
async def test_a_page_whose_name_is_not_ours_cannot_act(
    rig: Rig,
    aiohttp_client: Callable[..., Awaitable[Client]],
    host: str,
    origin: str | None,
    status: int,
) -> None:
    client = await aiohttp_client(build_admin(replace(rig.context(), host="gateway.internal")))
    headers = {"host": host} | ({} if origin is None else {"origin": origin})

    answer = await client.post("/backends/a/drain", headers=headers)

    assert answer.status == status
    assert any(backend.draining for backend in rig.dispatcher.backends(101.0)) is (status == 200)


@pytest.mark.parametrize("expect", ["foo", "100-continue", "200-ok"])
async def test_an_expectation_never_costs_the_json_answer(client: Client, expect: str) -> None:
    answer = await client.post("/explain", data=b"broken", headers={"expect": expect})

    assert answer.status == 400
    assert (await error_of(answer))["code"] == "invalid_json"


def test_a_body_of_too_many_values_is_not_parsed_to_guess_its_route() -> None:
    body = b'{"prompt":[' + b",".join([b"[]"] * 600_000) + b"]}"

    assert guess_path(body) == "/v1/chat/completions"


async def test_command_prints_what_the_gateway_says(
    rig: Rig, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(b'{"model":"m","messages":[]}')
    gateway = str(client.make_url("/"))

    assert await run("--gateway", gateway, str(request)) == 0
    text = capsys.readouterr().out
    winner = rig.dispatcher.explain(QUERY, 101.0).winner
    assert f"* {winner}" in text
    assert "class    chat (default)" in text
    assert "prompt   200 tokens (estimated)" in text

    assert await run("--gateway", gateway, "--json", "--path", "/v1/messages", str(request)) == 0
    told = orjson.loads(capsys.readouterr().out)
    assert told["winner"] == winner
    assert rig.asked[-1][1] == "/v1/messages"


async def test_command_says_why_it_has_no_answer(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    request.write_bytes(b"broken")
    gateway = str(client.make_url("/"))

    assert await run("--gateway", gateway, str(request)) == 1
    assert "refused with 400: the body is not JSON" in capsys.readouterr().err
    assert await run("--gateway", gateway, str(tmp_path / "none.json")) == 1
    assert "cannot read" in capsys.readouterr().err
    assert await run("--gateway", gateway + "wrong", str(request)) == 1
    assert "refused with 404: that is no admin listener's address" in capsys.readouterr().err


async def run(*arguments: str) -> int:
    """Run the command in a thread: it blocks, and the listener it asks runs on this loop."""
    parser = argparse.ArgumentParser()
    explain_command.add_arguments(parser)
    return await asyncio.to_thread(explain_command.run, parser.parse_args(arguments))


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ExplainError, match="no URL"):
        ask(url, b"{}", None)


def test_gateway_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ExplainError, match=r"no gateway answers at http://127\.0\.0\.1:1 \(Connection refused\)$"
    ):
        ask("http://127.0.0.1:1", b"{}", None)
