"""Clients that leave and replicas that die, with real engines behind."""

import http.client
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest

from tests.e2e.conftest import Engine
from tests.e2e.fleet import (
    DEADLINE_S,
    MODEL,
    Answer,
    Fleet,
    Gateway,
    TinyModel,
    eventually,
    fetch,
    start_fleet,
    start_gateway,
)
from tests.e2e.talk import ask, chat, opening

LONG = 7000
AFTER_KILL = 20


@contextmanager
def sent(
    gateway: Gateway, seed: int, *, stream: bool, max_tokens: int = LONG
) -> Iterator[http.client.HTTPConnection]:
    """Send a request whose answer takes long; leaving the block hangs up."""
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=DEADLINE_S)
    body = orjson.dumps(chat(opening(seed), stream=stream, max_tokens=max_tokens))
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        yield connection
    finally:
        connection.close()


def idle(gateway: Gateway) -> bool:
    return not any(row["in_flight"] for row in gateway.backends().values())


def test_a_client_that_leaves_in_mid_stream_frees_the_engine(
    gateway: Gateway, fleet: Fleet
) -> None:
    eventually(lambda: fleet.running() == 0, what="idle engines before the test")
    generated = fleet.generated()
    left = gateway.total("gateway_requests_total", outcome="client_closed")

    with sent(gateway, 500, stream=True) as connection:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()

    eventually(lambda: fleet.running() == 0, what="idle engines")
    assert fleet.generated() - generated < LONG / 2
    eventually(lambda: idle(gateway), what="an empty ledger")
    assert gateway.total("gateway_requests_total", outcome="client_closed") == left + 1


def test_a_client_that_leaves_before_the_answer_is_let_go(gateway: Gateway, fleet: Fleet) -> None:
    eventually(lambda: fleet.running() == 0, what="idle engines before the test")
    generated = fleet.generated()
    left = gateway.total("gateway_requests_total", outcome="client_closed")

    with sent(gateway, 501, stream=False):
        eventually(lambda: fleet.running() == 1, what="the engine at work")

    eventually(lambda: idle(gateway), what="an empty ledger")
    assert gateway.total("gateway_requests_total", outcome="client_closed") == left + 1
    if fleet.engine != "llamacpp":  # which notices no hang-up before it has something to send
        eventually(lambda: fleet.running() == 0, what="idle engines")
        assert fleet.generated() - generated < LONG / 2


def test_sigterm_lets_an_open_stream_finish(fleet: Fleet, tmp_path: Path) -> None:
    arguments = [word for url in fleet.urls for word in ("--backend", url)]
    with start_gateway(arguments, tmp_path) as gateway:
        with sent(gateway, 502, stream=True, max_tokens=300) as connection:
            answer = connection.getresponse()
            started = answer.readline()
            gateway.process.terminate()
            whole = started + answer.read()
        gateway.process.wait(DEADLINE_S)

    assert whole.rstrip().endswith(b"data: [DONE]")
    assert b'"error"' not in whole
    assert b'"finish_reason":"length"' in whole.replace(b" ", b"")  # all 300 tokens came


def pool_connections(gateway: Gateway, backends: set[str]) -> None:
    """Send a burst of cold requests, which every backend has to share."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(gateway, opening(2000 + i)), range(16)))
    assert {answer.headers["x-gateway-backend"] for answer in answers} == backends


@dataclass
class Aftermath:
    """What clients and metrics saw when a replica with a live stream was killed."""

    gateway: Gateway
    dead: str
    survivor: str
    broken_stream: bytes
    answers: list[Answer]


@pytest.fixture(scope="module")
def aftermath(
    engine: Engine, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    """Kill one of two replicas in mid-stream and send new requests at once."""
    logs = tmp_path_factory.mktemp("killed")
    with start_fleet(engine.name, engine.python, tiny_model, logs) as fleet:
        named = dict(zip(["a", "b"], fleet.replicas, strict=True))
        config = logs / "gateway.yaml"
        rows = [{"name": name, "url": replica.url} for name, replica in named.items()]
        config.write_bytes(orjson.dumps({"backends": rows}))
        with start_gateway([str(config)], logs) as gateway:
            eventually(lambda: len(gateway.backends()) == 2, what="both backends")
            pool_connections(gateway, {*named})
            with sent(gateway, 600, stream=True) as connection:
                answer = connection.getresponse()
                dead = answer.headers["x-gateway-backend"]
                started = answer.readline()
                named[dead].kill()
                with ThreadPoolExecutor(4) as pool:
                    answers = list(
                        pool.map(lambda i: ask(gateway, opening(700 + i)), range(AFTER_KILL))
                    )
                broken = started + answer.read()
            survivor = ({"a", "b"} - {dead}).pop()
            yield Aftermath(gateway, dead, survivor, broken, answers)


def test_a_killed_replica_costs_no_request_that_had_not_started(aftermath: Aftermath) -> None:
    assert [answer.status for answer in aftermath.answers] == [200] * AFTER_KILL
    served = {answer.headers["x-gateway-backend"] for answer in aftermath.answers}
    assert served == {aftermath.survivor}
    tries = {int(answer.headers["x-gateway-attempts"]) for answer in aftermath.answers}
    assert tries <= {1, 2}


def test_a_stream_cut_by_a_dying_replica_ends_with_an_error_event(aftermath: Aftermath) -> None:
    events = re.findall(rb"(?m)^data: (.*)$", aftermath.broken_stream)

    assert events[-1].strip() == b"[DONE]"
    error = orjson.loads(events[-2])["error"]
    assert error["code"] == "upstream_error"
    assert error["message"]
    gateway = aftermath.gateway
    cut = sum(
        gateway.total("gateway_requests_total", backend=aftermath.dead, outcome=outcome)
        for outcome in ("upstream_error", "upstream_truncated")
    )
    assert cut == 1


def test_a_dead_replica_is_down_and_the_gateway_stays_ready(aftermath: Aftermath) -> None:
    gateway, dead = aftermath.gateway, aftermath.dead

    eventually(lambda: gateway.total("gateway_backend_up", backend=dead) == 0, what="down")

    assert gateway.total("gateway_backend_up", backend=aftermath.survivor) == 1
    assert fetch(gateway.url + "/readyz").status == 200
    assert gateway.backends()[dead]["up"] is False
    listed = fetch(gateway.url + "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL]
