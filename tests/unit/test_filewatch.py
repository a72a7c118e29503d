"""A file's change is noticed by its stamp, and only when it has settled."""

import asyncio
from pathlib import Path

import pytest

from gateway import filewatch
from gateway.config.discovery import ReloadConfig
from gateway.filewatch import FileWatch, Stamp, stamp_of
from gateway.reloaded import ConfigFile


class Stamps:
    """Plays one stamp after another, as the file's at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stamps: int | None) -> None:
        self.left = [None if stamp is None else (stamp,) for stamp in stamps]
        monkeypatch.setattr(filewatch, "stamp_of", self)

    def __call__(self, _: str) -> Stamp:
        return self.left.pop(0)


def _watch() -> FileWatch:
    return FileWatch("/f", lambda: 0.0)


async def test_a_change_is_told_once_it_looked_the_same_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamps = Stamps(monkeypatch, 1, 1, 1, 2, 3, 4, 4, 4, 5, 5)
    watch = _watch()
    await watch.take()
    await watch.changed()
    assert stamps.left == [(4,), (5,), (5,)]
    await watch.changed()
    assert stamps.left == []


async def test_what_is_taken_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = Stamps(monkeypatch, 1, 2, 2, 3, 3)
    watch = _watch()
    await watch.take()
    await watch.take()  # a reload by hand read the second
    await watch.changed()
    assert stamps.left == []


async def test_a_file_that_goes_and_comes_back_is_a_change_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamps = Stamps(monkeypatch, 1, None, None, 1, 1)
    watch = _watch()
    await watch.take()
    await watch.changed()
    await watch.changed()
    assert stamps.left == []


async def test_a_change_that_is_taken_back_before_it_settled_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamps = Stamps(monkeypatch, 1, 2, 1, 1, 3, 3)
    watch = _watch()
    await watch.take()
    await watch.changed()
    assert stamps.left == []


def test_a_replaced_file_has_another_stamp_even_if_it_is_as_long(tmp_path: Path) -> None:
    file, other = tmp_path / "f", tmp_path / "g"
    file.write_text("one")
    before = stamp_of(str(file))
    other.write_text("two")
    other.replace(file)

    assert stamp_of(str(file)) != before
    assert stamp_of(str(tmp_path / "none")) is None


async def test_a_file_that_is_not_watched_reloads_nothing_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0
    reloaded = asyncio.Event()

    def settings() -> ReloadConfig:
        nonlocal asked
        asked += 1
        return ReloadConfig(watch=asked > 10, interval_s=0.01)

    async def reload() -> None:
        reloaded.set()

    stamps = Stamps(monkeypatch, 1, 2, 2)
    file = ConfigFile("/f", settings)
    await file.take()
    following = asyncio.ensure_future(file.follow(reload))
    await asyncio.wait_for(reloaded.wait(), 60)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)

    assert asked > 10  # the file was not even looked at before
    assert stamps.left == []


async def test_without_a_file_there_is_nothing_to_follow() -> None:
    file = ConfigFile(None, ReloadConfig)
    await file.take()
    await file.follow(asyncio.Event().wait)
