"""Which path to ask for the metrics: the whole page, or the wanted names only.

Python engines answer `/metrics/?name[]=...` with just these series (prometheus_client's ASGI
application; on vLLM 0.32 `/metrics` without the slash is another route that ignores the names).
That is 3 KB instead of 79 KB, made and read four times a second. Whether a backend does is found
out: the short page is used only while it tells exactly what the whole page told. Pure.
"""

from dataclasses import fields
from enum import Enum, unique
from urllib.parse import quote

from gateway.core.types import Snapshot
from gateway.watch.exposition import Reading, wanted

WHOLE = "/metrics"
_FIELDS = [field.name for field in fields(Snapshot)]


@unique
class _Stage(Enum):
    LOOKING = "looking"  # the next whole page says what a short one must tell
    TRYING = "trying"  # the next short page must tell it
    SHORT = "short"
    WHOLE = "whole"


class MetricsPath:
    """The path for one backend; `path` is the next to ask, `took` says what it gave."""

    def __init__(self) -> None:
        self._stage = _Stage.LOOKING
        self._told: tuple[str, ...] = ()
        self.path = WHOLE

    @property
    def is_short(self) -> bool:
        """Return whether `path` asks for the wanted names only."""
        return self.path != WHOLE

    def took(self, reading: Reading | None) -> bool:
        """Note what the answer at `path` said; None = no engine's page, or no answer.

        Returns whether to believe it: a first short page that tells less than the whole is not.
        """
        told = _told(reading)
        if self._stage is _Stage.TRYING:
            same = told == self._told
            self._enter(_Stage.SHORT if same else _Stage.WHOLE)
            return same
        if reading is None or (self._stage is not _Stage.LOOKING and told != self._told):
            self._enter(_Stage.LOOKING)  # another version, perhaps, was started there
        elif self._stage is _Stage.LOOKING:
            self._told = told
            self._enter(_Stage.TRYING if reading.engine in _SHORT else _Stage.WHOLE)
            self.path = _SHORT.get(reading.engine, WHOLE)
        return reading is not None

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        if stage in (_Stage.LOOKING, _Stage.WHOLE):
            self.path = WHOLE


def _told(reading: Reading | None) -> tuple[str, ...]:
    if reading is None:
        return ()
    known = [name for name in _FIELDS if getattr(reading.snapshot, name) is not None]
    return (reading.engine, *known)


def _short(engine: str) -> str:
    names = "&".join(f"name%5B%5D={quote(name, safe=':')}" for name in wanted(engine))
    return f"{WHOLE}/?{names}"


_SHORT = {engine: _short(engine) for engine in ("vllm", "sglang")}
