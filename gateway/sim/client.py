"""A load generator: plays conversations against one URL and measures what a user would.

Closed loop inside a conversation (the next turn waits for the answer), open between them (a
conversation starts when it is due). Times are divided by the time scale: engine seconds.
Connections only to the URL it is given; everything ends when the run does.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson

from gateway.sim.report import Record, Result, quantile
from gateway.sim.workload import Session, Turn
from gateway.tasks import spawn, stop

_DATA = b"data: "
_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10)


class LoadClient:
    """One run of traffic. `records` grows as requests are sent, one entry each."""

    def __init__(self, url: str, model: str, time_scale: float) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._scale = time_scale
        self._zero = time.monotonic()
        self.records: list[Record] = []
        self._lags: deque[float] = deque(maxlen=4096)

    def now(self) -> float:
        """Return engine seconds since the run began."""
        return (time.monotonic() - self._zero) / self._scale

    def lag_s(self) -> float:
        """Return the 99th percentile of how late this loop was, in wall seconds."""
        return quantile(sorted(self._lags), 0.99) or 0.0

    async def run(
        self,
        sessions: Sequence[Session],
        seconds: float,
        *,
        each_s: float = 0.5,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Play `sessions` for `seconds` engine seconds, then cut what is unfinished.

        `tick` is called every `each_s` wall seconds meanwhile.
        """
        self._zero = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(connector=connector, timeout=_LIMIT) as http:
            tasks = {spawn(self._play(http, s), name=s.id) for s in sessions}
            watch = spawn(self._watch(each_s, tick), name="watch")
            try:
                await asyncio.wait(tasks, timeout=seconds * self._scale)
            finally:
                await asyncio.gather(*(stop(task) for task in (*tasks, watch)))

    async def _watch(self, each_s: float, tick: Callable[[], None]) -> None:
        """Tick, and note how late this loop is: what it adds to every figure, in wall seconds."""
        due = time.monotonic() + each_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            now = time.monotonic()
            self._lags.append(now - before - 0.05)
            if now >= due:
                due = now + each_s
                tick()

    async def _play(self, http: aiohttp.ClientSession, session: Session) -> None:
        await self._sleep_until(session.start_s)
        messages: list[dict[str, Any]] = [{"role": "system", "content": session.system}]
        for turn in session.turns:
            await asyncio.sleep(turn.think_s * self._scale)
            messages.append({"role": "user", "content": turn.text})
            answer = await self._ask(http, session, messages, turn)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now()) * self._scale)

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        session: Session,
        messages: list[dict[str, Any]],
        turn: Turn,
    ) -> str | None:
        """Send one turn; return the answer's text, None if there is none to go on with."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if session.tools:
            body["tools"] = session.tools
        record = Record(session.cls, self.now())
        self.records.append(record)
        try:
            return await self._exchange(http, orjson.dumps(body), record)
        except (aiohttp.ClientError, TimeoutError):
            record.result = Result.FAILED
            return None
        finally:
            record.waited_s = self.now() - record.sent_at

    async def _exchange(
        self, http: aiohttp.ClientSession, body: bytes, record: Record
    ) -> str | None:
        headers = {"content-type": "application/json"}
        async with http.post(self._url, data=body, headers=headers) as response:
            record.backend = response.headers.get("x-gateway-backend", "")
            if response.status != 200:
                refused = response.status in (429, 503)
                record.result = Result.REFUSED if refused else Result.FAILED
                return None
            pieces: list[bytes] = []
            last: float | None = None
            async for piece in response.content.iter_any():
                pieces.append(piece)
                if b'"content":"' not in piece:
                    continue
                now = self.now()
                if last is None:
                    record.ttft_s = now - record.sent_at
                else:
                    record.longest_gap_s = max(record.longest_gap_s, now - last)
                last = now
        record.total_s = self.now() - record.sent_at
        return _read(b"".join(pieces), record, last)


def _read(body: bytes, record: Record, last: float | None) -> str | None:
    """Fill the record from a whole stream; return its text, None if it did not end properly."""
    text: list[str] = []
    complete = False
    for event in body.split(b"\n\n"):
        if not event.startswith(_DATA):
            continue
        data = event[len(_DATA) :]
        if data == b"[DONE]":
            complete = True
            continue
        value = orjson.loads(data)
        if usage := value.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens") or 0
        text += [choice["delta"].get("content") or "" for choice in value.get("choices", ())]
    if not complete or record.ttft_s is None or last is None:
        record.result = Result.FAILED
        return None
    record.result = Result.OK
    if record.completion_tokens > 1:
        decode_s = last - record.sent_at - record.ttft_s
        record.tpot_s = decode_s / (record.completion_tokens - 1)
    return "".join(text)
