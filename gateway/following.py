"""Which backends' KV events are read: the configuration turned into feeds and sockets.

A backend is followed if it publishes and a model of its has a tokenizer: events tell token ids, and
only chains of tokens can be compared with them. Decides nothing about a request.
"""

from collections.abc import Callable, Mapping

from gateway.config.backends import Names, backends_of, events_of
from gateway.config.schema import Config
from gateway.core.dispatcher import Dispatcher
from gateway.core.exactness import EventSpec
from gateway.core.prompter import Prompter
from gateway.extras import load_zmq
from gateway.watch.kv_events import EventSource, EventWatch


class Following:
    """Keeps the readers in step with the configuration. `salt` is the prompters'."""

    def __init__(self, dispatcher: Dispatcher, salt: int, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._salt = salt
        self._clock = clock
        self._watch: EventWatch | None = None

    @staticmethod
    def check(config: Config) -> None:
        """Fail if the configuration asks for what is not installed.

        Raises:
            MissingExtra: pyzmq is needed.
        """
        if any(backend.kv_events for backend in backends_of(config)):
            load_zmq("`kv_events`")

    def apply(self, config: Config, prompters: Mapping[str, Prompter]) -> None:
        """Follow exactly the backends that `config` (DNS expanded) says; after `Dispatcher.apply`."""
        specs = self._specs(config, prompters)
        wanted = []
        for backend in backends_of(config):
            name = backend.name or ""
            spec = specs.get(name)
            endpoints = events_of(backend)
            feed = None
            if spec is not None and endpoints is not None:
                feed = self._dispatcher.follow(name, spec)
            if feed is None or endpoints is None:
                self._dispatcher.unfollow(name)
            else:
                wanted.append((EventSource(name, *endpoints), feed))
        if wanted and self._watch is None:
            self._watch = EventWatch(self._clock)
        if self._watch is not None:
            self._watch.set_sources(wanted)

    def close(self) -> None:
        """Close every socket."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _specs(self, config: Config, prompters: Mapping[str, Prompter]) -> dict[str, EventSpec]:
        """Return how each backend's chains are made: by the first of its models with a tokenizer.

        None where keys are isolated: events name no key, so they are nobody's hits.
        """
        if config.index.isolate_keys:
            return {}
        names = Names(config)
        specs: dict[str, EventSpec] = {}
        for model in config.models:
            block_tokens_of = getattr(prompters.get(model.name), "block_tokens_of", None)
            if block_tokens_of is None:
                continue
            spec = EventSpec(model.name, self._salt, block_tokens_of(model.name))
            for backend in model.backends:
                specs.setdefault(names.of(backend), spec)
        return specs
