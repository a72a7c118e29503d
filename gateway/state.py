"""The state file: what a gateway knows of its backends' caches and speeds, over a restart.

Hashes and numbers, and the salt without which the hashes mean nothing: whoever has both can test a
guess of a prompt, so the file is its owner's alone (0600). Written to a second file and renamed, so
that there is always a whole one. Must never hold up the loop, nor be needed to serve: what cannot
be read is one line in the log and a cold start.
"""

import asyncio
import contextlib
import errno
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from time import time  # noqa: TID251 - the file is dated for another process
from typing import BinaryIO, Final, Self

import msgspec
from xxhash import xxh3_64_digest

from gateway.config.schema import Config
from gateway.config.state import StateConfig
from gateway.core.prompter import BytePrompter
from gateway.core.queued import QueuedDispatcher
from gateway.core.restore import Restoration, Saved, SavedFault
from gateway.core.saved import VERSION, Way

_log = logging.getLogger("radixgate.state")
_MAGIC: Final = b"radixgate state\n"
_LENGTH_BYTES, _SUM_BYTES = 4, 8
_OTHERS_BYTES: Final = 64 * 1024 * 1024  # beside the index: conversations, names, speeds
_AHEAD_S: Final = 60.0  # clocks of two hosts differ; a file from further ahead is not fresh
_LOOK_S: Final = 0.02  # between two looks whether a backend has told who it is
_LEFT_OVER_S: Final = 600.0  # a half-written file this old is nobody's any more


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The first piece. `clock` is the writer's, at `written_at` seconds since 1970."""

    version: int
    byteorder: str
    written_at: float
    clock: float
    salt: int


class Writer:
    """A state file being written; nobody sees it before `commit`. Calls may come from any thread.

    Raises:
        OSError: from every method but `discard`.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # a rename would replace even /dev/null
            raise FileExistsError(errno.EEXIST, "something else than a file is there", str(path))
        self._path = path
        self._draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(self._draft, flags, 0o600)
        self._file: BinaryIO = os.fdopen(fd, "wb")
        os.fchmod(fd, 0o600)  # of one that was left over, too
        self._file.write(_MAGIC)

    def add(self, piece: bytes) -> None:
        """Write a piece."""
        self._file.write(len(piece).to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(xxh3_64_digest(piece))
        self._file.write(piece)

    def commit(self) -> None:
        """Put the file in the place of the last one."""
        self._file.write(bytes(_LENGTH_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._path)

    def discard(self) -> None:
        """Leave the last one where it is."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._draft.unlink()


def pieces_of(raw: bytes) -> Iterator[bytes]:
    """Yield the pieces of a file's content.

    Raises:
        SavedFault: it is cut off or spoilt.
    """
    if not raw.startswith(_MAGIC):
        raise SavedFault("it is no state file")
    at = len(_MAGIC)
    view = memoryview(raw)
    while True:
        if at + _LENGTH_BYTES > len(raw):
            raise SavedFault("it is cut off")
        length = int.from_bytes(view[at : at + _LENGTH_BYTES], "little")
        if not length:
            return
        start = at + _LENGTH_BYTES + _SUM_BYTES
        at = start + length
        piece = bytes(view[start:at])
        if len(piece) < length:
            raise SavedFault("it is cut off")
        if xxh3_64_digest(piece) != view[start - _SUM_BYTES : start]:
            raise SavedFault("it is spoilt")
        yield piece


