"""What docs/clients.md and docs/tls.md show is read by the programs it is for."""

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.load import load
from gateway.edge.http import session_of, sort_headers
from tests.integration.rig import Conn, Received, ok_chat, running

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


async def either(conn: Conn, request: Received) -> None:
    """Answer as the API that was asked."""
    if not request.target.startswith("/v1/messages"):
        await ok_chat(conn, request)
        return
    usage = {"input_tokens": 1, "output_tokens": 1}
    content = [{"type": "text", "text": "ab"}]
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "usage": usage}
    await conn.json({**message, "content": content, "stop_reason": "end_turn"})


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_the_sdks_snippets_print_an_answer(sdk: str) -> None:
    (snippet,) = (text for text in blocks("clients.md", "python") if f"import {sdk}\n" in text)
    async with running(either, models=[["qwen3-coder"]]) as rig:
        here = snippet.replace("http://gateway:8080", rig.app.url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", here),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        told, problem = await process.communicate()
        assert told == b"ab\n", problem.decode()
        assert rig.outcomes() == {"ok": 1}


def test_codexs_file_is_toml_that_names_the_responses_api() -> None:
    (text,) = blocks("clients.md", "toml")
    provider = tomllib.loads(text)["model_providers"]["radixgate"]
    assert provider["wire_api"] == "responses"
    assert provider["base_url"].endswith("/v1")


def test_open_webuis_header_for_the_chat_is_read_as_a_session_and_its_user_handed_on() -> None:
    named = "\n".join(blocks("clients.md", "sh"))
    header = re.findall(r"FORWARD_SESSION_INFO_HEADER_CHAT_ID=(\S+)", named)
    assert len(header) == 1
    user = (b"X-OpenWebUI-User-Id", b"u1")
    picked, forward = sort_headers([(header[0].encode(), b"chat-1"), user])
    assert session_of(picked) == "chat-1"
    assert b"X-OpenWebUI-User-Id: u1\r\n" in forward


def test_the_gateways_blocks_are_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXGATE_ADMIN_KEY", "k")
    ours = [
        text
        for name in ("clients.md", "tls.md", "behind-a-proxy.md")
        for text in blocks(name, "yaml")
        if not {"schema", "scrape_configs"} & set(yaml.safe_load(text))
    ]
    assert len(ours) >= 5
    for number, text in enumerate(ours):
        given: dict[str, Any] = yaml.safe_load(text)
        if not {"models", "backends"} & set(given):
            given["backends"] = [{"url": "http://h:1"}]
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(given))
        load(file, env={})
