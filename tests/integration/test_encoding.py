"""A request whose prompt is encoded off the loop: the phase before admission, and every way out."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.chain import chain_tokens
from gateway.core.prompter import BytePrompter, PendingChain
from gateway.core.request import ParsedRequest
from gateway.core.types import Chain
from gateway.prompt.engines import CANDIDATES, load_encoder
from gateway.prompt.jobs import BUSY, EncodeJob
from gateway.prompt.pool import EncoderPool, Encodes, PoolBehind
from gateway.prompt.reference import Reference
from tests.integration.rig import Rig, chat, eventually, ok_chat, post, running
from tests.tokenizer_kit import write_tokenizer

PATH = "/v1/chat/completions"


class Gated:
    """One token per letter, when the test lets it."""

    chars_per_s = 1e6

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def encode(self, text: str) -> "array[int]":
        self.begun.release()
        assert self.go.wait(20)
        return array("I", map(ord, text))

    async def at_work(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)


Finish = Callable[["Sequence[array[int]]"], Chain]


def finish(ids: "Sequence[array[int]]") -> Chain:
    return Chain(chain_tokens(ids[0], 1, 16), 16, len(ids[0]), exact=True)


def broken(_: "Sequence[array[int]]") -> Chain:
    raise RuntimeError("a fault of ours")


class Everything(BytePrompter):
    """Encodes the whole body of every request off the loop."""

    def __init__(self, pool: EncoderPool, encoder: Encodes, count: Callable[[str], None]) -> None:
        super().__init__(1)
        self._pool = pool
        self._encoder = encoder
        self._count = count
        self.models: list[str | None] = []
        self.learnt: list[int] = []
        self.finish: Finish = finish

    def start(  # type: ignore[override] # a BytePrompter has nothing to wait for
        self, request: ParsedRequest, *, isolation: str = "", cls: str = ""
    ) -> Chain | PendingChain:
        self.models.append(request.model)
        text = orjson.dumps(request.data).decode()
        by_bytes = super().chain(request, isolation=isolation, cls=cls)

        def give_up(reason: str) -> Chain:
            self._count(reason)
            return by_bytes

        return EncodeJob(self._pool, self._encoder, [text], self.finish, give_up)

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        super().learn(model, cls, chain, prompt_tokens)
        self.learnt.append(chain.tokens)


@asynccontextmanager
async def encoding(
    encoder: Encodes, pool: EncoderPool | None = None, **options: Any
) -> AsyncIterator[tuple[Rig, EncoderPool, Everything]]:
    pool = pool or EncoderPool(threads=1)
    async with running(**options) as rig:
        prompter = Everything(pool, encoder, rig.app.telemetry.fallback)
        rig.handler._default_prompter = prompter
        try:
            yield rig, pool, prompter
        finally:
            pool.close()


def exact_count(body: object) -> int:
    return len(orjson.dumps(body))


async def test_a_request_goes_on_when_its_prompt_is_encoded() -> None:
    encoder, body = Gated(), chat("hello")
    async with encoding(encoder) as (rig, _, prompter):
        client = await rig.connect()
        await client.send(post(PATH, body))
        await encoder.at_work()
        assert rig.backends[0].received == []
        assert len(rig.handler.live) == 1
        encoder.go.set()
        answer = await client.answer()

        assert answer.status == 200
        assert answer.header("x-gateway-prefix") == f"0/{exact_count(body)}"
        assert prompter.learnt == [exact_count(body)]
        await rig.at_rest()
        assert rig.outcomes() == {"ok": 1}


async def test_other_requests_pass_while_one_is_encoded() -> None:
    encoder = Gated()
    async with encoding(encoder) as (rig, _, _prompter):
        slow = await rig.connect()
        await slow.send(post(PATH, chat("slow")))
        await encoder.at_work()
        rig.handler._default_prompter = BytePrompter(1)

        assert (await rig.ask(post(PATH, chat("quick")))).status == 200
        encoder.go.set()
        assert (await slow.answer()).status == 200


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    encoder = Gated()
    async with encoding(encoder) as (rig, pool, _):
        running_, queued = await rig.connect(), await rig.connect()
        for client in (running_, queued):
            await client.send(post(PATH, chat("x")))
        await encoder.at_work()
        await eventually(lambda: pool.jobs == 2)
        for client in (running_, queued):
            client.reset()
        await rig.settled()

        assert rig.outcomes() == {"client_closed": 2}
        assert pool.jobs == 1
        encoder.go.set()
        await eventually(lambda: pool.jobs == 0)
        assert rig.backends[0].received == []
        assert not [t for t in asyncio.all_tasks() if t.get_name() == "encode"]
        await rig.at_rest()


async def test_a_pool_that_is_behind_routes_by_bytes_and_is_counted() -> None:
    encoder = Gated()
    pool = EncoderPool(threads=1, max_wait_s=0.0)
    async with encoding(encoder, pool) as (rig, _, _prompter):
        first = await rig.connect()
        await first.send(post(PATH, chat("first")))
        await encoder.at_work()
        second = await rig.ask(post(PATH, chat("second")))

        assert second.status == 200
        assert second.header("x-gateway-prefix") != f"0/{exact_count(chat('second'))}"
        assert rig.metric("gateway_fallback_total", reason=BUSY) == 1
        encoder.go.set()
        assert (await first.answer()).status == 200
        assert rig.metric("gateway_fallback_total") == 1


async def test_the_total_time_runs_while_a_prompt_is_encoded() -> None:
    encoder = Gated()
    async with encoding(encoder, settings=("timeouts.total_s=0.2",)) as (rig, pool, _):
        answer = await rig.ask(post(PATH, chat("x")))

        assert (answer.status, answer.code) == (504, "upstream_timeout")
        encoder.go.set()
        await eventually(lambda: pool.jobs == 0)
        await rig.at_rest()


async def test_shutting_down_ends_a_request_that_is_encoded() -> None:
    encoder = Gated()
    async with encoding(encoder) as (rig, _, _prompter):
        client = await rig.connect()
        await client.send(post(PATH, chat("x")))
        await encoder.at_work()
        rig.app.hurry()
        answer = await client.answer()

        assert (answer.status, answer.code) == (503, "draining")
        encoder.go.set()


async def test_a_fault_in_a_prompter_costs_one_request() -> None:
    encoder = Gated()
    encoder.go.set()
    async with encoding(encoder) as (rig, _, prompter):
        prompter.finish = broken
        answer = await rig.ask(post(PATH, chat("x")))
        assert (answer.status, rig.outcomes()) == (500, {"internal_error": 1})

        rig.handler._default_prompter = BytePrompter(1)
        assert (await rig.ask(post(PATH, chat("x")))).status == 200
        assert len(prompter.models) == 1


async def test_a_large_body_is_parsed_and_then_encoded_apart() -> None:
    encoder, body = Gated(), chat("y" * 1_200_000)
    encoder.go.set()
    async with encoding(encoder) as (rig, _, _prompter):
        answer = await rig.ask(post(PATH, body))

        assert answer.status == 200
        assert (answer.header("x-gateway-prefix") or "").endswith(f"/{exact_count(body)}")
        assert orjson.loads(rig.backends[0].received[0].body) == body


async def test_an_alias_is_chained_under_its_models_name_and_edited_after_the_wait(
    tmp_path: Path,
) -> None:
    encoder = Gated()
    encoder.go.set()
    file = tmp_path / "gateway.yaml"
    async with running(ok_chat) as plain:
        row = {"name": "a", "url": plain.backends[0].url}
        model = {"name": "m", "aliases": ["coder"], "backends": [row]}
        file.write_bytes(orjson.dumps({"models": [model]}))
        async with encoding(encoder, file=str(file)) as (rig, _, prompter):
            answer = await rig.ask(post(PATH, {**chat("x"), "model": "coder"}))

            assert answer.status == 200
            assert prompter.models == ["m"]
            assert orjson.loads(plain.backends[0].received[0].body)["model"] == "m"


async def test_explain_waits_for_the_encoding_too() -> None:
    encoder = Gated()
    encoder.go.set()
    async with encoding(encoder) as (rig, _, _prompter):
        told = await rig.handler.explain(orjson.dumps(chat("x")), PATH)

        assert told.prompt_tokens == exact_count(chat("x"))


async def test_a_configured_tokenizer_encodes_long_prompts_off_the_loop(tmp_path: Path) -> None:
    tokenizer = write_tokenizer("llama3", tmp_path)
    prompt = "def parse(self, line):\n    return line.split()\n" * 1_000
    exact = len(Reference(tokenizer).encode_special(prompt))
    body = {"model": "m", "prompt": prompt}
    async with running(ok_chat) as plain:
        row = {"name": "a", "url": plain.backends[0].url}
        model = {"name": "m", "tokenizer": str(tokenizer), "backends": [row]}
        file = tmp_path / "gateway.yaml"
        file.write_bytes(orjson.dumps({"models": [model]}))
        async with running(file=str(file)) as rig:
            pool = rig.app._tokenizers._pool
            assert pool is not None
            first, again = [await rig.ask(post("/v1/completions", body)) for _ in range(2)]
            prompter = rig.handler.prompter("m")
            assert (await rig.app.reload()).ok

            assert first.header("x-gateway-prefix") == f"0/{exact}"
            assert again.header("x-gateway-prefix") == f"{exact // 16 * 16}/{exact}"
            assert rig.handler.prompter("m") is prompter
            assert pool.jobs == 0
    with pytest.raises(PoolBehind):  # closed with the gateway
        await pool.encode(Gated(), ["x"])


@pytest.mark.parametrize("name", [*CANDIDATES, "tokenizers"])
async def test_a_megabyte_is_encoded_while_the_loop_turns(name: str, tmp_path: Path) -> None:
    """Counted in turns of the loop, so that a slow machine changes nothing."""
    candidates = {key: CANDIDATES[key] for key in CANDIDATES if key == name}
    encoder = load_encoder(write_tokenizer("qwen", tmp_path), candidates)
    assert encoder.name == name
    text = "".join(f"def f_{n}(x, y={n}):\n    return x * {n * 7919} + y\n" for n in range(20_000))
    pool, turns, begun = EncoderPool(threads=1), 0, asyncio.Event()

    async def encode() -> int:
        begun.set()
        ids = await pool.encode(encoder, [text])
        return len(ids[0])

    task = asyncio.ensure_future(encode())
    await begun.wait()
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    pool.close()

    assert len(text) > 900_000
    assert await task > 100_000
    assert turns > 100
