"""Build a model's exact prompter from the files its publisher ships.

Reads `tokenizer.json`, and beside it `tokenizer_config.json`, `special_tokens_map.json`, the chat
templates and `config.json` if they are there. Must never reach for a network: every file is local.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.core.prompter import Prompter
from gateway.prompt.pool import EncoderPool

if TYPE_CHECKING:
    from gateway.prompt.conversation import Conversations
    from gateway.prompt.engines import Encoder
    from gateway.prompt.template import ChatTemplate
    from gateway.prompt.tokens import TokenPrompter

_log = logging.getLogger("radixgate.prompt")

BLOCK_TOKENS: Final = 16
"""vLLM's default block size."""

_OWN_RENDERERS: Final = frozenset(
    {
        *("gpt_oss", "GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
        *("DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "InklingForCausalLM"),
        *("InklingForConditionalGeneration", "KimiK3ForConditionalGeneration"),
        "MoonshotKimiaForCausalLM",
    }
)
"""Models whose chats vLLM 0.32 renders by a program of its own, not by their template."""

_SPECIALS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class TokenizerProblem(ValueError):
    """The configured `tokenizer` cannot be used. The message names the file and the fault."""


def load_prompter(
    path: Path | str,
    salt: int,
    fallback: Prompter,
    *,
    chat_template: Path | str | None = None,
    block_tokens: int = BLOCK_TOKENS,
    pool: EncoderPool | None = None,
    on_fallback: Callable[[str], None] = lambda _: None,
) -> "TokenPrompter":
    """Return the prompter for a `tokenizer.json` or the directory it is in.

    `chat_template` is a file to take in place of the tokenizer's own. `fallback` serves what cannot
    be rendered exactly; `on_fallback` is told why when a prompt that could be goes there. Without a
    `pool` everything is encoded where it is asked for. A large vocabulary takes two seconds to
    load, and a long template as much again.

    Raises:
        TokenizerProblem: a file is missing or broken, or the extra is not installed.
    """
    try:
        from gateway.prompt.engines import load_encoder  # noqa: PLC0415 - an optional extra
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
    template = _template(directory, None if chat_template is None else Path(chat_template))
    return TokenPrompter(
        encoder,
        template,
        fallback,
        salt=salt,
        block_tokens=block_tokens,
        pool=pool,
        on_fallback=on_fallback,
        conversations=None if template is None else _conversations(template, file, encoder),
    )


def _template(directory: Path, file: Path | None) -> "ChatTemplate | None":
    """Return the model's template; None where the engine renders by a program of its own."""
    from gateway.prompt.template import ChatTemplate, Unrenderable  # noqa: PLC0415 - as above

    config = _load_json(directory / "tokenizer_config.json")
    if file is None and (reason := _own_renderer(directory)):
        _log.info("%s: chats go by byte blocks (%s)", directory, reason)
        return None
    source = _template_source(directory, config) if file is None else _read_template(file)
    try:
        return None if source is None else ChatTemplate(source, _special_tokens(directory, config))
    except Unrenderable as error:
        raise TokenizerProblem(f"{file or directory}: {error}") from None


def _conversations(
    template: "ChatTemplate", file: Path, encoder: "Encoder"
) -> "Conversations | None":
    """Return the conversation cache, or None where the template has to be rendered whole."""
    from gateway.prompt.conversation import Conversations  # noqa: PLC0415 - as above
    from gateway.prompt.separate import Separation  # noqa: PLC0415

    began = perf_counter()
    separation = Separation(template, cut_tokens(_load_json(file)), encoder.encode)
    took = perf_counter() - began
    if not separation.proven:
        _log.info("%s: chats are rendered whole: no cut between messages was proven", file)
        return None
    _log.info("%s: chats are rendered in parts, as proven in %.1f s", file, took)
    return Conversations(template, separation)


def cut_tokens(definition: dict[str, Any]) -> list[str]:
    """Return the added tokens before which a text may be cut: its ids are the same in two parts.

    Added tokens are found first, in the raw text, and what is between them is encoded by itself.
    Not so where one takes in the white space before it, is looked for in normalised text, or could
    begin inside another one's end.
    """
    added = [token for token in definition.get("added_tokens") or [] if token.get("content")]
    normalizes = definition.get("normalizer") is not None
    names = [str(token["content"]) for token in added]
    return [
        str(token["content"])
        for token in added
        if not token.get("lstrip")
        and not token.get("single_word")
        and not (normalizes and token.get("normalized"))
        and not any(_reaches_into(name, str(token["content"])) for name in names)
    ]


def _reaches_into(other: str, token: str) -> bool:
    """Return whether `other`, found earlier in a text, could swallow the beginning of `token`."""
    return any(
        other[start:].startswith(token) or token.startswith(other[start:])
        for start in range(1, len(other))
    )


def _own_renderer(directory: Path) -> str | None:
    """Return why vLLM renders this model's chats without its template."""
    config = _load_json(directory / "config.json")
    architectures = config.get("architectures") or []
    known = _OWN_RENDERERS.intersection(map(str, architectures))
    if known or config.get("model_type") in _OWN_RENDERERS:
        return f"the engine has its own way with {min(known, default=config.get('model_type'))}"
    mistral = [*directory.glob("tekken.json"), *directory.glob("tokenizer.model.v*")]
    if mistral and any(directory.glob("consolidated*.safetensors")):
        return f"the engine takes {mistral[0].name}"
    return None


def _load_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TokenizerProblem(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerProblem(f"{file}: must be a JSON object")
    return config


def _template_source(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the template, or several by name; files win over the configuration."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (directory / name).is_file():
            source = _read_template(directory / name)
            break
    else:
        source = _named(config.get("chat_template"))
    more = directory / "additional_chat_templates"
    if more.is_dir():
        named = {"default": source} if isinstance(source, str) else dict(source or {})
        source = named | {file.stem: _read_text(file) for file in sorted(more.glob("*.jinja"))}
    return source


def _read_template(file: Path) -> str | dict[str, str] | None:
    if file.suffix == ".json":
        return _named(_load_json(file).get("chat_template"))
    return _read_text(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerProblem(f"{file}: {error}") from None


def _named(source: object) -> str | dict[str, str] | None:
    if isinstance(source, list):
        source = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
    if isinstance(source, dict):
        return {
            name: text
            for name, text in source.items()
            if isinstance(name, str) and isinstance(text, str)
        }
    return source if isinstance(source, str) else None


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    specials: dict[str, str] = {}
    map_of_them = _load_json(directory / "special_tokens_map.json")
    for name in _SPECIALS:
        token = config[name] if name in config else map_of_them.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            specials[name] = text
    return specials
