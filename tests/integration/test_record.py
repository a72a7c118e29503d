"""`record:` of a running gateway: every request leaves a line that `replay` reads, and no text."""

from pathlib import Path

import orjson

from gateway.cli.main import main
from tests.integration.rig import chat, ok_chat, post, running

SECRET = "the colour of the door is unremarkable " * 60


async def test_requests_are_recorded_without_their_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with running(ok_chat, settings=(f"record={path}",)) as rig:
        for number in range(3):
            body = chat(SECRET + str(number), stream=True)
            assert (await rig.ask(post("/v1/chat/completions", body))).status == 200
        await rig.at_rest()

    raw = path.read_bytes()
    rows = [orjson.loads(text) for text in raw.splitlines()]
    assert [row["outcome"] for row in rows] == ["ok"] * 3
    assert rows[0]["timestamp"] <= rows[1]["timestamp"] <= rows[2]["timestamp"]
    assert len({tuple(row["hash_ids"][:-1]) for row in rows}) == 1  # a common beginning
    assert rows[0]["output_length"] == 2
    assert b"colour" not in raw
    assert main(["replay", str(path), "--rate", "1", "--policy", "cost", "--jobs", "1"]) == 0


async def test_what_a_bucket_refused_is_traffic_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    limited = (
        "classes.chat.default=true",
        "classes.chat.bucket.tokens_per_second=0.001",
        "classes.chat.bucket.burst_tokens=1",
    )
    async with running(ok_chat, settings=(f"record={path}", *limited)) as rig:
        first = await rig.ask(post("/v1/chat/completions", chat(SECRET)))
        second = await rig.ask(post("/v1/chat/completions", chat(SECRET)))
        assert {first.status, second.status} >= {429}
        await rig.at_rest()

    outcomes = [orjson.loads(text)["outcome"] for text in path.read_bytes().splitlines()]
    assert len(outcomes) == 2
    assert "rejected_rate" in outcomes


async def test_without_record_there_is_no_recorder() -> None:
    async with running(ok_chat) as rig:
        await rig.ask(post("/v1/chat/completions", chat(SECRET)))
        assert rig.handler.recorder is None
