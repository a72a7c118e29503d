import random
from array import array
from typing import Any

import orjson

from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import (
    BackendSpec,
    BucketSpec,
    ClassSpec,
    CoreSettings,
    ModelSpec,
    Slo,
)
from gateway.core.types import Chain, Outcome, Query, Ticket
from gateway.edge.live_frame import Scene
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.record import RequestRecord

SETTINGS = CoreSettings(
    models=tuple(ModelSpec(f"m{n}", ("a", "b") if n else ("a", "b", "c")) for n in range(6)),
    backends=(BackendSpec("a"), BackendSpec("b"), BackendSpec("c"), BackendSpec("idle")),
    classes=(ClassSpec("chat", default=True, bucket=BucketSpec(1.0, 9_000.0), slo=Slo(2.0, 0.2)),),
)
QUERY = Query("m0", "chat", Chain(array("Q", [1, 2, 3]), 64.0, 200), 50)


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(SETTINGS, random.Random(1), self.now)
        self.telemetry = Telemetry(self.dispatcher, clock=lambda: self.now, version="1")
        self.telemetry.set_labels(("chat",), ("m0",), ("a", "b", "c", "idle"))
        self.scene = Scene(
            self.dispatcher,
            self.telemetry,
            version="1.2.3",
            ready=lambda: True,
            clock=lambda: self.now,
            started_at=90.0,
            today=lambda: 1_000_000.0 + self.now,
        )

    def watched(self) -> bool:
        return self.telemetry.watcher is not None

    def frame(self) -> dict[str, Any]:
        value: dict[str, Any] = orjson.loads(self.scene.render())
        return value

    def send(self, ident: str) -> Ticket:
        ticket = self.dispatcher.admit(QUERY, self.now)
        assert isinstance(ticket, Ticket)
        self.dispatcher.remember(ident, ticket, self.now)
        return ticket


def test_a_frame_tells_the_books() -> None:
    rig = Rig()
    ticket = rig.send("r1")
    rig.scene.open()
    frame = rig.frame()

    assert (frame["version"], frame["policy"], frame["uptime_s"]) == ("1.2.3", "cost", 10.0)
    assert (frame["ready"], frame["models"], frame["at"]) == (True, 6, 1_000_100.0)
    rows = {row["name"]: row for row in frame["backends"]}
    assert rows[ticket.backend]["in_flight"] == 1
    assert rows["c"]["models"] == ["m0"]
    assert (rows["a"]["models"], rows["a"]["more_models"]) == (["m0", "m1", "m2", "m3"], 2)
    assert (rows["idle"]["models"], rows["idle"]["breaker"]) == ([], "closed")
    (chat,) = frame["classes"]
    assert (chat["admitted"], chat["bucket_burst_tokens"], chat["slo_ttft_s"]) == (1, 9000.0, 2.0)
    assert chat["since_start"] == {"ttft_p50_s": None, "ttft_p95_s": None}


def test_a_request_is_seen_on_its_way_and_ended_at_the_time_of_day() -> None:
    rig = Rig()
    rig.scene.open()
    rig.now = 105.0
    ticket = rig.send("r1")
    (row,) = rig.frame()["requests"]
    assert (row["id"], row["backend"], row["running"]) == ("r1", ticket.backend, True)
    assert row["at"] == 1_000_105.0

    rig.telemetry.finished(
        RequestRecord(
            "r1", "/", 105.0, "chat", "m0", ticket.backend, outcome=Outcome.OK, total_s=1.0
        )
    )
    rig.now = 107.0
    (row,) = rig.frame()["requests"]
    assert (row["outcome"], row["running"], row["at"]) == ("ok", False, 1_000_105.0)
    assert {"received", "until"}.isdisjoint(row)


def test_nothing_is_watched_unless_somebody_looks() -> None:
    rig = Rig()
    assert not rig.watched()
    rig.scene.open()
    assert rig.watched()
    rig.scene.close()
    assert not rig.watched()


def test_the_history_is_of_the_classes_there_are() -> None:
    rig = Rig()
    rig.scene.open()
    rig.frame()
    rig.frame()
    history = orjson.loads(rig.scene.history())
    assert history.keys() == {"chat"}
    assert len(history["chat"]) == 2


def test_a_fleet_of_64_is_a_small_frame_without_addresses() -> None:
    rig = Rig()
    names = tuple(f"backend-{n}" for n in range(64))
    rig.dispatcher.apply(
        CoreSettings(
            models=(ModelSpec("m0", names),),
            backends=tuple(BackendSpec(name) for name in names),
            classes=(ClassSpec("chat", default=True),),
        ),
        rig.now,
    )
    rig.scene.open()
    for n in range(200):
        rig.send(f"request-{n}")
    frame = rig.scene.render()
    assert len(orjson.loads(frame)["backends"]) == 64
    assert len(frame) < 48_000
    assert b"http" not in frame
