"""No prefix credit across models, salts or isolated keys, in either mode; and nothing else parts."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.prompter import BytePrompter, Prompter
from gateway.core.request import parse_json
from gateway.core.types import Api, Chain
from gateway.prompt.load import load_prompter
from tests.prompt_kit import SPECIAL_TOKENS, THINKING, make_tokenizer

SIDES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["m", "adapter", "n"]),
        "cache_salt": st.sampled_from([None, "s", "t", "m"]),
        "isolation": st.sampled_from(["", "team", "s"]),
    }
)
TEXTS = st.sampled_from(["hello " * 60, "the quick brown fox " * 30, "x" * 700])
MESSAGES = st.lists(TEXTS, min_size=1, max_size=4).map(
    lambda texts: [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]
)
BODIES = st.one_of(
    st.builds(lambda messages: (Api.CHAT, {"messages": messages}), MESSAGES),
    st.builds(lambda messages: (Api.MESSAGES, {"messages": messages, "max_tokens": 1}), MESSAGES),
    st.builds(lambda text: (Api.COMPLETIONS, {"prompt": text}), TEXTS),
)
IRRELEVANT: dict[str, Any] = {
    "temperature": 0.5,
    "seed": 7,
    "user": "somebody",
    "stream": True,
    "max_tokens": 99,
    "stop": ["x"],
    "metadata": {"a": 1},
    "priority": 3,
    "n": 2,
    "unheard_of": [1, 2],
}


@cache
def prompter(kind: str) -> Prompter:
    by_bytes = BytePrompter(1)
    if kind == "bytes":
        return by_bytes
    directory = Path(mkdtemp())
    make_tokenizer().save(str(directory / "tokenizer.json"))
    config = {**SPECIAL_TOKENS, "chat_template": THINKING}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    return load_prompter(directory, 1, by_bytes)


def chain(kind: str, api: Api, fields: dict[str, Any], side: dict[str, Any], **how: Any) -> Chain:
    body = {"model": side["model"], **fields}
    if side["cache_salt"] is not None:
        body["cache_salt"] = side["cache_salt"]
    return prompter(kind).chain(parse_json(api, written(body, **how)), isolation=side["isolation"])


def written(body: dict[str, Any], *, backwards: bool = False, spread: bool = False) -> bytes:
    """Return a body with its keys the other way round, or with white space between."""
    if backwards:
        turned = [dict(reversed(m.items())) for m in body.get("messages", [])]
        body = dict(reversed((body | ({"messages": turned} if turned else {})).items()))
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 if spread else 0)


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@given(body=BODIES, one=SIDES, other=SIDES)
@settings(max_examples=150, deadline=None)
def test_requests_that_differ_in_model_salt_or_isolation_share_no_block(
    kind: str, body: tuple[Api, dict[str, Any]], one: dict[str, Any], other: dict[str, Any]
) -> None:
    left, right = (chain(kind, *body, side) for side in (one, other))
    assert left.hashes
    if one == other:
        assert left.hashes == right.hashes
    else:
        assert not set(left.hashes) & set(right.hashes)


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@given(
    body=BODIES,
    side=SIDES,
    more=st.dictionaries(st.sampled_from(sorted(IRRELEVANT)), st.just(0), max_size=4),
    backwards=st.booleans(),
    spread=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_nothing_else_parts_two_requests(  # noqa: PLR0917 - hypothesis hands them by name
    kind: str,
    body: tuple[Api, dict[str, Any]],
    side: dict[str, Any],
    more: dict[str, int],
    backwards: bool,
    spread: bool,
) -> None:
    api, fields = body
    plain = chain(kind, api, fields, side)
    dressed = {**fields, **{name: IRRELEVANT[name] for name in more if name not in fields}}
    other = chain(kind, api, dressed, side, backwards=backwards, spread=spread)
    assert other.hashes == plain.hashes
    assert other.tokens == plain.tokens
