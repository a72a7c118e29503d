"""A head that was seen before is not read again; what the configuration says of it is."""

import hashlib
from pathlib import Path

import pytest

from tests.integration.rig import Client, Rig, chat, eventually, post, running

KEY = "rg-canary-77d2"
ASK = post("/v1/chat/completions", chat(), f"Authorization: Bearer {KEY}", "X-Gateway-Class: chat")


def write(path: Path, key: str, extra: str = "") -> None:
    digest = hashlib.sha256(key.encode()).hexdigest()
    path.write_text(f"keys:\n  - {{name: team, sha256: {digest}{extra}}}\n")


async def ask(client: Client) -> int:
    await client.send(ASK)
    return (await client.answer()).status


async def reloaded(rig: Rig) -> None:
    result = await rig.app.reload()
    assert result.ok


async def test_a_key_that_a_reload_removed_opens_no_known_head(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    write(file, KEY)
    async with running(file=str(file)) as rig:
        client = await rig.connect()
        assert [await ask(client) for _ in range(3)] == [200] * 3

        write(file, "another")
        await reloaded(rig)
        assert [await ask(client) for _ in range(3)] == [401] * 3

        write(file, KEY)
        await reloaded(rig)
        assert [await ask(client) for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("index", range(len(KEY)))
async def test_a_key_that_differs_in_one_character_opens_nothing(
    tmp_path: Path, index: int
) -> None:
    file = tmp_path / "gateway.yaml"
    write(file, KEY)
    async with running(file=str(file)) as rig:
        client = await rig.connect()
        assert [await ask(client) for _ in range(2)] == [200] * 2
        at = ASK.index(KEY.encode()) + index
        await client.send(ASK[:at] + b"~" + ASK[at + 1 :])
        assert (await client.answer()).status == 401


async def test_each_request_of_a_known_head_has_its_own_id_and_body() -> None:
    async with running() as rig:
        client = await rig.connect()
        ids = set()
        for i in range(20):
            text = "x" * (i % 7)
            await client.send(post("/v1/chat/completions", chat(text)))
            answer = await client.answer()
            ids.add(answer.header("x-request-id"))
            assert (
                rig.backends[0].received[-1].body == post("/", chat(text)).partition(b"\r\n\r\n")[2]
            )
            assert rig.backends[0].received[-1].header("x-request-id") in ids
        assert len(ids) == 20
        await eventually(lambda: not rig.app.handler.live)
