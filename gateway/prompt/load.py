"""Build a model's exact prompter from the files its publisher ships.

Reads `tokenizer.json`, and beside it `tokenizer_config.json` and `chat_template.jinja` if they are
there. Must never reach for a network: every file is local.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.core.prompter import Prompter
from gateway.prompt.pool import EncoderPool

BLOCK_TOKENS: Final = 16
"""vLLM's default block size."""

_SPECIALS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class TokenizerProblem(ValueError):
    """The configured `tokenizer` cannot be used. The message names the file and the fault."""


def load_prompter(
    path: Path | str,
    salt: int,
    fallback: Prompter,
    *,
    block_tokens: int = BLOCK_TOKENS,
    pool: EncoderPool | None = None,
    on_fallback: Callable[[str], None] = lambda _: None,
) -> Prompter:
    """Return the prompter for a `tokenizer.json` or the directory it is in.

    `fallback` serves what cannot be rendered exactly; `on_fallback` is told why when a prompt that
    could be goes there. Without a `pool` everything is encoded where it is asked for. A large
    vocabulary takes two seconds to load.

    Raises:
        TokenizerProblem: a file is missing or broken, or the extra is not installed.
    """
    try:
        from gateway.prompt.engines import load_encoder  # noqa: PLC0415 - an optional extra
        from gateway.prompt.template import ChatTemplate, Unrenderable  # noqa: PLC0415
        from gateway.prompt.tokens import TokenPrompter  # noqa: PLC0415
    except ImportError:
        raise TokenizerProblem(
            "`tokenizer` needs the extra `tokens`: pip install '.[tokens]' in the clone"
        ) from None
    given = Path(path)
    directory = given if given.is_dir() else given.parent
    file = directory / "tokenizer.json" if given.is_dir() else given
    try:
        encoder = load_encoder(file)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise TokenizerProblem(f"{file}: {error}") from None
    config = _load_config(directory)
    source = _template_source(directory, config)
    try:
        template = None if source is None else ChatTemplate(source, _special_tokens(config))
    except Unrenderable as error:
        raise TokenizerProblem(f"{directory}: {error}") from None
    return TokenPrompter(
        encoder,
        template,
        fallback,
        salt=salt,
        block_tokens=block_tokens,
        pool=pool,
        on_fallback=on_fallback,
    )


def _load_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TokenizerProblem(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerProblem(f"{file}: must be a JSON object")
    return config


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerProblem(f"{file}: {error}") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name: the default one serves
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.get("default")
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    specials: dict[str, str] = {}
    for name in _SPECIALS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            specials[name] = text
    return specials
