"""What a request costs its class and makes the gateway believe: only what an engine computes."""

import orjson
import pytest

from tests.integration.rig import Conn, Received, Rig, black_hole, chat, eventually, post, running

TEXT = "word " * 4800  # 24 KB
MESSAGES = chat(TEXT)
BURST = 100_000
LIMITED = (
    "classes.chat.default=true",
    "classes.chat.bucket.tokens_per_second=0.001",
    f"classes.chat.bucket.burst_tokens={BURST}",
)
TOKENIZER = (
    ("/tokenize", MESSAGES),
    ("/tokenize", {"model": "m", "prompt": TEXT}),
    ("/detokenize", {"model": "m", "tokens": list(range(6000))}),
    ("/v1/messages/count_tokens", MESSAGES),
)


def spent(rig: Rig) -> int:
    levels = {c.name: c.bucket_tokens for c in rig.handler.dispatcher.classes(rig.handler.clock())}
    return BURST - int(levels["chat"] + 0.5)


async def hits(rig: Rig, path: str, body: object) -> list[int]:
    told = await rig.handler.explain(orjson.dumps(body), path)
    return [row.hit_tokens for row in told.backends]


async def silent(conn: Conn, _: Received) -> None:
    await conn.gone()


async def counted(conn: Conn, _: Received) -> None:
    await conn.json({"count": 4801, "input_tokens": 4801, "tokens": [1, 2, 3]})


async def broken(conn: Conn, _: Received) -> None:
    conn.reset()


@pytest.mark.parametrize(("path", "body"), TOKENIZER)
async def test_a_tokenizer_request_spends_nothing_and_is_believed_to_cache_nothing(
    path: str, body: object
) -> None:
    async with running(counted, counted, settings=LIMITED) as rig:
        answer = await rig.ask(post(path, body))

        assert answer.status == 200
        hit, _, prompt = (answer.header("x-gateway-prefix") or "").partition("/")
        assert (hit, int(prompt) > 1000) == ("0", True)
        assert spent(rig) == 0
        for asked in ("/v1/chat/completions", "/v1/completions"):
            assert await hits(rig, asked, {**MESSAGES, "prompt": TEXT}) == [0, 0]
        assert await hits(rig, path, body) == [0, 0]
        assert rig.metric("gateway_prompt_tokens_total") == 0
        assert rig.outcomes() == {"ok": 1}
        await rig.at_rest()


async def test_an_embedding_is_a_prefill_and_booked_as_one() -> None:
    async with running(counted, settings=LIMITED) as rig:
        body = {"model": "m", "input": TEXT}
        await rig.ask(post("/v1/embeddings", body))
        await rig.settled()

        assert (await hits(rig, "/v1/embeddings", body))[0] > 5000
        assert spent(rig) > 5000


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_pays_for_its_prompt(
    *, stream: bool
) -> None:
    async with running(silent, settings=LIMITED) as rig:
        client = await rig.connect()
        await client.send(post("/v1/chat/completions", chat(TEXT, stream=stream)))
        await eventually(lambda: bool(rig.backends[0].received))
        reserved = spent(rig)
        client.reset()
        await rig.settled()

        told = await rig.handler.explain(orjson.dumps(MESSAGES), "/v1/chat/completions")
        prompt = told.prompt_tokens
        assert rig.outcomes() == {"client_closed": 1}
        assert (reserved, spent(rig)) == (prompt + 250, prompt)


async def test_a_client_that_leaves_while_its_backend_is_still_being_reached_pays_nothing() -> None:
    async with running(silent, settings=LIMITED) as rig:
        with black_hole(rig):
            client = await rig.connect()
            await client.send(post("/v1/chat/completions", MESSAGES))
            await eventually(lambda: bool(rig.handler.live))
            assert spent(rig) > 0
            client.reset()
            await rig.settled()

        assert rig.outcomes() == {"client_closed": 1}
        assert spent(rig) == 0


async def test_a_backend_that_breaks_off_costs_its_client_nothing() -> None:
    async with running(broken, settings=LIMITED) as rig:
        answer = await rig.ask(post("/v1/chat/completions", MESSAGES))
        await rig.settled()

        assert answer.status == 502
        assert spent(rig) == 0
