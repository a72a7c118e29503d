"""A gateway that is started again knows what its backends hold; what it keeps is its owner's alone."""

import asyncio
import logging
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.state import Writer
from tests.integration.rig import (
    Backend,
    Conn,
    Received,
    Rig,
    chat,
    eventually,
    gateway,
    ok_chat,
    post,
)
from tests.integration.serve_rig import WAIT_S, Served, served

CHAT = "/v1/chat/completions"
SECRET = "nobody may ever read this "
PROMPT = post(CHAT, chat(SECRET * 400))


class Engine(Backend):
    """A backend that says which process it is."""

    born = 1000.0

    async def _builtin(self, conn: Conn, request: Received) -> bool:
        if request.target == "/metrics":
            page = (
                f"process_start_time_seconds {self.born}\n"
                'vllm:num_requests_running{engine="0"} 0\n'
                'vllm:num_requests_waiting{engine="0"} 0\n'
            )
            await conn.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"
                % (len(page), page.encode())
            )
            return True
        return await super()._builtin(conn, request)


@asynccontextmanager
async def engines(count: int = 2) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            engine = Engine(ok_chat)
            await engine.start()
            stack.push_async_callback(engine.stop)
            made.append(engine)
        yield made


@asynccontextmanager
async def run(made: list[Engine], path: Path, *settings: str) -> AsyncIterator[Rig]:
    backends: list[Backend] = [*made]
    async with gateway(backends, (f"state.path={path}", *settings), None, None) as rig:
        shown = rig.app.dispatcher.backends
        await eventually(lambda: all(b.snapshot_age_s is not None for b in shown(0.0)), 20.0)
        yield rig


def names(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir()]


def held(rig: Rig) -> dict[str, int]:
    return {b.name: b.index_blocks for b in rig.app.dispatcher.backends(0.0)}