def read(path: Path, max_age_s: float, most_bytes: int) -> tuple[Head, Saved] | None:
    """Return what a file has, if there is one.

    Raises:
        OSError: it cannot be read.
        SavedFault: it is no such file, spoilt, of another version or too old.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
        raise SavedFault("it is no file of ours, or larger than index.max_mib allows")
    pieces = pieces_of(path.read_bytes())
    try:
        head = msgspec.msgpack.decode(next(pieces, b""), type=Head)
    except msgspec.MsgspecError as error:
        raise SavedFault("it is another version's") from error
    if head.version != VERSION or head.byteorder != sys.byteorder:
        raise SavedFault("it is another version's")
    age_s = time() - head.written_at
    if not -_AHEAD_S <= age_s <= max_age_s:
        raise SavedFault(f"it is {age_s:.0f} s old (state.max_age_s: {max_age_s:g})")
    return head, Saved(pieces)


class State:
    """The state of one gateway: read at the start, written now and then and at the end.

    `salt` is what prompts are hashed with: the file's, or a new one. Without a path only that.
    """

    def __init__(self, config: StateConfig, clock: Callable[[], float]) -> None:
        self.salt = int.from_bytes(os.urandom(8), "little")
        self._path = None if config.path is None else Path(config.path)
        self._config = config
        self._clock = clock
        self._found: tuple[Head, Saved] | None = None
        self._restoration: Restoration | None = None
        self._saving = asyncio.Lock()
        self._changed = asyncio.Event()
        self._opened_at = clock()
        self._failed = False

    @classmethod
    async def open(cls, config: Config, clock: Callable[[], float]) -> Self:
        """Read the file, if one is configured.

        Raises:
            OSError: there is no directory for it.
        """
        state = cls(config.state, clock)
        if state._path is not None:
            most = config.index.max_mib * 1024 * 1024 + _OTHERS_BYTES
            await asyncio.to_thread(state._read, state._path, most)
        return state

    @staticmethod
    def check(config: StateConfig) -> None:
        """Fail if there is no place for the file.

        Raises:
            FileNotFoundError: there is no directory for it.
        """
        if config.path is not None and not Path(config.path).parent.is_dir():
            raise FileNotFoundError(f"state.path: no directory {Path(config.path).parent}")

    def apply(self, config: StateConfig) -> None:
        """Write where and when `config` says from now on; the salt stays what it is."""
        if config != self._config:
            self._config = config
            self._path = None if config.path is None else Path(config.path)
            self._changed.set()

    def attach(self, dispatcher: QueuedDispatcher, by_bytes: BytePrompter, way: Way) -> None:
        """Give what was read to those it is for; `step` does the rest."""
        self._dispatcher, self._by_bytes, self._way = dispatcher, by_bytes, way
        if self._found is None:
            return
        head, saved = self._found
        self._found = None
        age_s = max(0.0, time() - head.written_at)
        shift = self._clock() - age_s - head.clock
        by_bytes.restore(saved.ratios)
        self._restoration = dispatcher.restoration(saved, way, shift)

    def step(self) -> bool:
        """Believe a slice of what can be believed now; return whether there is more.

        Takes a millisecond or two. What a backend has not come back for in `max_age_s` is void.
        """
        restoration = self._restoration
        if restoration is None:
            return False
        if restoration.step():
            return True
        overdue = self._clock() - self._opened_at > self._config.max_age_s
        if overdue or not restoration.waiting:
            self._restoration = None
        return False

    async def settle(self, within_s: float, *, wait: bool = False) -> None:
        """Believe what can be believed now; `wait` = also what backends that are up will tell.

        Returns after `within_s` in any case; call it again for the rest.
        """
        restoration, until = self._restoration, self._clock() + within_s
        if restoration is None:
            return
        before = len(restoration.waiting)
        while self._clock() < until:
            if self.step():
                await asyncio.sleep(0)
            elif wait and restoration.awaits:
                await asyncio.sleep(_LOOK_S)
            else:
                break
        if restoration.idle and len(restoration.waiting) < before:
            standing = (restoration.restored, restoration.dropped, restoration.waiting)
            names = [", ".join(names) or "none" for names in standing]
            _log.info("the saved state holds for: %s; not for: %s; still to come: %s", *names)

    async def keep(self) -> None:
        """Write the file every `interval_s`, for the case that there is no orderly end."""
        while True:
            pause_s = None if self._path is None else self._config.interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
                self._changed.clear()
                continue
            await self.save()

    async def save(self) -> bool:
        """Write the file; return whether that went well. Nothing without a path."""
        if self._path is None:
            return False
        async with self._saving:
            try:
                await self._write(self._path)
            except OSError as error:
                if not self._failed:
                    _log.warning("the state is not saved: %s", error)
                self._failed = True
                return False
            self._failed = False
            return True

    # -- inside -----------------------------------------------------------------------------

    def _read(self, path: Path, most_bytes: int) -> None:
        self.check(self._config)
        _clear_away(path)
        try:
            self._found = read(path, self._config.max_age_s, most_bytes)
        except (OSError, SavedFault) as error:
            _log.warning("the saved state %s is not used: %s", path, error)
        if self._found is not None:
            self.salt = self._found[0].salt

    async def _write(self, path: Path) -> None:
        now = self._clock()
        head = Head(VERSION, sys.byteorder, time(), now, self.salt)
        pieces: Iterable[bytes] = chain(
            [msgspec.msgpack.encode(head)],
            self._dispatcher.export(self._way, now),
            self._by_bytes.export(),
        )
        writer = await asyncio.to_thread(Writer, path)
        try:
            for piece in pieces:  # between two of them the loop does other things
                await asyncio.to_thread(writer.add, piece)
            await asyncio.to_thread(writer.commit)
        finally:
            writer.discard()


def _clear_away(path: Path) -> None:
    """Remove what a gateway left that was killed while it wrote."""
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time() - draft.stat().st_mtime > _LEFT_OVER_S:
                draft.unlink()
