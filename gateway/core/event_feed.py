"""One engine's stream of KV events put in order: gaps, replays, restarts, and whether to believe it.

Batches are numbered. Those that come live and those of a replay enter here in any mixture; what is
applied is the engine's own order without a hole, else everything is forgotten. Sans-io: the reader
(watch/kv_events.py) hands in what came, sends the replay requests asked for here, and calls `step`
while it has time. Must never read a clock, and never raise for what an engine says.

A replay asks for the last batch already taken in as well: that it comes back unchanged proves that
it is the same process, whose numbers go on.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from gateway.core.event_pieces import pieces
from gateway.core.exact import Holdings
from gateway.core.kv_events import SLICE_BYTES, Cleared, Decoder, Event, Malformed, Stored

HELD_BATCHES: Final = 20_000  # live batches kept during a replay: twice vLLM's own replay buffer
HELD_BYTES: Final = 64 * 1024 * 1024
_LOST_BLOCKS: Final = 64  # a few are lost where an engine keeps a copy that it did not tell of
_SWEEP_BLOCKS: Final = 2000  # about 0.2 ms
_STEP_BLOCKS: Final = 64  # some 0.2 ms
_PAUSE: Final[list[Stored]] = []  # among pieces: enough for one step


class Feed:
    """Keeps `holdings` equal to what the engine holds, and says whether it is.

    `exact` = all the engine holds is known and the stream is unbroken; `on_change` is called after
    each turn of it, and when an adapter is heard of; `on_empty` when the engine holds nothing any more:
    it restarted, or cleared its cache. `replay_from` is the first batch that the
    reader should ask for (None = none); it calls `replay_asked` when it did, and what still comes of
    an earlier request must not enter. `capacity_blocks` is the engine's cache in its own blocks;
    None = unknown.

    Counters: `events` read, `gaps` in the numbering, `losses` that no replay could fill (all is
    forgotten), `restarts` of the engine, `malformed` batches, `unread` events of unknown kinds.
    `refuted` = answers showed that what is told does not fit our chains, until a restart.
    """

    def __init__(
        self,
        holdings: Holdings,
        on_change: Callable[[], None],
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:
        self.holdings = holdings
        self.capacity_blocks: int | None = None
        self.replay_from: int | None = None
        self.exact = self.refuted = False
        self.events = self.gaps = self.losses = self.restarts = 0
        self.malformed = self.unread = 0
        self._on_change = on_change
        self._on_empty = on_empty
        self._decoder = Decoder()
        self._adapters = 0
        self._linked = self._met = False  # now, and ever
        self._complete = False  # nothing the engine stored before our first batch is unknown
        self._current = False  # all that came was applied, up to here or (a gap) shortly before
        self._unsure = (
            False  # the link was down, and no batch has come since to tell what we missed
        )
        self._noticed = False  # a restart that the metrics have not told yet
        self._calm_blocks = 0  # stored since the last event about a block nobody told of
        # the numbering
        self._next: int | None = None  # the batch that is due; None = before the first
        self._last = b""  # the batch before it
        self._last_live = -1
        # a replay: while `_filling`, live batches wait in `_held`
        self._filling = False
        self._proof = b""  # what it must begin with
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        # work
        self._ready: deque[bytes] = deque()
        self._ready_bytes = 0
        self._open: Iterator[Event | list[Stored]] = iter(())

    @property
    def backlog_bytes(self) -> int:
        """Bytes of batches that came and are not applied yet, those kept for a replay included."""
        return self._ready_bytes + self._held_bytes

    # -- what the reader tells ----------------------------------------------------------------

    def linked(self) -> None:
        """Note that the connection stands (again): what was missed must be asked for."""
        if not self._met and not self._complete:
            # batches came before this news: they are in the middle, and all before them is asked for
            self._forget()
            self._next = None
        self._met = self._linked = True
        self._ask()
        self._judge()

    def unlinked(self) -> None:
        """Note that the connection is gone: the engine may evict unseen."""
        self._linked = False
        self._judge()

    def restart_told(self) -> None:
        """Note that the metrics show another process; the stream may have shown it before."""
        if self._noticed:
            self._noticed = False
        else:
            self._restart()

    def ask_again(self) -> None:
        """Try once more what a replay that failed left open; nothing when there is nothing to gain."""
        if not self._linked or self._filling or (self._complete and not self._unsure):
            return
        if not self._complete:
            self._forget()
            self._next = None
        self._ask()
        self._judge()

    def live(self, number: int, payload: bytes) -> None:
        """Take in a batch as published."""
        if number <= self._last_live:
            self._notice_restart()
        self._last_live = number
        if not self._filling and self._next is not None and number > self._next:
            self.gaps += 1
            self._ask()
        if self._filling:
            self._hold(number, payload)
        else:
            self._accept(number, payload)
        self._judge()

    def replay_asked(self) -> None:
        """Note that the request for `replay_from` is sent."""
        self.replay_from = None

    def replayed(self, number: int, payload: bytes) -> None:
        """Take in a batch of the replay; those come in the order of their numbers."""
        if not self._filling:
            return
        if self._proof:
            proof, self._proof = self._proof, b""
            if self._next is not None and number == self._next - 1:
                if payload != proof:
                    self._notice_restart()
                return
        if self._next is not None and number > self._next:
            self._lose()
        self._accept(number, payload)
        self._judge()

    def replay_ended(self) -> None:
        """Note that the engine has sent all it still had."""
        if not self._filling:
            return
        if self._proof:  # it has never sent the batch we had last
            self._notice_restart()
            return
        if self._next is None and not self._held:  # nothing ever happened there
            self._next = 0
            self._complete = True
        self._unsure = False
        self._resume()

    def replay_failed(self) -> None:
        """Note that the engine offers no replay, or did not answer in time."""
        if not self._filling:
            return
        self._unsure = not self._held
        self._resume()

    # -- work -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do a little of the work that waits, about 1 ms at most; False = there is none."""
        left = _STEP_BLOCKS
        try:
            for piece in self._open:
                left -= self._apply_each(piece) if isinstance(piece, list) else self._apply(piece)
                if left <= 0 or piece == _PAUSE:
                    return True
        except Malformed:
            self._break_off()
            return True
        if left < _STEP_BLOCKS:
            return True
        if self._ready:
            payload = self._ready.popleft()
            self._ready_bytes -= len(payload)
            self._open = self._read(payload)
            return True
        if not self._current and not self._filling:
            self._current = True
            self._judge()
        return self.holdings.sweep(_SWEEP_BLOCKS)

    # -- inside ---------------------------------------------------------------------------------

    def _notice_restart(self) -> None:
        self._restart()
        self._noticed = True

    def _restart(self) -> None:
        """Begin again with another process: its cache is empty, its numbers begin at 0."""
        self.restarts += 1
        self.refuted = False
        self._forget()
        self._on_empty()
        self._next = None
        self._last_live = -1
        self._drop_held()
        if self._linked:
            self._ask()
        self._judge()

    def _ask(self) -> None:
        """Ask for everything from the last batch on, or from the very first."""
        self._filling = True
        self.replay_from = max(0, (self._next or 0) - 1)
        self._proof = self._last if self._next else b""

    def _accept(self, number: int, payload: bytes) -> None:
        """Let a batch be applied if it is due; it may be the first one ever."""
        if self._next is None:
            self._complete = number == 0
        elif number != self._next:
            return
        self._next = number + 1
        self._last = payload
        self._unsure = False
        self._ready.append(payload)
        self._ready_bytes += len(payload)

    def _hold(self, number: int, payload: bytes) -> None:
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        while len(self._held) > HELD_BATCHES or self._held_bytes > HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _resume(self) -> None:
        """End the replay, and go on with what came live meanwhile."""
        self._filling = False
        self._proof = b""
        self.replay_from = None
        for number, payload in self._held:
            if self._next is not None and number > self._next:
                self._lose()
            self._accept(number, payload)
        self._drop_held()
        self._judge()

    def _lose(self) -> None:
        """Give up what is known: batches are missing, and the next one begins a new count."""
        self.losses += 1
        self._forget()
        self._next = None

    def _forget(self) -> None:
        self._ready.clear()
        self._ready_bytes = 0
        self._open = iter(())
        self._complete = self._current = self._unsure = False
        self._calm_blocks = 0
        self.holdings.clear()

    def _read(self, payload: bytes) -> Iterator[Event | list[Stored]]:
        """Yield what a batch says, in pieces; a long one is read bit by bit, with pauses."""
        for batch in self._decoder.slices(payload):
            if len(payload) > SLICE_BYTES:
                yield _PAUSE
            self.unread += batch.unknown
            self.events += len(batch.events)
            yield from pieces(batch.events, _STEP_BLOCKS, self.holdings.block_tokens)

    def _break_off(self) -> None:
        """Note a batch that cannot be read: what it said is lost."""
        self.malformed += 1
        self.losses += 1
        self._open = iter(())
        self._complete = False
        self._calm_blocks = 0
        self.holdings.clear()
        self._judge()

    def _apply(self, event: Event) -> int:
        """Apply one event; return how many blocks it was about, at least 1."""
        holdings = self.holdings
        unknown = holdings.unknown + holdings.broken
        holdings.apply(event)
        if isinstance(event, Cleared):
            self._on_empty()
            blocks = 1
        else:
            blocks = len(event.block_hashes) or 1
        if not self._complete:
            self._count_calm(event, calm=holdings.unknown + holdings.broken == unknown)
        self._look()
        return blocks

    def _apply_each(self, events: list[Stored]) -> int:
        """Apply events that store one block each; return how many."""
        if self._complete:
            self.holdings.store_each(events)
            self._look()
        else:
            for event in events:
                self._apply(event)
        return len(events)

    def _look(self) -> None:
        """Notice what the last event made of the holdings."""
        holdings = self.holdings
        if self._complete and holdings.lost > _LOST_BLOCKS and 2 * holdings.lost > holdings.stored:
            self._doubt()
        if holdings.full:
            self._judge()
        if len(holdings.adapters) != self._adapters:
            self._adapters = len(holdings.adapters)
            self._on_change()

    def _doubt(self) -> None:
        """Note that most of what the engine stores cannot be placed: its names are not as we know."""
        self.losses += 1
        self._complete = False
        self._judge()

    def refute(self) -> None:
        """Believe none of it: the engine's answers tell of other hits than its events."""
        self.refuted = True
        self._judge()

    def _count_calm(self, event: Event, *, calm: bool) -> None:
        """Notice when nothing can be left that was stored before our first batch.

        So it is when the cache was emptied, or when as much as fits in it was stored since the last
        event about a block nobody told of: a block in use is told of by what is stored after it.
        """
        if isinstance(event, Cleared):
            self._complete = True
        elif not calm:
            self._calm_blocks = 0
        elif isinstance(event, Stored):
            self._calm_blocks += len(event.block_hashes)
            capacity = self.capacity_blocks
            self._complete = capacity is not None and self._calm_blocks >= capacity
        if self._complete:
            self._judge()

    def _judge(self) -> None:
        exact = (
            self._linked
            and self._complete
            and self._current
            and not self._unsure
            and not self.holdings.full
            and not self.refuted
        )
        if exact != self.exact:
            self.exact = exact
            self._on_change()
