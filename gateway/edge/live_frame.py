"""What a tick of the live page says: one JSON value, the same for everyone who looks.

Small on purpose: 64 backends and 50 requests are about 30 KB a second. Must never show a prompt, a
key or a backend's address.
"""

from collections.abc import Callable, Iterable
from time import time  # noqa: TID251 - the page shows the time of day
from typing import Any, Protocol

import orjson

from gateway.core.settings import ClassSpec, CoreSettings, ModelSpec
from gateway.core.types import BackendStatus, ClassStatus, Decided
from gateway.edge.live_figures import ROWS, Figures
from gateway.telemetry.metrics import Telemetry

_NAMES_SHOWN = 4  # models of a backend: a fleet's LoRA ids would fill the page
_SHARES = (0.5, 0.95)


class Seen(Protocol):
    """What the page shows of the dispatcher."""

    @property
    def settings(self) -> CoreSettings:
        """Return the settings in force."""

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """Return the models that can be routed."""

    @property
    def policy(self) -> str:
        """Return the name of the routing policy."""

    def backends(self, now: float) -> Iterable[BackendStatus]:
        """Return every configured backend's figures."""

    def classes(self, now: float) -> Iterable[ClassStatus]:
        """Return every class's figures."""

    def latest(self, count: int) -> list[Decided]:
        """Return the last decisions, the newest first."""


class Scene:
    """Renders what there is to see. `ready` as in `/readyz`; `clock` gives monotonic seconds."""

    def __init__(
        self,
        seen: Seen,
        telemetry: Telemetry,
        *,
        version: str,
        ready: Callable[[], bool],
        clock: Callable[[], float],
        started_at: float,
        today: Callable[[], float] = time,
    ) -> None:
        self._seen = seen
        self._telemetry = telemetry
        self._version = version
        self._ready = ready
        self._clock = clock
        self._started_at = started_at
        self._today = today
        self._figures = Figures()
        self._models: tuple[ModelSpec, ...] = ()
        self._served: dict[str, list[str]] = {}

    def open(self) -> None:
        """Begin to watch requests: somebody looks."""
        self._figures.begin(self._clock())
        self._telemetry.watcher = self._note

    def close(self) -> None:
        """Watch no more: from now on a request costs nothing here."""
        self._telemetry.watcher = None
        self._figures.end()

    def render(self) -> bytes:
        """Return this tick as JSON; takes in what has happened since the last."""
        now = self._clock()
        specs = {spec.name: spec for spec in self._seen.settings.classes}
        self._figures.tick({name: spec.slo for name, spec in specs.items()}, now)
        frame = {
            "at": round(self._today(), 3),
            "version": self._version,
            "uptime_s": round(now - self._started_at, 1),
            "policy": self._seen.policy,
            "ready": self._ready(),
            "models": len(self._seen.models),
            "backends": self._backends(now),
            "classes": [
                self._class(status, specs.get(status.name)) for status in self._seen.classes(now)
            ],
            "requests": self._requests(now),
        }
        return orjson.dumps(frame)

    def history(self) -> bytes:
        """Return the sparklines' points up to this tick as JSON."""
        return orjson.dumps(self._figures.points())

    def _note(self, record: Any) -> None:
        self._figures.note(record)

    def _backends(self, now: float) -> list[dict[str, Any]]:
        models = self._seen.models
        if models is not self._models:
            self._models, self._served = models, _served(models)
        nothing: list[str] = []
        return [
            _backend(status, self._served.get(status.name, nothing))
            for status in self._seen.backends(now)
        ]

    def _class(self, status: ClassStatus, spec: ClassSpec | None) -> dict[str, Any]:
        median, tail = self._telemetry.ttft_quantiles(status.name, _SHARES)
        bucket = None if spec is None else spec.bucket
        return {
            "name": status.name,
            "waiting": status.waiting,
            "waiting_bytes": status.waiting_bytes,
            "bucket_tokens": status.bucket_tokens,
            "bucket_burst_tokens": None if bucket is None else bucket.burst_tokens,
            "admitted": status.admitted,
            "rejected": status.rejected,
            "slo_ttft_s": None if spec is None else spec.slo.ttft_s,
            "slo_tpot_s": None if spec is None else spec.slo.tpot_s,
            "point": self._figures.point(status.name),
            "recent": self._figures.recent(status.name),
            "since_start": {"ttft_p50_s": median, "ttft_p95_s": tail},
        }

    def _requests(self, now: float) -> list[dict[str, Any]]:
        wall = self._today() - now
        rows = self._figures.rows(self._seen.latest(ROWS))
        return [
            {key: value for key, value in row.items() if key not in ("received", "until")}
            | {"at": round(wall + row["received"], 3)}
            for row in rows
        ]


def _backend(status: BackendStatus, models: list[str]) -> dict[str, Any]:
    return {
        "name": status.name,
        "models": models[:_NAMES_SHOWN],
        "more_models": max(0, len(models) - _NAMES_SHOWN),
        "up": status.up,
        "draining": status.draining,
        "breaker": status.breaker,
        "in_flight": status.in_flight,
        "waiting": status.waiting,
        "owed_prefill_s": round(status.owed_prefill_s, 3),
        "kv_utilization": status.kv_utilization,
        "queue_depth": status.queue_depth,
        "running": status.running,
        "hit_tokens_predicted": status.hit_tokens_predicted,
        "hit_tokens_reported": status.hit_tokens_reported,
        "index_blocks": status.index_blocks,
        "index_exact": status.kv_events.mode == "exact",
        "snapshot_age_s": None
        if status.snapshot_age_s is None
        else round(status.snapshot_age_s, 2),
        "prefill_tokens_per_s": round(status.prefill_tokens_per_s),
    }


def _served(models: Iterable[ModelSpec]) -> dict[str, list[str]]:
    """Return the models of each backend."""
    served: dict[str, list[str]] = {}
    for model in models:
        for name in model.backends:
            served.setdefault(name, []).append(model.name)
    return served
