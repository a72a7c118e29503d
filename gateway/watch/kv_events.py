"""Reads engines' KV events over ZMQ into the core's feeds.

One hub for all backends: together they get at most `TURN_S` of a turn of the event loop, by turns. A ZMQ descriptor tells only of the
change from nothing to something, so a woken reader goes on until every socket of it is empty.
Must never wait, and never let one engine's fault reach another's feed or the data path.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from gateway.core.event_feed import Feed
from gateway.extras import load_zmq

TURN_S: Final = 0.002
"""The most that all readers together take of one turn of the loop."""

REPLAY_TIMEOUT_S: Final = 5.0  # without a reply; a live engine answers within one step
RETRY_S, RETRY_MAX_S = 10.0, 600.0  # after a replay that was not answered; doubled each time
MAX_BACKLOG_BYTES: Final = 32 * 1024 * 1024
"""Batches of one engine that wait to be applied; beyond, they are dropped, and a gap shows."""

MAX_REPLAYS: Final = 4
"""At one time, over all backends: one may be tens of megabytes."""

# No limit: libzmq aborts the process when a connection whose queue was full is replaced by another
# (zeromq/libzmq#3937). So everything is read as it comes, and the limit is MAX_BACKLOG_BYTES.
_NO_HIGH_WATER: Final = 0
_MAX_BATCH_BYTES: Final = 64 * 1024 * 1024
_HEARTBEAT_MS: Final = 2000  # a link that went dead without a word is noticed within 3 of them
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5000
_NUMBER_BYTES: Final = 8
_END: Final = (2**64 - 1).to_bytes(_NUMBER_BYTES, "big")

_log = logging.getLogger("radixgate.watch")


@dataclass(slots=True, frozen=True)
class EventSource:
    """Where a backend publishes; `replay` None = it serves no replays."""

    backend: str
    endpoint: str
    replay: str | None


class EventWatch:
    """The readers of all backends that publish.

    Raises:
        MissingExtra: pyzmq is not installed.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._zmq = load_zmq("`kv_events`")
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._context = self._zmq.Context(io_threads=1)
        self._readers: dict[str, _Reader] = {}
        self._busy: deque[_Reader] = deque()
        self._scheduled = False
        self._replaying = 0
        self._queued: deque[_Reader] = deque()  # for a replay
        self.longest_turn_s = 0.0

    def set_sources(self, wanted: Iterable[tuple[EventSource, Feed]]) -> None:
        """Read exactly these from now on; what is unchanged goes on undisturbed."""
        new = {source.backend: (source, feed) for source, feed in wanted}
        for name, reader in list(self._readers.items()):
            if new.get(name) != (reader.source, reader.feed):
                self._readers.pop(name).close()
        for name, (source, feed) in new.items():
            if name not in self._readers:
                self._readers[name] = _Reader(self, source, feed)

    def close(self) -> None:
        """Close every socket."""
        self.set_sources(())
        self._busy.clear()
        self._context.destroy(linger=0)

    # -- for the readers --------------------------------------------------------------------

    def socket(self, kind: int, **options: int) -> Any:
        """Return a socket of the hub's context; `options` are ZMQ's, by name."""
        made = self._context.socket(kind)
        made.linger = 0
        for name, value in options.items():
            made.setsockopt(getattr(self._zmq, name), value)
        return made

    def listen(self, socket: Any, reader: "_Reader") -> None:
        """Wake `reader` when `socket` has something to say."""
        self._loop.add_reader(socket.getsockopt(self._zmq.FD), self.wake, reader)

    def close_socket(self, socket: Any) -> None:
        """Stop listening to a socket and close it."""
        self._loop.remove_reader(socket.getsockopt(self._zmq.FD))
        socket.close(0)

    def later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call something after a while."""
        return self._loop.call_later(delay_s, call)

    def may_replay(self, reader: "_Reader") -> bool:
        """Return whether a replay may begin; if not, `reader` is woken when one may."""
        if self._replaying < MAX_REPLAYS:
            self._replaying += 1
            return True
        if reader not in self._queued:
            self._queued.append(reader)
        return False

    def replay_over(self) -> None:
        """Note that a replay that was let begin has ended."""
        self._replaying -= 1
        if self._queued:
            self.wake(self._queued.popleft())

    def now(self) -> float:
        """Return the time, monotonic seconds."""
        return self._clock()

    def wake(self, reader: "_Reader") -> None:
        """Let `reader` work when its turn comes."""
        if not reader.woken and not reader.closed:
            reader.woken = True
            self._busy.append(reader)
        if not self._scheduled and self._busy:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    # -- inside -----------------------------------------------------------------------------

    def _turn(self) -> None:
        """Let the busy readers work by turns, until all are idle or the time is up."""
        started = now = self._clock()
        busy = self._busy
        while busy and now - started < TURN_S:
            reader = busy.popleft()
            if reader.work():
                busy.append(reader)
            else:
                reader.woken = False
            now = self._clock()
        self.longest_turn_s = max(self.longest_turn_s, now - started)
        self._scheduled = False
        if busy:
            self.wake(busy[0])


class _Reader:
    """One backend's sockets: the subscription, its monitor, and a replay while one is under way."""

    def __init__(self, hub: EventWatch, source: EventSource, feed: Feed) -> None:
        self.source = source
        self.feed = feed
        self.woken = False
        self.closed = False
        self.dropped = 0
        self._hub = hub
        self._zmq: Any = hub._zmq  # noqa: SLF001 - of the same module
        zmq = self._zmq
        self._replay: Any = None
        self._replay_due: asyncio.TimerHandle | None = None
        self._replied_at = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_S
        self._told: bool | None = None
        self._sub = hub.socket(
            zmq.SUB,
            RCVHWM=_NO_HIGH_WATER,
            MAXMSGSIZE=_MAX_BATCH_BYTES,
            IPV6=1,
            HEARTBEAT_IVL=_HEARTBEAT_MS,
            HEARTBEAT_TIMEOUT=2 * _HEARTBEAT_MS,
            RECONNECT_IVL=_RECONNECT_MS,
            RECONNECT_IVL_MAX=_RECONNECT_MAX_MS,
        )
        self._sub.subscribe(b"")
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._sub.get_monitor_socket(events)
        hub.listen(self._sub, self)
        hub.listen(self._monitor, self)
        self._sub.connect(source.endpoint)
        hub.wake(self)

    def close(self) -> None:
        """Close the sockets; the feed believes nothing any more."""
        self.closed = True
        self._end_replay()
        self._cancel_retry()
        self._hub.close_socket(self._monitor)
        self._sub.disable_monitor()
        self._hub.close_socket(self._sub)
        self.feed.unlinked()

    def work(self) -> bool:
        """Do one small piece of work; False = nothing is left, and every socket is empty."""
        if self.closed:
            return False
        try:
            busy = self._read_live() or self._read_monitor() or self.feed.step()
            busy = busy or self._read_replay()
        except Exception:  # noqa: BLE001 - a fault here must not end the others' reading
            _log.exception("backend %s: a KV event was not taken", self.source.backend)
            busy = True
        if self.feed.replay_from is not None and self._ask_replay(self.feed.replay_from):
            busy = True
        if not busy:
            self._tell()
        return busy

    # -- live ---------------------------------------------------------------------------------

    def _receive(self, socket: Any) -> list[bytes] | None:
        try:
            frames: list[bytes] = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames

    def _read_live(self) -> bool:
        frames = self._receive(self._sub)
        if frames is None:
            return False
        if self.feed.backlog_bytes > MAX_BACKLOG_BYTES:
            self.dropped += 1
        elif len(frames) >= 2 and len(frames[-2]) == _NUMBER_BYTES:
            self.feed.live(int.from_bytes(frames[-2], "big"), frames[-1])
        else:
            self.feed.malformed += 1
        return True

    def _read_monitor(self) -> bool:
        frames = self._receive(self._monitor)
        if frames is None:
            return False
        event = int.from_bytes(frames[0][:2], "little")
        if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.feed.linked()
        elif event == self._zmq.EVENT_DISCONNECTED:
            self._end_replay()
            self.feed.unlinked()
        return True

    # -- replays ------------------------------------------------------------------------------

    def _ask_replay(self, number: int) -> bool:
        """Ask for the batches from `number` on, over a new socket: old replies must not mix in.

        False = not yet: others are at it.
        """
        self._end_replay()
        if self.source.replay is None:
            self.feed.replay_asked()
            self.feed.replay_failed()
            return True
        if not self._hub.may_replay(self):
            return False
        self.feed.replay_asked()
        zmq = self._zmq
        self._replay = self._hub.socket(
            zmq.DEALER, RCVHWM=_NO_HIGH_WATER, MAXMSGSIZE=_MAX_BATCH_BYTES, IPV6=1
        )
        self._replay.connect(self.source.replay)
        self._hub.listen(self._replay, self)
        self._replay.send_multipart([b"", number.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)
        self._replied_at = self._hub.now()
        self._replay_due = self._hub.later(REPLAY_TIMEOUT_S, self._check_replay)
        return True

    def _read_replay(self) -> bool:
        if self._replay is None:
            return False
        frames = self._receive(self._replay)
        if frames is None:
            return False
        self._replied_at = self._hub.now()
        if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
            self.feed.malformed += 1
        elif frames[-2] == _END:
            self._end_replay()
            self._retry_s = RETRY_S
            self.feed.replay_ended()
        else:
            self.feed.replayed(int.from_bytes(frames[-2], "big"), frames[-1])
        return True

    def _check_replay(self) -> None:
        """Give the replay up if nothing came for a while."""
        left = self._replied_at + REPLAY_TIMEOUT_S - self._hub.now()
        if left > 0:
            self._replay_due = self._hub.later(left, self._check_replay)
            return
        self._end_replay()
        self.feed.replay_failed()
        self._cancel_retry()
        self._retry = self._hub.later(self._retry_s, self._try_again)
        self._retry_s = min(RETRY_MAX_S, 2.0 * self._retry_s)
        self._hub.wake(self)

    def _try_again(self) -> None:
        self._retry = None
        self.feed.ask_again()
        self._hub.wake(self)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _end_replay(self) -> None:
        if self._replay_due is not None:
            self._replay_due.cancel()
            self._replay_due = None
        if self._replay is not None:
            self._hub.close_socket(self._replay)
            self._replay = None
            self._hub.replay_over()

    def _tell(self) -> None:
        """Log each turn between exact and approximate, once the dust has settled."""
        if self.feed.exact == self._told:
            return
        if self.feed.exact:
            _log.info("backend %s: prefix index is exact (KV events)", self.source.backend)
        elif self.feed.refuted:
            _log.warning(
                "backend %s: its KV events never foretell its hits; is the model's `tokenizer` (and "
                "chat template) the engine's? index approximate",
                self.source.backend,
            )
        elif self._told:
            _log.warning("backend %s: KV events broke off; index approximate", self.source.backend)
        self._told = self.feed.exact
