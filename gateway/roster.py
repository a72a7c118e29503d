"""Which names there are, told to everyone who shows them or checks requests by them.

One place, so that a reload, a discovery and an engine's list of models cannot leave two of them with
different names. Must never decide which backends or models there are.
"""

from collections.abc import Callable

from gateway.config.backends import Names
from gateway.config.schema import Config
from gateway.core.settings import CoreSettings
from gateway.edge.handler import Handler
from gateway.telemetry.logs import Logs
from gateway.telemetry.metrics import Telemetry
from gateway.watch.catalog import Catalog

_LOADING_S = 600.0  # how long a backend that never told its models makes an unknown one a 503


class Roster:
    """The names in force. `handler` hears whether an unknown model may yet turn up."""

    def __init__(
        self,
        catalog: Catalog,
        handler: Handler,
        telemetry: Telemetry,
        logs: Logs | None,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._handler = handler
        self._telemetry = telemetry
        self._logs = logs
        self._clock = clock
        self._since = clock()
        self._untold: list[str] = []  # top-level backends that have not told their models

    def publish(self, config: Config, settings: CoreSettings) -> None:
        """Take the names of a configuration (groups spelled out) and of what its backends serve."""
        self._catalog.configure(settings.models, [model.name for model in config.models])
        names = Names(config)
        self._untold = [
            name for name in map(names.of, config.backends) if not self._catalog.knows(name)
        ]
        self.note_awaited()
        self._telemetry.set_labels(
            [cls.name for cls in settings.classes],
            [model.name for model in settings.models],
            [backend.name for backend in settings.backends],
            [key.name for key in config.keys],
            {cls.name: (cls.slo.ttft_s, cls.slo.tpot_s) for cls in settings.classes},
        )
        if self._logs is not None:
            self._logs.apply(config.log)
            self._telemetry.log = self._logs.access

    def await_anew(self) -> None:
        """Give backends the whole time to tell their models: the configuration is another."""
        self._since = self._clock()

    def note_awaited(self) -> None:
        """Say whether a model nobody has told of may yet turn up: engines load for minutes."""
        waited = self._clock() - self._since
        self._handler.awaiting_models = bool(self._untold) and waited < _LOADING_S