async def test_the_next_process_knows_who_holds_what(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with engines() as made:
        async with run(made, path) as rig:
            first = await rig.ask(PROMPT)
            assert first.status == 200
            before = held(rig)
        assert sorted(map(bool, before.values())) == [False, True]
        async with run(made, path) as rig:
            assert held(rig) == before
            for _ in range(3):
                again = await rig.ask(PROMPT)
                assert again.header("x-gateway-backend") == first.header("x-gateway-backend")
                assert not again.header(
                    "x-gateway-prefix",
                ).startswith("0/")  # type: ignore[union-attr]


async def test_a_backend_that_was_restarted_meanwhile_is_cold(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with engines() as made:
        async with run(made, path, "routing.policy=round_robin") as rig:
            for _ in range(2):
                assert (await rig.ask(PROMPT)).status == 200
            assert all(held(rig).values())
        made[0].born += 60.0
        async with run(made, path) as rig:
            assert held(rig)["backend-1"] == 0 < held(rig)["backend-2"]


async def test_a_backend_that_comes_later_gets_its_part_then(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with engines() as made:
        async with run(made, path, "routing.policy=round_robin") as rig:
            for _ in range(2):
                assert (await rig.ask(PROMPT)).status == 200
            before = held(rig)
        await made[0].stop()
        async with gateway([*made], (f"state.path={path}",), None, None) as rig:
            assert held(rig) == {**before, "backend-1": 0}
            await made[0].start()
            await eventually(lambda: held(rig) == before, 20.0)


async def test_the_operators_drain_outlives_the_restart(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with engines() as made:
        async with run(made, path) as rig:
            rig.app.dispatcher.drain("backend-2")
        made[1].born += 60.0
        async with run(made, path) as rig:
            assert [b.draining for b in rig.app.dispatcher.backends(0.0)] == [False, True]


async def test_the_file_is_its_owners_alone_and_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "state"
    mask = os.umask(0)
    try:
        async with engines() as made, run(made, path) as rig:
            assert (await rig.ask(PROMPT)).status == 200
            assert await rig.app._state.save()
            raw = path.read_bytes()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(mask)
    assert names(tmp_path) == ["state"]
    assert len(raw) > 200
    for word in SECRET.split():
        assert word.encode() not in raw


async def test_a_file_that_cannot_be_used_is_one_line_and_a_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    async with engines(1) as made:
        async with run(made, path) as rig:
            assert (await rig.ask(PROMPT)).status == 200
        salt = rig.app._state.salt
        path.write_bytes(path.read_bytes()[:-20])
        caplog.clear()
        with caplog.at_level(logging.INFO, "radixgate.state"):
            async with run(made, path) as rig:
                assert held(rig) == {"backend-1": 0}
                assert rig.app._state.salt != salt
                lines = [r for r in caplog.records if r.name == "radixgate.state"]
                assert [r.levelname for r in lines] == ["WARNING"]
                assert str(path) in lines[0].getMessage()


async def test_without_a_path_nothing_is_written_and_without_a_directory_nothing_starts(
    tmp_path: Path,
) -> None:
    async with engines(1) as made:
        async with gateway([*made], (), None, None) as rig:
            assert not await rig.app._state.save()
        with pytest.raises(FileNotFoundError, match=r"state\.path"):
            async with run(made, tmp_path / "none" / "state"):
                pass


async def test_a_write_that_fails_leaves_the_last_file_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    async with engines(1) as made, run(made, path) as rig:
        assert await rig.app._state.save()
        before = path.read_bytes()

        def full(_self: Writer, _piece: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "add", full)
            assert not await rig.app._state.save()
            assert not await rig.app._state.save()
        assert path.read_bytes() == before
        assert names(tmp_path) == ["state"]
        assert [r.name for r in caplog.records if "not saved" in r.getMessage()] == [
            "radixgate.state"
        ]
        assert await rig.app._state.save()


async def test_it_is_written_now_and_then_without_any_end(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with engines(1) as made, run(made, path, "state.interval_s=1"):
        await eventually(path.exists, 20.0)


async def test_a_reload_moves_the_file_and_changes_its_pace(tmp_path: Path) -> None:
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "g.yaml"

    def text(path: Path, interval_s: int) -> str:
        return f"state: {{path: {path}, interval_s: {interval_s}}}\n"

    async with engines(1) as made:
        file.write_text(text(first, 3600))
        async with gateway([*made], (), str(file), None) as rig:
            assert not first.exists()
            file.write_text(text(second, 1))
            result = await rig.app.reload()
            assert (result.ok, result.needs_restart) == (True, ())
            await eventually(second.exists, 20.0)
            file.write_text(text(tmp_path / "none" / "state", 1))
            assert not (await rig.app.reload()).ok
            assert await rig.app._state.save()
            file.write_text("debug_headers: true\n")
            assert (await rig.app.reload()).ok
            assert not await rig.app._state.save()
        assert not first.exists()


async def test_what_a_killed_gateway_left_half_written_goes(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".state.1.tmp", tmp_path / ".state.2.tmp"
    for draft in (old, fresh):
        draft.write_bytes(b"x")
    long_ago = time.time() - 3600  # noqa: TID251 - a file's date
    os.utime(old, (long_ago, long_ago))
    async with engines(1) as made, run(made, tmp_path / "state"):
        assert (old.exists(), fresh.exists()) == (False, True)


async def told(process: Served, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until something holds for every backend that the process shows."""
    async with asyncio.timeout(WAIT_S):
        while True:
            models: Any = (await process.admin_json("/status"))["models"]
            rows = [row for model in models for row in model["backends"]]
            if len(rows) == len(process.backends) and all(map(holds, rows)):
                return
            await asyncio.sleep(0.02)


async def test_a_process_that_is_told_to_end_writes_it_and_the_next_reads_it(
    tmp_path: Path,
) -> None:
    options = ("--set", f"state.path={tmp_path / 'state'}", "--set", "timeouts.drain_delay_s=0")
    async with engines() as made:
        backends: list[Backend] = [*made]
        async with served(*options, backends=backends) as one:
            first = await one.ask(PROMPT)
            await told(one, lambda row: row["snapshot_age_s"] is not None)  # who they are, is saved
            one.signal()
            assert await one.ended() == 0
        async with served(*options, backends=backends) as two:
            home = first.header("x-gateway-backend")
            await told(two, lambda row: row["name"] != home or bool(row["index_blocks"]))
            again = await two.ask(PROMPT)
            assert again.header("x-gateway-backend") == first.header("x-gateway-backend")
            assert not (again.header("x-gateway-prefix") or "0/").startswith("0/")
            two.signal()
            assert await two.ended() == 0
        assert any("backend-" in line and "saved state holds" in line for line in two.log)
