"""Exact chains and isolated keys, through the gateway's own listener."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from gateway.core.types import Snapshot
from gateway.errors import NotFound
from tests.integration.rig import Answer, Backend, Rig, chat, eventually, gateway, post, running
from tests.prompt_kit import CHATML, SPECIAL_TOKENS, encode, make_tokenizer

PATH = "/v1/chat/completions"
PROMPT = "the quick brown fox says hello to the world " * 40
KEYS = {name: f"key-of-{name}" for name in ("a", "b")}


def settings(*, isolated: bool) -> tuple[str, ...]:
    keys = [
        f"{{name: {name}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}"
        for name, key in KEYS.items()
    ]
    return (f"keys=[{', '.join(keys)}]", f"index.isolate_keys={str(isolated).lower()}")


def predicted(answer: Answer) -> tuple[int, int]:
    """Return the hit and the prompt tokens that an answer's header tells."""
    assert answer.status == 200
    hit, tokens = (answer.header("x-gateway-prefix") or "").split("/")
    return int(hit), int(tokens)


@pytest.mark.parametrize("isolated", [True, False])
async def test_keys_share_credit_only_if_they_are_not_isolated(isolated: bool) -> None:
    async with running(settings=settings(isolated=isolated)) as rig:

        async def hit(name: str) -> int:
            key = f"Authorization: Bearer {KEYS[name]}"
            return predicted(await rig.ask(post(PATH, chat(PROMPT), key)))[0]

        assert await hit("a") == 0
        assert await hit("a") > 0
        assert (await hit("b") == 0) == isolated
        assert await hit("b") > 0


async def test_an_explanation_tells_the_hits_of_the_key_it_is_asked_for() -> None:
    async with running(settings=settings(isolated=True)) as rig:
        key = f"Authorization: Bearer {KEYS['a']}"
        predicted(await rig.ask(post(PATH, chat(PROMPT), key)))

        async def hit(name: str | None) -> int:
            told = await rig.handler.explain(orjson.dumps(chat(PROMPT)), PATH, name)
            return int(told.backends[0].hit_tokens)

        assert await hit("a") > 0
        assert await hit("b") == await hit(None) == 0
        with pytest.raises(NotFound):
            await hit("nobody")


@asynccontextmanager
async def exact(place: Path) -> AsyncIterator[Rig]:
    """Run a gateway whose model has a tokenizer."""
    make_tokenizer().save(str(place / "tokenizer.json"))
    config = {**SPECIAL_TOKENS, "chat_template": CHATML}
    (place / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    backend = await Backend().start()
    model = f"models=[{{name: m, tokenizer: {place}, backends: [{{name: x, url: {backend.url}}}]}}]"
    try:
        async with gateway([], (model,), None, None) as rig:
            yield rig
    finally:
        await backend.stop()


async def test_prompt_is_counted_in_the_engines_tokens(tmp_path: Path) -> None:
    async with exact(tmp_path) as rig:
        text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        assert predicted(await rig.ask(post(PATH, chat(PROMPT)))) == (0, len(encode(text)))
        hit, tokens = predicted(await rig.ask(post(PATH, chat(PROMPT))))
        assert tokens - 16 < hit <= tokens


async def test_another_block_size_is_followed_and_old_prefixes_are_forgotten(
    tmp_path: Path,
) -> None:
    async with exact(tmp_path) as rig:
        await rig.ask(post(PATH, chat(PROMPT)))
        now = rig.handler.clock()
        core = rig.app.dispatcher
        core.observe("x", Snapshot(at=now, block_tokens=64), now)
        await eventually(lambda: rig.handler.prompters["m"].block_tokens_of("m") == 64)
        assert predicted(await rig.ask(post(PATH, chat(PROMPT))))[0] == 0
        hit, tokens = predicted(await rig.ask(post(PATH, chat(PROMPT))))
        assert hit == tokens // 64 * 64
