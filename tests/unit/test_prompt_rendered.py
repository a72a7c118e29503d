"""Requests rendered as vLLM 0.32 rendered them: its own text, recorded, for five template habits."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.request import parse_json
from gateway.core.types import Api
from gateway.prompt.chat import conversation
from gateway.prompt.template import ChatTemplate
from tests.prompt_kit import SPECIAL_TOKENS, TEMPLATES

RECORDED = Path(__file__).parents[1] / "samples" / "vllm-0.32" / "rendered.json"
APIS = {"chat": Api.CHAT, "messages": Api.MESSAGES, "responses": Api.RESPONSES}
CASES: list[dict[str, Any]] = orjson.loads(RECORDED.read_bytes())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['template']}-{case['api']}")
def test_prompt_is_the_engines_own(case: dict[str, Any]) -> None:
    template = ChatTemplate(TEMPLATES[case["template"]], SPECIAL_TOKENS)
    request = parse_json(APIS[case["api"]], orjson.dumps({"model": "m", **case["body"]}))
    chat = conversation(
        request,
        merges_system=template.merges_system,
        disabled_effort=template.disabled_effort,
    )
    assert template.render(chat) == case["text"]


def test_every_api_and_template_is_recorded() -> None:
    assert {(case["api"], case["template"]) for case in CASES} == {
        (api, name) for api in APIS for name in TEMPLATES
    }
