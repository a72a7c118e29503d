"""The tokenizers in use: one prompter per configured file, one pool of encoder threads for all.

A reload keeps a prompter, and what it has cached, while its files are unchanged. Must never load
the `tokens` extra before a model asks for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.config.schema import Config
from gateway.core.prompter import Prompter
from gateway.prompt.pool import EncoderPool

if TYPE_CHECKING:
    from gateway.prompt.tokens import TokenPrompter

_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("chat_template.jinja", "chat_template.json"),
)

STEADY_S: Final = 60.0
"""For so long an engine must tell a block size that would waste what is known."""

Paths = tuple[str, str | None]
"""A tokenizer, and the chat template taken in place of its own."""

State = tuple[tuple[str, int, int], ...]
"""A tokenizer's files, when each was changed and its size; 0 for one that is not there."""


class Tokenizers:
    """Path -> prompter. `prompters` may run in a thread, as long as only one does at a time.

    `on_fallback` is told why a prompt that could have been exact was not.
    """

    def __init__(self, salt: int, fallback: Prompter, on_fallback: Callable[[str], None]) -> None:
        self._salt = salt
        self._fallback = fallback
        self._on_fallback = on_fallback
        self._held: dict[Paths, tuple[State, TokenPrompter]] = {}
        self._named: dict[str, TokenPrompter] = {}
        self._sizes: dict[str, tuple[int, int, float]] = {}  # in use, told last, since when
        self._pool: EncoderPool | None = None

    def prompters(self, config: Config) -> dict[str, Prompter]:
        """Return model name -> prompter for the models that have a tokenizer.

        What no model names any more is forgotten. A new large vocabulary takes two seconds.

        Raises:
            TokenizerProblem: a file cannot be used; what was held stays.
        """
        named = {
            model.name: (model.tokenizer, model.chat_template)
            for model in config.models
            if model.tokenizer
        }
        held = {paths: self._load(paths) for paths in dict.fromkeys(named.values())}
        for _, prompter in held.values():
            prompter.cap_conversations(config.index.conversation_mib * 1024 * 1024)
        self._held = held
        self._named = {name: held[paths][1] for name, paths in named.items()}
        self._sizes = {name: size for name, size in dict(self._sizes).items() if name in named}
        return dict(self._named)

    def fit_blocks(self, told: Callable[[str], int | None], now: float) -> list[str]:
        """Chain by the block size that `told` gives for each model; return those it is new for.

        Each time all prefixes of the model are forgotten. One that the size in use is no multiple of
        has to be told for `STEADY_S`: two engines behind one address tell theirs in turn.
        """
        return [
            name
            for name, prompter in self._named.items()
            if (size := self._steady(name, told(name), now)) is not None
            and prompter.use_block_tokens(name, size)
        ]

    def _steady(self, name: str, size: int | None, now: float) -> int | None:
        """Return the size to use for a model: what is told, once that may be believed."""
        if size is None:
            return None
        used, candidate, since = self._sizes.get(name) or (size, size, now)
        if used % size == 0:
            self._sizes[name] = (size, size, now)
            return size
        if candidate != size:
            since = now
        if now - since >= STEADY_S:
            used = size
        self._sizes[name] = (used, size, since)
        return used

    def way(self, model: str) -> str | None:
        """Return what a model's chains depend on: its files and block size; None = no tokenizer."""
        prompter = self._named.get(model)
        if prompter is None:
            return None
        states = [state for state, held in self._held.values() if held is prompter]
        files = [(path, size) for state in states for path, _, size in state if size]
        return f"tokens {prompter.block_tokens_of(model)} {files}"

    def _load(self, paths: Paths) -> "tuple[State, TokenPrompter]":
        from gateway.prompt.load import load_prompter  # noqa: PLC0415 - an optional extra

        path, template = paths
        state = _state(Path(path), template)
        held = self._held.get(paths)
        if held is not None and held[0] == state:
            return held
        if self._pool is None:
            self._pool = EncoderPool()
        return state, load_prompter(
            path,
            self._salt,
            self._fallback,
            chat_template=template,
            pool=self._pool,
            on_fallback=self._on_fallback,
        )

    def close(self) -> None:
        """Encode nothing more."""
        if self._pool is not None:
            self._pool.close()


def _state(path: Path, template: str | None) -> State:
    directory = path if path.is_dir() else path.parent
    files = [path, *(directory / name for name in _FILES)]
    files += sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if template is not None:
        files.append(Path(template))
    return tuple(_told(file) for file in files)


def _told(file: Path) -> tuple[str, int, int]:
    if not file.exists():
        return str(file), 0, 0
    found = file.stat()
    return str(file), found.st_mtime_ns, found.st_size
