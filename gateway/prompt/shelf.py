"""The tokenizers in use: one prompter per configured file, one pool of encoder threads for all.

A reload keeps a prompter, and what it has cached, while its files are unchanged. Must never load
the `tokens` extra before a model asks for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.config.schema import Config
from gateway.core.prompter import Prompter
from gateway.prompt.pool import EncoderPool

_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

State = tuple[int, ...]
"""When each of a tokenizer's files was changed; 0 for one that is not there."""


class Tokenizers:
    """Path -> prompter. `prompters` may run in a thread, as long as only one does at a time.

    `on_fallback` is told why a prompt that could have been exact was not.
    """

    def __init__(self, salt: int, fallback: Prompter, on_fallback: Callable[[str], None]) -> None:
        self._salt = salt
        self._fallback = fallback
        self._on_fallback = on_fallback
        self._held: dict[str, tuple[State, Prompter]] = {}
        self._pool: EncoderPool | None = None

    def prompters(self, config: Config) -> dict[str, Prompter]:
        """Return model name -> prompter for the models that have a tokenizer.

        What no model names any more is forgotten. A new large vocabulary takes two seconds.

        Raises:
            TokenizerProblem: a file cannot be used; what was held stays.
        """
        named = {model.name: model.tokenizer for model in config.models if model.tokenizer}
        held = {path: self._load(path) for path in dict.fromkeys(named.values())}
        self._held = held
        return {name: held[path][1] for name, path in named.items()}

    def _load(self, path: str) -> tuple[State, Prompter]:
        from gateway.prompt.load import load_prompter  # noqa: PLC0415 - an optional extra

        state = _state(Path(path))
        held = self._held.get(path)
        if held is not None and held[0] == state:
            return held
        if self._pool is None:
            self._pool = EncoderPool()
        return state, load_prompter(
            path, self._salt, self._fallback, pool=self._pool, on_fallback=self._on_fallback
        )

    def close(self) -> None:
        """Encode nothing more."""
        if self._pool is not None:
            self._pool.close()


def _state(path: Path) -> State:
    directory = path if path.is_dir() else path.parent
    files = [path, *(directory / name for name in _FILES)]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
