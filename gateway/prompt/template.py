"""A model's chat template, rendered as vLLM (through transformers) renders it.

Templates are programs from the model's publisher: they run in jinja2's immutable sandbox. What
cannot be rendered raises `Unrenderable`; the caller then falls back to byte blocks. Must never
guess: a prompt that differs from the engine's by one token has no exact prefix.
"""

import json  # noqa: TID251 - `tojson` must write Python's separators, as transformers does
from collections.abc import Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.prompt.amount import check_amount
from gateway.prompt.chat import Conversation
from gateway.prompt.content_format import reads_parts
from gateway.prompt.messages import Unrenderable, shown

__all__ = ["ChatTemplate", "Unrenderable"]

_OPEN_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_SYSTEM_TWICE: Final = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
_DICT_NAMES: Final = frozenset(dir(dict))
_STRING_METHODS: Final = frozenset(
    {
        *("startswith", "endswith", "split", "rsplit", "strip", "lstrip", "rstrip", "replace"),
        *("lower", "upper", "title", "find", "rfind", "splitlines", "join", "count", "capitalize"),
    }
)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class _Generation(Extension):
    """`{% generation %}`: marks training targets; when serving, its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_support"), [], [], body)
        block.set_lineno(line)
        return block

    def _support(self, caller: Any) -> Any:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with its dearest steps shortened where its answer is known beforehand."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field of an object, or its attribute: as the sandbox does, by its rules."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _DICT_NAMES:
                return obj[attribute]  # where the sandbox gets to after looking for an attribute
        elif kind is str:
            if attribute in _STRING_METHODS:
                return getattr(obj, attribute)
        elif (kind is Namespace or kind is LoopContext) and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call it if it is safe: methods of strings, bar `format`, are."""
        if (
            type(obj) is BuiltinMethodType
            and type(obj.__self__) is str
            and obj.__name__ in _STRING_METHODS
        ):
            kwargs.pop("_loop_vars", None)  # jinja2's own, which its context takes off
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


class ChatTemplate:
    """A model's templates by name, compiled: "default", and perhaps "tool_use".

    `specials` are `bos_token` and its kin, as templates name them.
    """

    def __init__(self, source: str | Mapping[str, str], specials: dict[str, str]) -> None:
        """Compile.

        Raises:
            Unrenderable: the message says which template does not compile, or that none serves.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._specials = specials
        self._named = {
            name: One(text) for name, text in sources.items() if name in ("default", "tool_use")
        }
        if not self._named:
            raise Unrenderable("several chat templates, and none of them is the default")
        self.merges_system = any(
            one is None or one.merges_system() for one in (self.of(None), self.of([]))
        )
        """Whether vLLM moves all system messages of `/v1/messages` to the start."""
        self.disabled_effort = self._disabled_effort()
        """The effort that vLLM makes of disabled thinking in `/v1/messages`."""

    def render(self, chat: Conversation) -> str:
        """Return the prompt's text.

        Raises:
            Unrenderable: more than text in it, or the template refuses or fails.
        """
        check_amount(chat.messages, chat.tools)
        one = self.of(chat.tools)
        if one is None:
            raise Unrenderable("no template for a request without tools")
        messages = self.seen(chat.messages, one, ordered=chat.ordered)
        if chat.continued:
            return one.render_open(messages, chat.tools, {**self._specials, **chat.variables})
        return one.run(messages, chat.tools, {**self._specials, **chat.variables})

    def seen(self, messages: list[Any], one: "One", *, ordered: bool) -> list[dict[str, Any]]:
        """Return messages as the template sees them: all of a conversation, or its first ones."""
        given = [shown(message, parts=one.parts, ordered=ordered) for message in messages]
        if not one.knows_developer and any(m["role"] == "developer" for m in given):
            given = _merged_system(given)
        return given

    def of(self, tools: object) -> "One | None":
        """Return the template that serves a request with or without (None) tools."""
        if tools is not None and "tool_use" in self._named:
            return self._named["tool_use"]
        return self._named.get("default")

    @property
    def specials(self) -> dict[str, str]:
        """The special tokens that the template may name."""
        return self._specials

    @property
    def tells_time(self) -> bool:
        """Whether the prompt may depend on when it is rendered."""
        return any("strftime_now" in one.source for one in self._named.values())

    def _disabled_effort(self) -> str:
        """Return "low" where the template refuses or ignores "none", as vLLM finds out."""
        none = self._probe("none")
        if none is None or any(self._probe(effort) == none for effort in _EFFORTS):
            return "low"
        return "none"

    def _probe(self, effort: str) -> str | None:
        variables = {
            "add_generation_prompt": True,
            "reasoning_effort": effort,
            "enable_thinking": effort != "none",
        }
        try:
            return self.render(Conversation([{"role": "user", "content": "Hi"}], None, variables))
        except Unrenderable:
            return None


class One:
    """One compiled template, and what vLLM reads from its source."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self.tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise Unrenderable(f"the chat template does not compile: {error}") from None
        self.source = source
        self.parts = reads_parts(self.tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.variables = meta.find_undeclared_variables(self.tree)
        """Names that a request's options can set."""

    def run(
        self, messages: list[dict[str, Any]], tools: object, variables: Mapping[str, Any]
    ) -> str:
        """Return the text for messages as templates see them."""
        try:
            return self._template.render(
                {"documents": None, **variables, "messages": messages, "tools": tools}
            )
        except Exception as error:  # noqa: BLE001 - a template is somebody's program
            raise Unrenderable(f"the chat template failed: {type(error).__name__}") from None

    def render_open(
        self, messages: list[dict[str, Any]], tools: object, variables: Mapping[str, Any]
    ) -> str:
        """Return the text up to the end of the last message's content, which goes on."""
        last = dict(messages[-1])
        content = last.get("content")
        if isinstance(content, list):
            blocks = [dict(block) for block in content]
            block = next((b for b in reversed(blocks) if "text" in b), None)
            if block is None:
                raise Unrenderable("no text to continue")
            final = block["text"]
            block["text"] = final + _OPEN_MARK
            last["content"] = blocks
        else:
            final = str(content)
            last["content"] = final + _OPEN_MARK
        text = self.run([*messages[:-1], last], tools, variables)
        mark = _OPEN_MARK.strip()
        if "content" not in self.source or final.strip() not in text or mark not in text:
            raise Unrenderable("the template does not show the message to continue")
        place = text.rindex(mark)
        kept = text[place : place + len(_OPEN_MARK)] == _OPEN_MARK
        return text[:place] if kept else text[:place].rstrip()

    def merges_system(self) -> bool:
        """Return whether a later system message fails (vLLM's own, sparser environment)."""
        try:
            _environment(generation=False).from_string(self.source).render(
                messages=_SYSTEM_TWICE, add_generation_prompt=False
            )
        except jinja2.TemplateError:
            return True
        except Exception:  # noqa: BLE001 - vLLM does not come up at all with such a one
            return True
        return False


def _environment(*, generation: bool = True) -> _Environment:
    extensions = [_Generation, loopcontrols] if generation else [loopcontrols]
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def _merged_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developers as system, and one system message at the start."""
    changed = [_as_system(m) if m["role"] == "developer" else m for m in messages]
    places = [index for index, message in enumerate(changed) if message["role"] == "system"]
    if places == [0]:
        return changed
    texts: list[str] = []
    for index in places:
        content = changed[index].get("content", "")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    rest = [message for message in changed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the engine's own way: local time
