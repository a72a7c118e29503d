"""Which traffic class a request belongs to, and which line of the configuration said so.

Must never look at anything but the features handed in; patterns are compiled once per settings.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import inf

import msgspec

from gateway.core.settings import ClassSpec, MatchRule

FORCED_RULE = "x-gateway-class"
KEY_RULE = "class of the key"
DEFAULT_RULE = "default"

Verdict = tuple[str, str]
"""Class name, and the rule that decided, as text."""

_Left = tuple[tuple[float, float, Verdict], ...]
# Clients (path, tools, agent, key, model) remembered at once, and the longest agent among them:
# at most 1 MB, whatever clients send.
_MAX_CLIENTS, _MAX_AGENT = 1024, 512


class Features(msgspec.Struct, frozen=True, gc=False):
    """What rules can look at. `path` is the canonical route; `key` is the key's name, never a secret.

    `suffix` = it asks for what goes before one (fill in the middle). `forced_class` is the x-gateway-class header if the key may choose, `key_class` the key's own.
    """

    path: str
    tools: bool
    prompt_tokens: int
    user_agent: str = ""
    key: str | None = None
    model: str = ""
    forced_class: str | None = None
    key_class: str | None = None
    suffix: bool = False


@dataclass(slots=True, frozen=True)
class _Rule:
    match: MatchRule
    user_agent: re.Pattern[str] | None
    model: re.Pattern[str] | None
    verdict: Verdict

    def may_hold(self, features: Features) -> bool:
        """Return whether all but the prompt's length fits."""
        match = self.match
        if match.path is not None and match.path != features.path:
            return False
        if match.tools is not None and match.tools != features.tools:
            return False
        if match.suffix is not None and match.suffix != features.suffix:
            return False
        if match.key is not None and match.key != features.key:
            return False
        if self.user_agent is not None and not self.user_agent.match(features.user_agent):
            return False
        return self.model is None or self.model.match(features.model) is not None

    @property
    def lengths(self) -> tuple[float, float]:
        """The least and the most prompt tokens it wants."""
        least, most = self.match.min_prompt_tokens, self.match.max_prompt_tokens
        return -inf if least is None else least, inf if most is None else most


class Classifier:
    """The rules of all classes in configured order; the first that holds decides.

    Which rules are left for a client is remembered: most send the same few features for hours, and
    then only the prompt's length is looked at.
    """

    def __init__(self, classes: Sequence[ClassSpec]) -> None:
        if not classes:
            raise ValueError("at least one class is needed")
        self._names = {spec.name for spec in classes}
        self._rules = [_rule(spec.name, match) for spec in classes for match in spec.match]
        self._left: dict[tuple[str, bool, str, str | None, str, bool], _Left] = {}
        self.default = next((spec.name for spec in classes if spec.default), classes[-1].name)
        self._otherwise = (self.default, DEFAULT_RULE)

    def classify(self, features: Features) -> Verdict:
        """Return (class name, the rule that decided, as text)."""
        if features.forced_class in self._names:
            return str(features.forced_class), FORCED_RULE
        if features.key_class in self._names:
            return str(features.key_class), KEY_RULE
        client = (
            features.path,
            features.tools,
            features.user_agent,
            features.key,
            features.model,
            features.suffix,
        )
        left = self._left.get(client)
        if left is None:
            left = self._narrow(features)
            if len(features.user_agent) <= _MAX_AGENT:
                if len(self._left) >= _MAX_CLIENTS:
                    self._left.clear()
                self._left[client] = left
        tokens = features.prompt_tokens
        for least, most, verdict in left:
            if least <= tokens <= most:
                return verdict
        return self._otherwise

    def _narrow(self, features: Features) -> _Left:
        """Return what the prompt's length still decides between, the first that fits."""
        left = [(*r.lengths, r.verdict) for r in self._rules if r.may_hold(features)]
        sure = next((i for i, row in enumerate(left) if row[:2] == (-inf, inf)), len(left))
        return tuple(left[: sure + 1])


def _rule(cls: str, match: MatchRule) -> _Rule:
    fields = (
        "path",
        "tools",
        "suffix",
        "min_prompt_tokens",
        "max_prompt_tokens",
        "user_agent",
        "key",
        "model",
    )
    parts = [
        f"{name}={_text(getattr(match, name))}"
        for name in fields
        if getattr(match, name) is not None
    ]
    verdict = (cls, " ".join(parts) or "any")
    return _Rule(match, _glob(match.user_agent, re.IGNORECASE), _glob(match.model), verdict)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _glob(pattern: str | None, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(translate(pattern), flags)
