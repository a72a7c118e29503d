"""Which traffic class a request belongs to, and which line of the configuration said so.

Must never look at anything but the features handed in; patterns are compiled once per settings.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate

import msgspec

from gateway.core.settings import ClassSpec, MatchRule

FORCED_RULE = "x-gateway-class"
KEY_RULE = "class of the key"
DEFAULT_RULE = "default"


class Features(msgspec.Struct, frozen=True, gc=False):
    """What rules can look at. `path` is the canonical route; `key` is the key's name, never a secret.

    `forced_class` is the x-gateway-class header if the key may choose, `key_class` the key's own.
    """

    path: str
    tools: bool
    prompt_tokens: int
    user_agent: str = ""
    key: str | None = None
    model: str = ""
    forced_class: str | None = None
    key_class: str | None = None


@dataclass(slots=True, frozen=True)
class _Rule:
    cls: str
    text: str
    match: MatchRule
    user_agent: re.Pattern[str] | None
    model: re.Pattern[str] | None

    def holds(self, features: Features) -> bool:
        match = self.match
        if match.path is not None and match.path != features.path:
            return False
        if match.tools is not None and match.tools != features.tools:
            return False
        if match.key is not None and match.key != features.key:
            return False
        tokens = features.prompt_tokens
        if match.min_prompt_tokens is not None and tokens < match.min_prompt_tokens:
            return False
        if match.max_prompt_tokens is not None and tokens > match.max_prompt_tokens:
            return False
        return self._globs_hold(features)

    def _globs_hold(self, features: Features) -> bool:
        if self.user_agent is not None and not self.user_agent.match(features.user_agent):
            return False
        return self.model is None or self.model.match(features.model) is not None


class Classifier:
    """The rules of all classes in configured order; the first that holds decides."""

    def __init__(self, classes: Sequence[ClassSpec]) -> None:
        if not classes:
            raise ValueError("at least one class is needed")
        self._names = {spec.name for spec in classes}
        self._rules = [_rule(spec.name, match) for spec in classes for match in spec.match]
        self.default = next((spec.name for spec in classes if spec.default), classes[-1].name)

    def classify(self, features: Features) -> tuple[str, str]:
        """Return (class name, the rule that decided, as text)."""
        if features.forced_class in self._names:
            return str(features.forced_class), FORCED_RULE
        if features.key_class in self._names:
            return str(features.key_class), KEY_RULE
        for rule in self._rules:
            if rule.holds(features):
                return rule.cls, rule.text
        return self.default, DEFAULT_RULE


def _rule(cls: str, match: MatchRule) -> _Rule:
    fields = (
        "path",
        "tools",
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
    return _Rule(cls, " ".join(parts) or "any", match, _glob(match.user_agent), _glob(match.model))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _glob(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(translate(pattern))
